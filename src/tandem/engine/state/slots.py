"""`SlotPool`: who has which slot: running sequences, and snapshots of prefixes that a later prompt may begin with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tandem.engine.state.arrays import SlotMemory


class SlotPool:
    """Slot 0 is nobody's: rows that only fill up a batch read and write it.

    A snapshot belongs to a page: the state after that page's last token. Snapshots give way to sequences, the least
    recently used one first, so they never keep one out.
    """

    def __init__(self, memory: SlotMemory) -> None:
        """memory: uint8 [slots, bytes of one]."""
        self._memory = memory
        self.on_copy: list[Callable[[int, int], None]] = []
        self._state_lens = [0] * len(memory)  # tokens that a copy's folds hold
        self._free = list(range(len(memory) - 1, 0, -1))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # page → slot

    @property
    def available(self) -> int:
        """Slots that `take` can give out."""
        return len(self._free) + len(self._snapshots)

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    def take(self) -> int:
        """A slot for one owner, whose bytes are anything. The caller has checked `available`."""
        if not self._free:
            _, slot = self._snapshots.popitem(last=False)
            return slot
        return self._free.pop()

    def give(self, slot: int) -> None:
        assert slot > 0 and slot not in self._free, f"slot {slot} given back twice"
        self._free.append(slot)

    def copy(self, source: int, target: int, state_len: int) -> None:
        """state_len: tokens that the folds in `source` hold."""
        self._memory[target].copy_(self._memory[source], non_blocking=True)
        for copied in self.on_copy:
            copied(source, target)
        self._state_lens[target] = state_len

    def keep(self, page: int, slot: int) -> None:
        """A slot that its owner gives away becomes the snapshot of `page`; a page needs one only."""
        if page in self._snapshots:
            self.give(slot)
        else:
            self._snapshots[page] = slot
        self._snapshots.move_to_end(page)

    def protect(self, page: int) -> None:
        """The snapshot of `page` goes last."""
        self._snapshots.move_to_end(page)

    def has(self, page: int) -> bool:
        return page in self._snapshots

    def restore(self, page: int, target: int) -> int:
        """`target` becomes what the snapshot of `page` holds. Returns the tokens that its folds hold."""
        self._snapshots.move_to_end(page)
        state_len = self._state_lens[self._snapshots[page]]
        self.copy(self._snapshots[page], target, state_len)
        return state_len

    def forget(self, page: int) -> None:
        """The page holds something else from now on."""
        slot = self._snapshots.pop(page, None)
        if slot is not None:
            self._free.append(slot)
