"""`why`: what is said of a step that failed."""

from __future__ import annotations

import torch

_MEMORY = "can't allocate memory"  # PyTorch raises a plain RuntimeError


def why(error: BaseException) -> str:
    """One line, which names what to change where memory ran out."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"not enough GPU memory for this step: give a smaller --mem-fraction-static or --chunked-prefill-size ({said})"
    if isinstance(error, MemoryError) or _MEMORY in said:
        return f"not enough memory for this step: give a smaller --max-total-tokens or --chunked-prefill-size ({said})"
    return said
