"""`planned_device`: the GPU that the plan was made for, whatever number CUDA gives it."""

from __future__ import annotations

import torch

from tandem.errors import ConfigError
from tandem.flags.env import keep_kernels_where_possible, number_gpus_by_slot
from tandem.planner.gpu_plan import GpuPlan


def planned_device(gpu: GpuPlan) -> torch.device:
    """By its UUID; from here on it is this thread's current device, which is where Triton launches kernels.

    Raises ConfigError when PyTorch cannot use it.
    """
    number_gpus_by_slot()  # before CUDA starts: else it puts the fastest first, and numbers mean other GPUs
    keep_kernels_where_possible()
    if not torch.cuda.is_available():
        raise ConfigError(f"PyTorch cannot use {gpu.name}: check its driver, or take --device cpu")
    for index in range(torch.cuda.device_count()):
        if not gpu.uuid or _uuid(index) == gpu.uuid.lower():
            torch.cuda.set_device(index)
            return torch.device("cuda", index)
    raise ConfigError(
        f"PyTorch does not see {gpu.name} ({gpu.uuid}), which the plan is for: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or "
        f"CUDA_VISIBLE_DEVICES={gpu.uuid}"
    )


def _uuid(index: int) -> str:
    return f"gpu-{torch.cuda.get_device_properties(index).uuid}".lower()
