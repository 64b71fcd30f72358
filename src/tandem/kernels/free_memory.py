"""Free memory: `return_free_memory` gives it back to the system, `keep_free_memory` keeps it for the next step."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from tandem import _core

# Of PyTorch 2.12 and newer, and of those before.
_EMPTY_PINNED = "_accelerator_emptyHostCache", "_host_emptyCache"
# glibc's malloc.h; bytes free at the heap's end, of a thread's whole free heap, of one block (glibc takes no more).
_KEPT = {-1: 1 << 30, -2: 64 << 20, -3: 32 << 20}


def return_free_memory() -> None:
    """PyTorch keeps pinned memory for the next who asks, and malloc what compilers and parsers have freed."""
    if torch.cuda.is_initialized():
        for empty in filter(None, (getattr(torch._C, name, None) for name in _EMPTY_PINNED)):
            empty()
            break
    _core.return_free_memory()


def keep_free_memory() -> None:
    """For a process that serves: a step's arrays stay in the heap, so that the next step takes no page faults.

    Else glibc gives the heap's end back whenever a large prompt ends, and the process grows and shrinks.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        for option, most in _KEPT.items():
            libc.mallopt(option, most)
