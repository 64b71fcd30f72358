"""`why`: what is said of a step that failed."""

from __future__ import annotations

import torch

from tandem.errors import typed

_MEMORY = "can't allocate memory"  # PyTorch raises a plain RuntimeError
_SMALLER = "for this step: give a smaller --{} or --chunked-prefill-size"


def why(error: BaseException) -> str:
    """One line, which names what to change where memory ran out."""
    message = typed(error)
    if isinstance(error, torch.OutOfMemoryError):
        return f"not enough GPU memory {_SMALLER.format('mem-fraction-static')} ({message})"
    if isinstance(error, MemoryError) or _MEMORY in message:
        return f"not enough memory {_SMALLER.format('max-total-tokens')} ({message})"
    return message
