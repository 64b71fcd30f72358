"""How much shared memory a program may have: what tiles and blocks on their way are chosen by."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

LEAST_BYTES = 99 << 10  # of the GPUs that multiply bfloat16; larger ones have 163 KB (A100) or 227 KB (H100)


@cache
def has_tensor_memory(device: torch.device) -> bool:
    """Whether products go through tensor memory (B100, B200): Triton then keeps more in shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of one program here, as Triton has it, which refuses larger ones; on no GPU, what every GPU has."""
    if device.type != "cuda":
        return LEAST_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
