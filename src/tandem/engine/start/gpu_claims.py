"""`undisputed_plan`: a plan with memory that no other start is about to fill, as far as there is such."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from tandem.flags.engine_config import EngineConfig
from tandem.flags.env import visible_gpus
from tandem.flags.ways import several_gpus_typed
from tandem.machine.gpus import GpuHolder
from tandem.machine.machine import Machine
from tandem.machine.memory_claims import Claim, MemoryClaims
from tandem.planner.forecast.ledger import RAM, VRAM
from tandem.planner.memory import gib
from tandem.planner.plan import Plan
from tandem.planner.ways import WayChoice

_log = logging.getLogger(__name__)

WORTH_A_WARNING_BYTES = 1 << 30
PlannedWay = tuple[WayChoice, Plan]


def undisputed_plan(
    config: EngineConfig,
    machine: Machine,
    claims: MemoryClaims | None,
    planned: Callable[[Machine], PlannedWay],
    machine_now: Callable[[], Machine],
) -> tuple[WayChoice, Plan, Machine]:
    """The plan, whose memory is claimed, and the machine that it was made for: what others are about to take counts as
    taken. machine_now: the same machine, where other memory is free by now. claims: None: nobody is asked, nor without
    a GPU. Raises as `planned`.

    Flags for several GPUs, and CUDA_VISIBLE_DEVICES, are never refused for others: then memory of GPUs counts as free,
    and a warning says who takes it.
    """
    if claims is None or not asks_others(config, machine):
        return *planned(machine), machine
    with claims.turn():
        machine, others = beside_others(machine, claims, machine_now)
        free_bytes, counted = machine.available_memory, _gpus_count(config)
        machine = with_claims(config, machine, others)
        _warn_of_ram(machine.available_memory, free_bytes, others)
        if counted:
            _warn(machine, [gpu.uuid for gpu in machine.gpus], "what that takes is left to it")
        choice, plan = planned(machine)
        left = left_bytes(plan, machine)
        claims.take(left, _ram_left(plan, machine))
    if not counted:
        _warn(machine, left, "it is used all the same, as asked, and may be too small for both")
        _warn(machine, {gpu.uuid for gpu in machine.gpus} - set(left), "another one is taken")
    return choice, plan, machine


def asks_others(config: EngineConfig, machine: Machine) -> bool:
    """Whether a start looks at what others are about to take."""
    return config.device != "cpu" and bool(machine.gpus)


def beside_others(
    machine: Machine, claims: MemoryClaims, machine_now: Callable[[], Machine]
) -> tuple[Machine, list[Claim]]:
    """The machine with the memory that is free by now, and the claims on it; in a turn."""
    if claims.changed and len((now := machine_now()).gpus) == len(machine.gpus):  # else the driver did not answer
        machine = replace(machine, gpus=now.gpus, available_memory=now.available_memory)
    return machine, claims.others()


def with_claims(config: EngineConfig, machine: Machine, others: Collection[Claim]) -> Machine:
    """The machine as others leave it, once they have what they claim."""
    return _with_ram_left(_with_gpus_left(machine, others, _gpus_count(config)), others)


def _gpus_count(config: EngineConfig) -> bool:
    """Whether claims on GPUs count: no flag names several, and no variable the ones to take."""
    return not several_gpus_typed(config) and visible_gpus() is None


def _with_gpus_left(machine: Machine, others: Iterable[Claim], counted: bool) -> Machine:
    """A GPU's holder is the one that leaves least."""
    holders: dict[str, GpuHolder] = {}
    for claim in others:
        for uuid, nbytes in claim.gpu_left_bytes.items():
            if uuid not in holders or nbytes < holders[uuid].left_bytes:
                holders[uuid] = GpuHolder(claim.whose, nbytes)
    return machine.with_holders(holders, counted) if holders else machine


def _with_ram_left(machine: Machine, others: Iterable[Claim]) -> Machine:
    """Counts whatever flags say: none says which memory."""
    left = [claim.ram_left_bytes for claim in others if claim.ram_left_bytes is not None]
    least = min(left, default=machine.available_memory)
    counts = least < machine.available_memory and not machine.limited_memory
    return replace(machine, available_memory=least) if counts else machine


def _warn_of_ram(left_bytes: int, free_bytes: int, others: Iterable[Claim]) -> None:
    if free_bytes - left_bytes > WORTH_A_WARNING_BYTES:
        whose = next(claim.whose for claim in others if claim.ram_left_bytes == left_bytes)
        what = f"{gib(free_bytes - left_bytes)} of {gib(free_bytes)} of free CPU memory"
        _log.warning("%s", f"{what} are about to be filled by {whose}: they are left to it")


def _warn(machine: Machine, uuids: Collection[str], so: str) -> None:
    for gpu in machine.gpus:
        if gpu.holder is not None and gpu.uuid in uuids:
            whose = gpu.holder.text
            _log.warning("%s", f"GPU {gpu.number} ({gpu.name}) is about to be filled by {whose}: {so}")


def left_bytes(plan: Plan, machine: Machine) -> dict[str, int]:
    """Bytes of each GPU of the plan that stay free, by UUID."""
    room = {gpu.uuid: gpu.room for gpu in machine.gpus if gpu.uuid}
    left: dict[str, int] = {}
    for uuid, nbytes in _used_bytes(plan):
        if uuid in room:
            left[uuid] = max(0, left.get(uuid, room[uuid]) - nbytes)
    return left


def _ram_left(plan: Plan, machine: Machine) -> int | None:
    """Bytes of CPU memory that stay free; None: as far as its control group goes, which others may not be in."""
    total = sum(ledger.total_bytes for ledger in plan.ledgers if ledger.place == RAM)
    return None if machine.limited_memory else max(0, machine.available_memory - total * plan.ranks)


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
