"""`pixels_of`: the resized pixels of an image, from the request or from memory that its sender shares."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tandem.engine.vision.spans import PixelSource
from tandem.errors import EngineError


def pixels_of(source: PixelSource) -> Tensor:
    """uint8 [height, width, 3]. Raises EngineError where they are gone."""
    held = bytearray(source.nbytes) if source.inline is None else bytearray(source.inline)
    left = _read(source, held) if source.inline is None else len(held)
    if left != source.nbytes:
        raise EngineError(f"pixels of an image are gone: {left} of {source.nbytes} bytes are left; send it again")
    return torch.frombuffer(held, dtype=torch.uint8).view(source.height, source.width, 3)


def _read(source: PixelSource, held: bytearray) -> int:
    """Bytes of them that are there, which `held` has then."""
    view, done = memoryview(held), 0
    try:
        file = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"the pixels of an image are gone ({error.strerror}); send it again") from error
    try:
        if source.inode not in (0, os.fstat(file).st_ino):  # the sender has let it go, and its number was given again
            return 0
        while done < len(view) and (count := os.preadv(file, [view[done:]], source.offset + done)):
            done += count
    finally:
        os.close(file)
    return done
