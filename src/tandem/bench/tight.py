"""Plans that fill a small GPU, run whole with made-up weights: memory planned and used, speed predicted and measured.

A small GPU is a large one of which another process holds all but so much. Kernels whose scratch goes by the GPU's size
are told the small one's. What is used is what the whole GPU lost meanwhile: contexts, libraries and graphs are in it.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tandem.bench.architectures import named_config
from tandem.bench.probes import MachineProbe
from tandem.bench.sample import (
    PROMPTS,
    STEPS,
    WARM_STEPS,
    RunningSample,
    prompt_seconds,
    repeated,
    running_plan,
    step_seconds,
    with_experts,
)
from tandem.bench.stored import stored_as
from tandem.engine.start.loader import use_one_torch_thread
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu, detect_gpus
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.ledger import VRAM
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.prediction import CONTEXT, PROMPT
from tandem.planner.forecast.speeds import GIB, Speeds
from tandem.planner.plan import Plan

CLOSE = 0.03  # of what is planned, by which the GPU memory in use may differ
HOLDER = """
import sys, torch
left = int(sys.argv[1])
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - left), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""
HOLDER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TightCase:
    """gpu_gib: of the small GPU. experts: of a layer, 0: as the architecture has them; fewer fit into RAM, and the GPU
    takes as much. dense: as dense matrices are stored. layers: the first ones, 0: all. scratch_gib: memory of the GPU
    that kernels' scratch goes by, 0: `gpu_gib`."""

    name: str
    gpu_gib: int
    experts: int = 0
    dense: str = "bf16"
    flags: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 0
    scratch_gib: int = 0

    @property
    def scratch_bytes(self) -> int:
        return (self.scratch_gib or self.gpu_gib) * GIB


CASES = (
    TightCase("deepseek-v3", 24, 16, "fp8", {"kt_method": "INT4", "mem_fraction_static": 0.97}),
    TightCase("qwen3.5-35b-a3b", 8, flags={"kt_method": "INT4"}),
    TightCase(  # wide experts in bf16: most memory of unpacked ones and of rows, as on 80 GB
        "mixtral-8x7b", 12, layers=4, scratch_gib=80, flags={"mem_fraction_static": 0.95, "max_total_tokens": 16640},
    ),
)  # fmt: skip
LASTING = ("dense weights", "experts", "KV cache", "states", "rotary tables", "ring", "exchanges")
"""Entries of a plan that are there before a step; all others are its workspace."""


class MemoryFigures(NamedTuple):
    """A run's figures: bytes of GPU memory at most, and those that PyTorch held and used of them; tokens per second of
    a prompt of so many tokens, and of one answer."""

    used: int
    held: int
    allocated: int
    prompt_tokens: int
    prompt: float
    decode: float


def tight_question(case: TightCase, machine: Machine, speeds: Speeds) -> PlanQuestion:
    """With experts in bf16, which are rounded while loading."""
    model = named_config(case.name, None)
    model = with_experts(model, case.experts or model.moe.experts.count)
    model = dataclasses.replace(model, layers=model.layers[: case.layers or None])
    config = EngineConfig.from_keywords(case.name, **case.flags)
    return PlanQuestion(config, model, machine, stored_as(model, case.dense, "bf16"), speeds)


def cut(machine: Machine, gpu: Gpu, case: TightCase) -> Machine:
    """With this GPU alone, as if it had so much memory."""
    free = min(gpu.free_bytes, case.gpu_gib * GIB)
    small = dataclasses.replace(gpu, memory_bytes=case.scratch_bytes, free_bytes=free)
    return dataclasses.replace(machine, gpus=(small,))


@contextmanager
def held(left: int) -> Iterator[None]:
    """Another process holds all GPU memory but so many bytes. Raises ConfigError where it cannot."""
    command = [sys.executable, "-P", "-c", HOLDER, str(left)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        if not child.stdout.readline().strip():
            raise ConfigError("the process that holds GPU memory ended at once; is a GPU there, and free?")
        yield
    finally:
        child.communicate(timeout=HOLDER_SECONDS)


@contextmanager
def sized_as(nbytes: int) -> Iterator[None]:
    """Kernels of experts take scratch as on a GPU of so many bytes."""
    from tandem.kernels.gpu.prompts import products  # Triton is there only where a GPU is

    size = products._memory
    setattr(products, "_memory", lambda device: nbytes)  # noqa: B010 (its own is cached)
    try:
        yield
    finally:
        setattr(products, "_memory", size)  # noqa: B010


def measured(case: TightCase, machine: Machine) -> list[dict[str, Any]]:
    """Rows: of memory, of decoding, of a prompt."""
    use_one_torch_thread()
    free_bytes = case.gpu_gib * GIB
    with held(free_bytes), sized_as(case.scratch_bytes):
        gpus, why = detect_gpus()  # before this process has a context, which the plan's workspace has to hold
        if not gpus:
            raise ConfigError(f"no GPU to cut: {why}")
        small = cut(machine, gpus[0], case)
        probe = MachineProbe(small)
        torch.cuda.empty_cache()
        question = tight_question(case, small, wished_speeds(MachineWish(), small, probe.speeds()))
        plan = question.plan()
        whole = dataclasses.replace(plan, radix_cache=False)  # the same prompt is computed several times
        run = ran(running_plan(question, whole, question.model), whole, gpus[0].free_bytes, probe)
        speeds = wished_speeds(MachineWish(), small, probe.speeds())
    return rows(case, dataclasses.replace(question, speeds=speeds), plan, run)


def ran(running: RunningSample, plan: Plan, free: int, probe: MachineProbe) -> MemoryFigures:
    """free: bytes of GPU memory before there was anything. The longest chunk comes first: it takes most."""
    engine, most = running.engine, [free]

    def look() -> None:
        most.append(torch.cuda.mem_get_info()[0])

    look()
    prompt_seconds(engine, min(plan.max_step_tokens, plan.context_length - 1))
    look()
    tokens = min(PROMPT, plan.context_length - 1)
    prompt_seconds(engine, tokens)  # compiles kernels for so many rows
    prompts = repeated(lambda: prompt_seconds(engine, tokens), PROMPTS, 2 * PROMPTS, [])
    probe.add(running.figures())
    prompt_seconds(engine, CONTEXT, keep=True)
    for _ in range(WARM_STEPS):
        engine.step()
    steps = repeated(lambda: step_seconds(engine), STEPS, 4 * STEPS)
    probe.add(running.figures())
    look()
    engine.abort("")
    engine.step()
    torch_bytes = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    rate = tokens / statistics.median(prompts)
    return MemoryFigures(free - min(most), *torch_bytes, tokens, rate, 1 / statistics.median(steps))


def rows(case: TightCase, question: PlanQuestion, plan: Plan, readings: MemoryFigures) -> list[dict[str, Any]]:
    """As they are kept."""
    keys = {
        "bench": "plan_tight", "config": case.name, "experts": question.model.moe.experts.count, "layers": case.layers,
        "gpu_gib": case.gpu_gib, "dense": case.dense, "flags": dict(case.flags), "given_up": given_up(plan),
        "context": plan.context_length,
    }  # fmt: skip
    (vram,) = (ledger for ledger in plan.ledgers if ledger.place == VRAM)
    ratio = readings.used / vram.total_bytes
    lasting = sum(entry.nbytes for entry in vram.entries if entry.name in LASTING)
    memory = {
        "what": "memory", "gpu_planned": vram.total_bytes, "gpu_used": readings.used, "gpu_ratio": round(ratio, 4),
        "gpu_free": vram.free_bytes, "torch_held": readings.held, "torch_allocated": readings.allocated,
        "workspace_planned": vram.total_bytes - lasting, "workspace_used": readings.used - lasting,
        "workspace_allocated": readings.allocated - lasting,
        "planned": {entry.name: entry.nbytes for entry in vram.entries if entry.nbytes},
        "holds": abs(ratio - 1) <= CLOSE,
    }  # fmt: skip
    predicted = question.predicted(plan, (1,), CONTEXT, readings.prompt_tokens)
    prompt = f"prompt of {readings.prompt_tokens}"
    speeds = [("decoding", predicted.decode[1], readings.decode), (prompt, predicted.prompt, readings.prompt)]
    return [keys | memory, *(
        keys | {
            "what": name, "predicted_low": round(expected.low, 1), "predicted_high": round(expected.high, 1),
            "measured": round(rate, 1), "holds": expected.low <= rate <= expected.high,
        }
        for name, expected, rate in speeds
    )]  # fmt: skip


def given_up(plan: Plan) -> str:
    return next((each.value for each in plan.decisions if each.name == "made to fit"), "")
