"""`planned_device`: the GPU that the plan was made for, whatever number CUDA gives it."""

from __future__ import annotations

import logging

import torch

from tandem.errors import ConfigError
from tandem.flags.env import allocator_settings, keep_kernels_where_possible, number_gpus_by_slot
from tandem.planner.gpu_plan import GpuPlan

_log = logging.getLogger(__name__)

DEVICE = ("device",)


def planned_device(gpu: GpuPlan) -> torch.device:
    """By its UUID; from here on it is this thread's current device, which is where Triton launches kernels.

    Raises ConfigError when PyTorch cannot use it.
    """
    number_gpus_by_slot()  # before CUDA starts: else it puts the fastest first, and numbers mean other GPUs
    keep_kernels_where_possible()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"PyTorch cannot use {gpu.name}: check its driver, or take --device cpu", fields=DEVICE
        )
    for index in range(torch.cuda.device_count()):
        if not gpu.uuid or _uuid(index) == gpu.uuid.lower():
            torch.cuda.set_device(index)
            grow_segments(torch.device("cuda", index))
            return torch.device("cuda", index)
    raise ConfigError(
        f"PyTorch does not see {gpu.name} ({gpu.uuid}), which the plan is for: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or "
        f"CUDA_VISIBLE_DEVICES={gpu.uuid}",
        fields=DEVICE,
    )


def grow_segments(device: torch.device) -> None:
    """PyTorch's allocator lets its segments grow in place, unless the environment decides that.

    A segment of fixed size is lost to every larger block: 0.94 of 12 GB were, which a plan cannot count.
    """
    wished = allocator_settings()
    if "expandable_segments" in wished or "backend" in wished:
        return
    _set_allocator(",".join(filter(None, (wished, "expandable_segments:True"))))
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:  # drivers without virtual memory management, as of some virtual machines
        _log.info("segments of GPU memory do not grow: %s", error)
        _set_allocator(",".join(filter(None, (wished, "expandable_segments:False"))))


def _set_allocator(settings: str) -> None:
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # the older name warns where both are there
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


def _uuid(index: int) -> str:
    return f"gpu-{torch.cuda.get_device_properties(index).uuid}".lower()
