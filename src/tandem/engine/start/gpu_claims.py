"""`undisputed_plan`: a plan on GPUs that no other start is about to fill, as far as there are such."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from tandem.flags.engine_config import EngineConfig
from tandem.flags.env import visible_gpus
from tandem.flags.ways import way_is_open
from tandem.machine.gpu_locks import GpuLocks
from tandem.machine.gpus import GpuHolder
from tandem.machine.machine import Machine
from tandem.planner.forecast.ledger import VRAM
from tandem.planner.plan import Plan
from tandem.planner.ways import WayChoice

_log = logging.getLogger(__name__)

PlannedWay = tuple[WayChoice, Plan]


def undisputed_plan(
    config: EngineConfig, machine: Machine, locks: GpuLocks | None, planned: Callable[[Machine], PlannedWay]
) -> tuple[WayChoice, Plan, Machine]:
    """The plan, whose GPUs are locked, and the machine that it was made for: what others are about to take counts as
    taken, and a plan is made again. locks: None: nobody is asked. Raises as `planned`.

    Flags that say how many GPUs, and CUDA_VISIBLE_DEVICES, are never refused for others: then the memory counts as
    free, and a warning says who takes it.
    """
    holders: dict[str, GpuHolder] = {}
    counted = way_is_open(config) and visible_gpus() is None
    while True:
        choice, plan = planned(machine)
        if locks is None:
            return choice, plan, machine
        left = left_bytes(plan, machine)
        disputed = locks.take(left)
        new = {uuid: holder for uuid, holder in disputed.items() if uuid not in holders}
        if not new:
            if not counted:
                _warn(machine, disputed, "it is used all the same, as asked, and may be too small for both")
            return choice, plan, machine
        _warn(machine, new, "what that takes is left to it" if counted else "another one is taken if there is one")
        holders |= new
        machine = machine.with_holders(holders, counted)


def _warn(machine: Machine, holders: Mapping[str, GpuHolder], so: str) -> None:
    for gpu in machine.gpus:
        if gpu.uuid in holders:
            whose = holders[gpu.uuid].text
            _log.warning("%s", f"GPU {gpu.number} ({gpu.name}) is about to be filled by {whose}: {so}")


def left_bytes(plan: Plan, machine: Machine) -> dict[str, int]:
    """Bytes of each GPU of the plan that stay free, by UUID."""
    free = {gpu.uuid: gpu.free_bytes for gpu in machine.gpus if gpu.uuid}
    for uuid, nbytes in _used_bytes(plan):
        if uuid in free:
            free[uuid] -= nbytes
    used = {uuid for uuid, _ in _used_bytes(plan)}
    return {uuid: max(0, nbytes) for uuid, nbytes in free.items() if uuid in used}


def _used_bytes(plan: Plan) -> Iterator[tuple[str, int]]:
    """UUIDs of GPUs, and bytes that are taken of each. What is not of one stage's layers is equally of all."""
    gpu = plan.gpu
    if gpu is None:
        return
    total = sum(ledger.total_bytes for ledger in plan.ledgers if ledger.place == VRAM)
    if gpu.stages:
        rest = total - sum(stage.nbytes for stage in gpu.stages)
        yield from ((stage.uuid, stage.nbytes + rest // len(gpu.stages)) for stage in gpu.stages)
    else:
        yield from ((uuid, total) for uuid in gpu.rank_uuids or (gpu.uuid,))
