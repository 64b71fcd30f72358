"""Rows of tables that could not be read: their tokens get numbers that are none, and only their answers end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from tandem.errors import CheckpointError
from tandem.kernels.batch_layout import TokenBatch

_log = logging.getLogger(__name__)

NO_NUMBER = 0xFF  # bytes of what is no number in bfloat16, float16, float32 and fp8 (e4m3), and of a scale of GGUF


class UnreadRows:
    """Failures since the start. last: what the newest one says; "": there was none."""

    def __init__(self) -> None:
        self.last, self.count = "", 0
        self.first_by_slot = dict[int, int]()  # position of the first token whose rows could not be read

    def note(self, error: CheckpointError) -> None:
        """A token's rows cannot be read."""
        self.last, self.count = str(error), self.count + 1
        if self.count & (self.count - 1) == 0:  # a disk that is gone fails many a row
            _log.warning("%s (%d tokens so far)", error, self.count)

    def tell(self, batch: TokenBatch, tokens: Iterable[int]) -> None:
        """These tokens of a batch, by their rows, got no numbers; their sequences are known by their slots."""
        single = len(batch.slots) == len(batch.input_ids)
        for token in tokens:
            owner = token if single else int(torch.searchsorted(batch.query_starts[1:], token, right=True))
            slot, position = int(batch.slots[owner]), int(batch.positions[token])
            self.first_by_slot[slot] = min(position, self.first_by_slot.get(slot, position))

    def take(self, slot: int, end: int) -> bool:
        """Whether a token before position `end` of the sequence in this slot got no numbers since the last call."""
        return bool(self.first_by_slot) and self.first_by_slot.pop(slot, end) < end


unread_rows = UnreadRows()


def unread_tokens(read: Callable[[slice], None], tokens: int) -> list[int]:
    """Calls `read` for tokens [0, tokens): for all at once, and where that fails for halves, down to single ones. Those
    for which it fails alone, ascending."""
    unread, spans = list[int](), [(0, tokens)] if tokens else []
    while spans:
        first, last = spans.pop()
        try:
            read(slice(first, last))
        except CheckpointError as error:
            if last - first == 1:
                unread_rows.note(error)
                unread.append(first)
            else:
                middle = (first + last) // 2
                spans += [(middle, last), (first, middle)]
    return unread
