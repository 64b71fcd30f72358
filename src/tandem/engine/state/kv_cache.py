"""`KVCache`: who uses each page of the state of all layers, and which prefixes they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from tandem.engine.state.prefix_tree import PrefixTree


class KVCache:
    """Counts the users of every page. A page is free, in use (count > 0), or idle: unused but holding a known prefix.

    Sequences release pages deepest first, and a user of a prefix page uses all pages before it. Hence a page goes idle
    before the pages in front of it do. So the head of `_idle`, the least recently used one, is always a leaf of the
    tree: eviction needs neither timestamps nor a search.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.on_eviction: Callable[[int], None] = lambda _: None  # of a page that held a known prefix
        self.releases = 0  # grows whenever pages became available: admission retries only then
        self.times_given: npt.NDArray[np.int64] = np.zeros(
            num_pages, dtype=np.int64
        )  # each page, as an empty one
        self._users = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._tree = PrefixTree(page_size) if prefix_cache else None

    @property
    def available(self) -> int:
        """Pages that `allocate` can give out."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that only the prefix cache holds."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """`count` pages for one user; evicts idle prefixes, oldest first. The caller has checked `available`."""
        assert count <= self.available, f"{count} pages wanted, {self.available} available"
        while len(self._free) < count:
            self._evict_oldest()
        pages = [self._free.pop() for _ in range(count)]
        self.times_given[pages] += 1
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each page, which must be in use or idle."""
        for page in pages:
            if self._users[page] == 0:
                del self._idle[page]
            self._users[page] += 1

    def release(self, pages: list[int]) -> None:
        """One user less for each page of a sequence, given in the order of its tokens."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} released twice"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._retire(page)
        self.releases += len(pages)

    def release_tail(self, pages: list[int], count: int) -> None:
        """One user less for all but the first `count` pages."""
        self.release(pages[count:])

    def match(self, tokens: list[int], limit: int) -> list[int]:
        """Pages of the longest cached prefix of tokens[:limit]; the caller is now a user of them."""
        pages = self._tree.match(tokens, limit) if self._tree else []
        self.share(pages)
        return pages

    def remember(self, tokens: list[int], pages: list[int]) -> list[int]:
        """Puts a user's full pages into the prefix cache. Returns the pages the user holds from now on: where an
        equal prefix was there already, its page replaces the user's duplicate."""
        if self._tree is None:
            return pages
        tree_pages = self._tree.insert(tokens, pages)
        if tree_pages == pages:
            return pages
        swaps = [(old, new) for old, new in zip(pages, tree_pages, strict=True) if old != new]
        self.share(new for _, new in swaps)
        self.release([old for old, _ in swaps])
        return tree_pages

    def forget(self, pages: list[int]) -> None:
        """Released pages of one sequence, in the order of its tokens, are found no more. That goes from the end up to
        one that others use, or from which another known prefix goes on."""
        for page in reversed(pages):
            if self._users[page]:
                return
            if page in self._idle:
                assert self._tree is not None
                if not self._tree.is_leaf(page):
                    return
                del self._idle[page]
                self._evict(page)

    def flush(self) -> int:
        """Forgets every prefix that nobody uses; returns the number of pages freed."""
        count = len(self._idle)
        for _ in range(count):
            self._evict_oldest()
        return count

    def _retire(self, page: int) -> None:
        if self._tree is not None and page in self._tree:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _evict_oldest(self) -> None:
        self._evict(self._idle.popitem(last=False)[0])

    def _evict(self, page: int) -> None:
        assert self._tree is not None
        self._tree.remove_leaf(page)
        self.on_eviction(page)
        self._free.append(page)
