"""`return_free_memory`: what loading and compiling took and nobody uses goes back to the system."""

from __future__ import annotations

import torch

from tandem import _core

# Of PyTorch 2.12 and newer, and of those before.
_EMPTY_PINNED = "_accelerator_emptyHostCache", "_host_emptyCache"


def return_free_memory() -> None:
    """PyTorch keeps pinned memory for the next who asks, and malloc what compilers and parsers have freed."""
    if torch.cuda.is_initialized():
        for empty in filter(None, (getattr(torch._C, name, None) for name in _EMPTY_PINNED)):
            empty()
            break
    _core.return_free_memory()
