"""Kernels that start while the one before still runs (programmatic dependent launch, compute capability 9.0 and up).

A decode step is some six hundred short kernels, each of which would start only after the last block of the one before
has left. So a kernel calls `begin` first: it lets the next one start, and waits until the one before has finished, all
its writes included. Everything before `begin` may read only what no kernel writes; weights can be fetched there. As
every kernel of ours waits, waiting for the one before is waiting for all before it.

A kernel that takes nothing of the one before may run beside it. Then the one before lets it start only after its own
wait, so that all before that has ended. It waits itself in the end, so that who waits for it waits for both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    wait_for_last(OVERLAP)


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The first half of `begin`, for a kernel that has much to do before the second."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()


def overlapped(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a Triton kernel that calls `begin`, on a device."""
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(device) else {"OVERLAP": False}


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
