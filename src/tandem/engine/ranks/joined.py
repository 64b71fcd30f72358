"""The group that a rank joins: on the CPU, or on its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tandem.kernels.ranks.group import Group
from tandem.kernels.ranks.meeting import Meeting
from tandem.kernels.ranks.shm import ShmGroup

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
