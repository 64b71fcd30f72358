"""`with_rank_notices`: what a plan of several ranks says beyond one rank's: all GPUs of the machine, and how ranks
meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
from tandem.planner.choices.decision import Decision
from tandem.planner.forecast.speeds import PCIE_GBPS
from tandem.planner.forecast.sums import gpu_lane
from tandem.planner.memory import gib
from tandem.planner.notices import idle_gpus
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import gpu_of_rank
from tandem.spec.model_config import ModelConfig


def with_rank_notices(plan: Plan, model: ModelConfig, machine: Machine) -> Plan:
    """model and machine: of all ranks together."""
    if plan.ranks == 1:
        return plan
    used = [gpu for rank in range(plan.ranks) for gpu in gpu_of_rank(machine, rank, plan.ranks) if plan.gpu is not None]
    first, *others = plan.decisions
    notices = (*plan.notices, *_idle(plan, machine, used))
    gpu = None if plan.gpu is None else replace(plan.gpu, rank_uuids=tuple(gpu.uuid for gpu in used))
    return replace(plan, gpu=gpu, decisions=(first, *_decisions(plan, model, used), *others), notices=notices)


def _decisions(plan: Plan, model: ModelConfig, used: list[Gpu]) -> Iterator[Decision]:
    if used:
        numbers = ", ".join(str(gpu.number) for gpu in used)
        least = gib(min(gpu.free_bytes for gpu in used))
        yield Decision("GPUs", numbers, f"one of each rank; all plan with the least free memory, {least}")
    nbytes = model.hidden * (2 if plan.dtype == "bfloat16" else 4)
    lane = gpu_lane(plan.gpu, plan.ranks, PCIE_GBPS)
    yield Decision("sums of ranks", lane.way, f"{lane.text(nbytes)}, of one token; the start finds the fastest way")
    if plan.gpu is not None:
        whole = plan.drafts or plan.num_slots > 0 or plan.gpu.attention == "flashinfer"  # as `Engine` pauses on a GPU
        pieces = "chunks" if whole else "layers"
        why = "beside steps, or in graphs beside them, sums would pair in another order on each rank"
        yield Decision("prompts", f"{pieces} between steps", why)


def _idle(plan: Plan, machine: Machine, used: list[Gpu]) -> Iterator[str]:
    numbers = {gpu.number for gpu in used}
    others = [gpu for gpu in machine.gpus if gpu.number not in numbers]
    if others and used:
        yield idle_gpus(others, f"--tp {plan.ranks} uses {len(used)}; CUDA_VISIBLE_DEVICES says which")
