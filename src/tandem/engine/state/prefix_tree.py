"""`PrefixTree`: which KV pages hold which token prefix (RadixAttention, arXiv 2312.07104, at page granularity)."""

from __future__ import annotations

from collections.abc import Iterator


class _Node:
    """One full page of tokens below its parent's; the path from the root spells the prefix."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixTree:
    """Maps prefixes of whole pages to pages. It owns no counts: `KVCache` says which pages are in use."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = _Node((), -1, None)
        self._node_of_page: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._node_of_page)

    def __contains__(self, page: int) -> bool:
        return page in self._node_of_page

    def match(self, tokens: list[int], limit: int) -> list[int]:
        """Pages of the longest known prefix of tokens[:limit], whole pages only."""
        pages: list[int] = []
        node = self._root
        for key in self._keys(tokens, limit):
            child = node.children.get(key)
            if child is None:
                break
            pages.append(child.page)
            node = child
        return pages

    def insert(self, tokens: list[int], pages: list[int]) -> list[int]:
        """Makes `pages` findable as the prefix tokens[: len(pages) * page_size].

        Returns the page that stands for each position afterwards. Where the tree knew the prefix already, its own page
        stays. The caller uses that one and lets go of the duplicate. Up to a page of the tree the caller's are the
        tree's: so a prompt that grows is looked at where it is new.
        """
        known = next((n for n in range(len(pages), 0, -1) if pages[n - 1] in self._node_of_page), 0)
        node = self._node_of_page[pages[known - 1]] if known else self._root
        tree_pages = pages[:known]
        for key, page in zip(
            self._keys(tokens, len(pages) * self._page_size, known), pages[known:], strict=True
        ):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, page, node)
                self._node_of_page[page] = child
            tree_pages.append(child.page)
            node = child
        return tree_pages

    def is_leaf(self, page: int) -> bool:
        return not self._node_of_page[page].children

    def remove_leaf(self, page: int) -> None:
        node = self._node_of_page.pop(page)
        assert not node.children, "a page in the middle of a prefix was about to be evicted"
        assert node.parent is not None
        del node.parent.children[node.key]

    def _keys(self, tokens: list[int], limit: int, first: int = 0) -> Iterator[tuple[int, ...]]:
        """Keys of the whole pages of tokens[:limit], from page number `first` on."""
        size = self._page_size
        ends = range(first * size, min(limit, len(tokens)) // size * size, size)
        return (tuple(tokens[i : i + size]) for i in ends)
