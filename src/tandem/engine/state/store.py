"""`StateStore`: what sequences keep between steps: pages that they may share, and a slot of their own."""

from __future__ import annotations

from tandem.engine.sequence import Sequence
from tandem.engine.state.kv_cache import KVCache
from tandem.engine.state.slots import SlotPool
from tandem.engine.state.windows import WindowPages
from tandem.spec.state import StateLayout

SNAPSHOT_SHARE = 4  # a prompt leaves a snapshot wherever its pages have grown by so many times a slot's bytes


class StateStore:
    """Admits, grows, remembers and releases sequences.

    Where the model keeps slots, a prefix can only be taken up where a snapshot of the slot was taken: at a page
    boundary. Prompts stop at some of them (`chunk_end`); an answer keeps its newest one. Without slots every boundary
    will do. """

    def __init__(
        self,
        layout: StateLayout,
        pages: KVCache,
        slots: SlotPool | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        """slots: None where `layout` has none. windows: None where layers that see a window keep all tokens."""
        assert (slots is None) == (layout.slot_bytes == 0)
        self.pages, self.slots, self._windows = pages, slots, windows
        self.pages_only = slots is None and windows is None  # nothing is to be done after a step of an answer
        self._every = _snapshot_distance(layout)
        self._snapshots = slots if pages.prefix_cache else None  # the slots, where snapshots of them are of use
        pages.on_eviction = self._forget

    def _forget(self, page: int) -> None:
        """The page of a known prefix holds something else from now on."""
        if self.slots is not None:
            self.slots.forget(page)
        if self._windows is not None:
            self._windows.forget(page)

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Gives a sequence pages for all tokens known now, and a slot; what an equal prefix left is taken up, and
        counts as computed. False, and nothing has changed, where that leaves fewer than `spare` pages."""
        cached = self._match(sequence)
        missing = sequence.pages_wanted() - len(cached)
        if self.pages.available < missing + spare or not self._slots_left():
            self.pages.release(cached)
            return False
        sequence.add_pages(cached + self.pages.allocate(missing))
        self._take_slots(sequence, cached)
        if self._windows is not None:
            self._windows.begin(sequence, len(cached), self._prefix_owner(sequence))
        sequence.advance(len(cached) * self.pages.page_size)
        return True

    def grow(self, sequence: Sequence, draft_tokens: int = 0, left: int = 0) -> bool:
        """Pages for the tokens known now and so many draft tokens. False where fewer than `left` would be left for
        others; then nothing has changed."""
        if self._windows is None and len(sequence.tokens) + draft_tokens <= sequence.num_pages * sequence.page_size:
            return True  # most steps of most sequences
        missing = sequence.pages_wanted(draft_tokens) - sequence.num_pages
        if missing > 0 and self.pages.available < missing + left:
            return False
        if self._windows is not None and not self._windows.grow(sequence, sequence.total_len + draft_tokens, left):
            return False
        if missing > 0:
            sequence.add_pages(self.pages.allocate(missing))
        return True

    def extend_window(self, sequence: Sequence, rows: int) -> int:
        """How many of a prompt's next rows have pages in layers that see a window; they get them."""
        done = sequence.computed_len
        return rows if self._windows is None else self._windows.extend_window(sequence, done + rows) - done

    def rollback_window(self, sequence: Sequence) -> None:
        """Rows that `extend_window` gave pages do not run."""
        if self._windows is not None:
            self._windows.rollback_window(sequence)

    def trim_window(self, sequence: Sequence) -> None:
        """After a step: what no later token reads goes. A prompt's stay findable as long as there is room."""
        if self._windows is None or not self._windows.trims_window(sequence):
            return
        if sequence.answer_len == 0 and self.pages.prefix_cache:
            self.remember(sequence)
        self._windows.trim_window(sequence)

    def chunk_end(self, sequence: Sequence) -> int:
        """Where a prompt's next chunk should end at the latest, in tokens of the sequence."""
        return min(self._boundary(sequence), sequence.ready_len)

    def _boundary(self, sequence: Sequence) -> int:
        if self._snapshots is None:
            return sequence.total_len
        done, last = sequence.computed_len, self._last_boundary(sequence)
        boundaries = last, sequence.matched_len, (done // self._every + 1) * self._every
        return min((boundary for boundary in boundaries if done < boundary <= last), default=sequence.total_len)

    def _last_boundary(self, sequence: Sequence) -> int:
        """Up to which a prompt that begins alike can take up this one's pages: its last token must run."""
        return (sequence.total_len - 1) // self.pages.page_size * self.pages.page_size

    def snapshot(self, sequence: Sequence) -> None:
        """After a step: keeps the state of a sequence that has just reached a page boundary. A prompt's stays for
        everybody, an answer's newest one until the next."""
        slots = self._snapshots
        if slots is None or (length := sequence.computed_len) % self.pages.page_size:
            return
        if length == sequence.total_len:
            slots.copy(sequence.slot, sequence.boundary_slot, sequence.state_len)
            sequence.boundary_len = length
        elif length in (self._last_boundary(sequence), sequence.matched_len) or length % self._every == 0:
            self._keep(slots, sequence, length)

    def _keep(self, slots: SlotPool, sequence: Sequence, length: int) -> None:
        """A snapshot for everybody, where there is room for one."""
        self.remember(sequence)
        page = sequence.pages[length // self.pages.page_size - 1]
        if not slots.has(page) and slots.available:
            slot = slots.take()
            slots.copy(sequence.slot, slot, sequence.state_len)
            slots.keep(page, slot)

    def remember(self, sequence: Sequence) -> None:
        """Makes the sequence's full pages findable."""
        full = sequence.computed_len // self.pages.page_size
        sequence.page_table[:full] = self.pages.remember(sequence.keys, sequence.pages[:full])
        if self._windows is not None and self.pages.prefix_cache:
            self._windows.remember(sequence, full)

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Takes back pages and slots. keep: what they hold is sound, and may be found. Else it is forgotten, also what
        was remembered of the prompt's first chunks."""
        if keep:
            self.remember(sequence)
        self._give_slots(sequence, keep)
        if self._windows is not None:
            self._windows.release(sequence)
        pages = sequence.drop_pages()
        self.pages.release(pages)
        if not keep:
            self.pages.forget(pages)

    def _match(self, sequence: Sequence) -> list[int]:
        """Pages that hold the beginning of the sequence already, now also used by it. Without a prefix cache the
        answers of one request still share its prompt's; the last, partial page is computed again."""
        leader = self._prefix_owner(sequence)
        if leader is not None:
            shared = leader.pages[: sequence.reusable_len // self.pages.page_size]
            self.pages.share(shared)
            return shared
        pages = self.pages.match(sequence.keys, sequence.reusable_len)
        sequence.matched_len = len(pages) * self.pages.page_size
        known = self._restorable(pages)
        self.pages.release_tail(pages, known)
        return pages[:known]

    def _restorable(self, pages: list[int]) -> int:
        """Up to how many of these pages everything is known that a sequence keeps."""
        if self._windows is not None:
            assert self.slots is None, "no model has windows and folds"
            return self._windows.usable(pages)
        if self.slots is None:
            return len(pages)
        return next((n for n in range(len(pages), 0, -1) if self.slots.has(pages[n - 1])), 0)

    def _prefix_owner(self, sequence: Sequence) -> Sequence | None:
        """The leader whose pages a sequence begins with, though nothing is findable."""
        leader = sequence.leader
        if leader is None or self.pages.prefix_cache or self.slots is not None or sequence.answer_len:
            return None
        count = sequence.reusable_len // self.pages.page_size
        held = self._windows is None or self._windows.holds(leader, count)
        return leader if held and leader.computed_len >= leader.prompt_len else None

    def _slots_left(self) -> bool:
        return self.slots is None or self.slots.available >= (2 if self.pages.prefix_cache else 1)

    def _take_slots(self, sequence: Sequence, cached: list[int]) -> None:
        if self.slots is None:
            return
        if cached:  # before others are taken, which might be this snapshot's
            self.slots.protect(cached[-1])
        sequence.slot, sequence.boundary_len = self.slots.take(), 0
        sequence.slots_taken += 1
        if self.pages.prefix_cache:
            sequence.boundary_slot = self.slots.take()
        if cached:
            sequence.state_len = self.slots.restore(cached[-1], sequence.slot)

    def _give_slots(self, sequence: Sequence, keep: bool) -> None:
        if self.slots is None:
            return
        full = sequence.computed_len // self.pages.page_size
        if self.pages.prefix_cache:
            reached = keep and full and sequence.boundary_len == full * self.pages.page_size
            if reached:
                self.slots.keep(sequence.pages[full - 1], sequence.boundary_slot)
            else:
                self.slots.give(sequence.boundary_slot)
        self.slots.give(sequence.slot)
        sequence.slot = sequence.boundary_slot = sequence.boundary_len = 0


def _snapshot_distance(layout: StateLayout) -> int:
    """Tokens between a prompt's snapshots: whole pages."""
    if not layout.slot_bytes:
        return 0
    pages = SNAPSHOT_SHARE * layout.slot_bytes // max(1, layout.page_bytes)
    return max(1, pages) * layout.page
