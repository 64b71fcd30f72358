"""Numbers of a table's rows that a step's tokens name, in NumPy: found on the host before a GPU begins the step.

What the last tokens of a sequence were lies in a ring here, by its slot, as states of other mechanisms lie in a GPU's
memory. PyTorch would take several times as long for so few numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tandem.kernels.batch_layout import TokenBatch
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes

PLACES = 256  # of a slot: rows of guesses have places of their own
Whole = npt.NDArray[np.int64]


class RowNumbers:
    """Row numbers of each step's tokens. Steps come in order, and copies of slots between them (`copied`)."""

    def __init__(self, shape: Ngram, hashes: Hashes) -> None:
        self._shape = shape
        self._multipliers, self._sizes, self._offsets = (each.cpu().numpy() for each in hashes)
        self._ring = np.full((1, PLACES), shape.stop, dtype=np.int64)
        self._one = _OneRow(shape, hashes)

    def __call__(self, batch: TokenBatch) -> Whole:
        """[T, hashes] of a batch in host memory, without the rows that only fill up a graph. Valid until the next
        call."""
        ids, positions, slots = batch.input_ids.numpy(), batch.positions.numpy(), batch.slots.numpy()
        if len(ids) == 1 or (len(ids) == len(slots) and slots[1] == 0):
            self._grow(int(slots[0]))
            return self._one(int(ids[0]), int(positions[0]), self._ring[slots[0]])
        self._grow(int(slots.max(initial=0)))
        if len(slots) == len(ids):
            rows = max(1, int(np.count_nonzero(slots)))
            return self._hashed(self._single_rows(ids[:rows], positions[:rows], slots[:rows]))
        return self._hashed(self._chunks(batch, ids, positions, slots))

    def copied(self, source: int, target: int) -> None:
        """One slot becomes another's copy."""
        self._grow(max(source, target))
        self._ring[target] = self._ring[source]

    def _grow(self, slot: int) -> None:
        if slot >= len(self._ring):
            more = np.full((slot + 1, PLACES), self._shape.stop, dtype=np.int64)
            more[: len(self._ring)] = self._ring
            self._ring = more

    def _single_rows(self, ids: Whole, positions: Whole, slots: npt.NDArray[np.int32]) -> list[Whole]:
        """Ids of rows that are sequences of their own, then those before, newest first."""
        self._ring[slots, positions % PLACES] = ids  # first: rows may follow each other in one slot
        last = [ids]
        for back in range(1, self._shape.longest):
            before = self._ring[slots, (positions - back) % PLACES]
            last.append(np.where(positions < back, self._shape.stop, before))
        return last

    def _chunks(
        self, batch: TokenBatch, ids: Whole, positions: Whole, slots: npt.NDArray[np.int32]
    ) -> list[Whole]:
        """As `_single_rows`, of chunks."""
        starts, back = batch.query_starts.numpy(), self._shape.longest - 1
        last = [np.empty_like(ids) for _ in range(back + 1)]
        for s, slot in enumerate(slots.tolist()):
            rows = slice(int(starts[s]), int(starts[s + 1]))
            if rows.start == rows.stop:
                continue
            first, own = int(positions[rows.start]), ids[rows]
            at = np.arange(first - back, first)
            known = np.concatenate((np.where(at < 0, self._shape.stop, self._ring[slot, at % PLACES]), own))
            for i, target in enumerate(last):
                target[rows] = known[back - i : len(known) - i]
            kept, end = own[-PLACES:], first + len(own)
            self._ring[slot, np.arange(end - len(kept), end) % PLACES] = kept
        return last

    def _hashed(self, last: list[Whole]) -> Whole:
        """n-grams do not reach back over the token `stop`, which stands for what is missing, too."""
        shape, ended = self._shape, np.zeros(len(last[0]), dtype=bool)
        mixed, each = last[0] * self._multipliers[0], list[Whole]()
        for back in range(1, shape.longest):
            ended |= last[back] == shape.stop
            mixed = mixed ^ np.where(ended, shape.stop, last[back]) * self._multipliers[back]
            each.append(mixed)
        columns = np.repeat(np.stack(each, 1), shape.heads, 1)
        numbers: Whole = columns % self._sizes + self._offsets
        return numbers


class _OneRow:
    """Row numbers of one token, in plain Python: NumPy takes longer to begin than this takes in all."""

    def __init__(self, shape: Ngram, hashes: Hashes) -> None:
        self._stop, self._heads, self._longest = shape.stop, shape.heads, shape.longest
        self._multipliers = hashes.multipliers.tolist()
        self._each = list(zip(hashes.sizes.tolist(), hashes.offsets.tolist(), strict=True))
        self._numbers = np.zeros((1, shape.hashes), dtype=np.int64)

    def __call__(self, token: int, position: int, ring: Whole) -> Whole:
        """[1, hashes]. ring: of the sequence, which takes the token in."""
        ring[position % PLACES] = token
        mixed, ended, numbers = token * self._multipliers[0], False, list[int]()
        for back in range(1, self._longest):
            before = self._stop if ended or position < back else int(ring[(position - back) % PLACES])
            ended = ended or before == self._stop
            mixed ^= before * self._multipliers[back]
            wrapped = (mixed + (1 << 63)) % (1 << 64) - (1 << 63)  # as int64 has it
            own = self._each[(back - 1) * self._heads : back * self._heads]
            numbers += [wrapped % size + offset for size, offset in own]
        self._numbers[0] = numbers
        return self._numbers
