"""`pixels_of`: the resized pixels of an image, from the request or from memory that its sender shares."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tandem.engine.vision.spans import PixelSource
from tandem.errors import EngineError


def pixels_of(source: PixelSource) -> Tensor:
    """uint8 [height, width, 3]. Raises EngineError where they are gone."""
    held = bytearray(_read(source) if source.inline is None else source.inline)
    if len(held) != source.nbytes:
        raise EngineError(f"pixels of an image are gone: {len(held)} of {source.nbytes} bytes are left; send it again")
    return torch.frombuffer(held, dtype=torch.uint8).view(source.height, source.width, 3)


def _read(source: PixelSource) -> bytes:
    """Bytes that the file still has of the pixels. Raises EngineError where it cannot be opened."""
    parts, left, place = list[bytes](), source.nbytes, source.offset
    try:
        file = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"the pixels of an image are gone ({error.strerror}); send it again") from error
    try:
        while left and (part := os.pread(file, left, place)):
            parts.append(part)
            left, place = left - len(part), place + len(part)
    finally:
        os.close(file)
    return b"".join(parts)
