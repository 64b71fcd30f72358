"""Rows of tables that could not be read: their tokens get numbers that are none, so that only their answers end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from tandem.errors import CheckpointError

_log = logging.getLogger(__name__)

NO_NUMBER = 0xFF  # bytes of what is no number in bfloat16, float16, float32 and fp8 (e4m3), and of a scale of GGUF


class UnreadRows:
    """Failures since the start. last: what the newest one says; "": there was none."""

    def __init__(self) -> None:
        self.last, self.count = "", 0

    def note(self, error: CheckpointError) -> None:
        self.last, self.count = str(error), self.count + 1
        if self.count & (self.count - 1) == 0:  # a disk that is gone fails many a row
            _log.warning("%s (%d tokens so far)", error, self.count)


unread_rows = UnreadRows()


def token_by_token(read: Callable[[Tensor, Tensor], None], numbers: Tensor, rows: Tensor) -> None:
    """`read` of numbers [T, n] into rows [T, n, bytes], uint8. Where that fails, one token after the other: those whose
    rows cannot be read get bytes of no number."""
    try:
        read(numbers.flatten(), rows.flatten(0, 1))
        return
    except CheckpointError:
        pass
    for own, to in zip(numbers, rows, strict=True):
        try:
            read(own, to)
        except CheckpointError as error:
            to.fill_(NO_NUMBER)
            unread_rows.note(error)
