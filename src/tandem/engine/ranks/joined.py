"""The group that a rank joins: on the CPU, or on its GPU; and the GPUs of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tandem.kernels.ranks.group import Group
from tandem.kernels.ranks.meeting import Meeting
from tandem.kernels.ranks.shm import ShmGroup
from tandem.planner.plan import Plan

if TYPE_CHECKING:
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup


def cpu_group(meeting: Meeting) -> Group:
    """Raises EngineError where there is no memory to share."""
    own = ShmGroup(0, meeting.ranks) if meeting.rank == 0 else None
    path = meeting.share("memory", b"" if own is None else own.path.encode())[0].decode()
    return own or ShmGroup(meeting.rank, meeting.ranks, path)


def gpu_group(meeting: Meeting, device: torch.device) -> GpuGroup:
    """Raises EngineError where no way between the GPUs works."""
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup  # Triton's packages are there only where a GPU is

    return GpuGroup(meeting, device)


def gpus_of_first(plan: Plan, meeting: Meeting) -> Plan:
    """A plan that each rank has made by itself, with the GPUs of the first one's: each sees others as free."""
    if plan.gpu is None:
        return plan
    uuids = meeting.share("gpus", ",".join(plan.gpu.rank_uuids).encode())[0].decode()
    return replace(plan, gpu=replace(plan.gpu, rank_uuids=tuple(uuids.split(","))))
