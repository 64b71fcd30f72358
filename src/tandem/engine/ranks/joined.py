"""The group that a rank joins: on the CPU, or on its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tandem.kernels.ranks.group import Group
from tandem.kernels.ranks.meeting import Meeting

if TYPE_CHECKING:
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup


def cpu_group(meeting: Meeting) -> Group:
    from tandem.kernels.ranks.gloo import GlooGroup  # not every build of torch has it

    return GlooGroup(meeting.rank, meeting.ranks, meeting.file)


def gpu_group(meeting: Meeting, device: torch.device) -> GpuGroup:
    """Raises EngineError where no way between the GPUs works."""
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup  # Triton's packages are there only where a GPU is

    return GpuGroup(meeting, device)
