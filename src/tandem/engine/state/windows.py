"""`WindowPages`: pages of layers that see a window. A sequence gives back those that no later token of it reads."""

from __future__ import annotations

from collections import OrderedDict

from tandem.engine.sequence import Sequence
from tandem.spec.state import StateLayout


class WindowPages:
    """Beside each page of all tokens lies one of these, as long as a token may read it. Number i of a sequence has
    tokens i * page and on in both.

    A page is free, in use, or idle: unused, but it lies beside a page of a known prefix. Such a prefix can be taken up
    where the pages of the last window are still there. Idle pages are given out again, least recently used first, from
    the middle of a prefix, too. Whoever uses one uses the page beside it: so no page of a prefix is forgotten before.
    """

    def __init__(self, layout: StateLayout, num_pages: int) -> None:
        self._layout, self._page = layout, layout.page
        self._users = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._window_page: dict[int, int] = {}  # page of a known prefix → ours
        self._prefix: dict[int, int] = {}  # the other way round

    @property
    def available(self) -> int:
        """Pages that can be given out."""
        return len(self._free) + len(self._idle)

    def first(self, length: int) -> int:
        """Number of the first page that is read, where `length` tokens were computed."""
        return self._layout.window_begin(length) // self._page

    def usable(self, pages: list[int]) -> int:
        """How many of these pages of a known prefix can be taken up."""
        run, best = 0, 0  # pages without a gap up to here
        for count, page in enumerate(pages, 1):
            run = run + 1 if page in self._window_page else 0
            if run >= count - self.first(count * self._page):
                best = count
        return best

    def holds(self, sequence: Sequence, count: int) -> bool:
        """Whether another sequence can begin with the first `count` pages of this one."""
        return sequence.window_first <= self.first(count * self._page) and sequence.window_end >= count

    def begin(self, sequence: Sequence, count: int, leader: Sequence | None) -> None:
        """`sequence` has taken up `count` pages: of a known prefix, or of the `leader` that still holds them."""
        first = self.first(count * self._page)
        if leader is not None:
            shared = leader.window_table[first:count].tolist()
        else:
            shared = [self._window_page[page] for page in sequence.page_table[first:count].tolist()]
        for page in shared:
            self._use(page)
        sequence.window_table[first:count] = shared
        sequence.window_first, sequence.window_end = first, count

    def grow(self, sequence: Sequence, length: int, left: int) -> bool:
        """Pages for the first `length` tokens of a sequence. False where fewer than `left` would be left for others;
        then nothing has changed."""
        missing = self._missing(sequence, length)
        if missing > 0 and self.available < missing + left:
            return False
        self.extend_window(sequence, length)
        return True

    def _missing(self, sequence: Sequence, length: int) -> int:
        return -(-length // self._page) - sequence.window_end

    def extend_window(self, sequence: Sequence, length: int) -> int:
        """Pages for the first `length` tokens of a sequence, as far as there are some; how many tokens they hold."""
        count = max(0, min(self._missing(sequence, length), self.available))
        for number in range(sequence.window_end, sequence.window_end + count):
            sequence.window_table[number] = self._take()
        sequence.window_end += count
        return min(length, sequence.window_end * self._page)

    def rollback_window(self, sequence: Sequence) -> None:
        """Gives back what lies behind the computed tokens: nothing was written there that counts."""
        self._give(sequence, -(-sequence.computed_len // self._page), sequence.window_end)
        sequence.window_end = min(sequence.window_end, -(-sequence.computed_len // self._page))

    def trims_window(self, sequence: Sequence) -> bool:
        """Whether `trim_window` would give something back."""
        return self._needed(sequence) > sequence.window_first

    def trim_window(self, sequence: Sequence) -> None:
        """Gives back what nobody reads who goes on behind the last whole page of the computed tokens, but one."""
        first = self._needed(sequence)
        self._give(sequence, sequence.window_first, first)
        sequence.window_first = first

    def _needed(self, sequence: Sequence) -> int:
        """As the sequence itself, and those that begin with its whole pages: their last token must run."""
        return self.first(max(0, sequence.computed_len - 1) // self._page * self._page)

    def remember(self, sequence: Sequence, full: int) -> None:
        """The first `full` pages of a sequence are of a known prefix: those beside them are findable, too. Where an
        equal one is there already, the sequence uses that one from now on."""
        for number in range(sequence.window_first, min(full, sequence.window_end)):
            page, own = int(sequence.page_table[number]), int(sequence.window_table[number])
            known = self._window_page.get(page)
            if known is None:
                self._window_page[page], self._prefix[own] = own, page
            elif known != own:
                self._use(known)
                self._release(own)
                sequence.window_table[number] = known

    def release(self, sequence: Sequence) -> None:
        """Takes back all pages of a sequence."""
        self._give(sequence, sequence.window_first, sequence.window_end)
        sequence.window_first = sequence.window_end = 0

    def forget(self, page: int) -> None:
        """A page of a known prefix holds something else from now on."""
        own = self._window_page.pop(page, None)
        if own is not None:
            assert self._users[own] == 0, "a window's page is in use, and the page beside it is not"
            del self._prefix[own], self._idle[own]
            self._free.append(own)

    def _take(self) -> int:
        if not self._free:
            page, _ = self._idle.popitem(last=False)
            del self._window_page[self._prefix.pop(page)]
            self._free.append(page)
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _use(self, page: int) -> None:
        if self._users[page] == 0:
            del self._idle[page]
        self._users[page] += 1

    def _give(self, sequence: Sequence, first: int, end: int) -> None:
        for page in sequence.window_table[first:end].tolist():
            self._release(page)
        sequence.window_table[first:end] = 0

    def _release(self, page: int) -> None:
        assert self._users[page] > 0, f"window page {page} released twice"
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._prefix:
            self._idle[page] = None
        else:
            self._free.append(page)
