"""`ShardPages`: a layer's file pages, asked for before they are needed and let go of when they have been read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

from tandem.checkpoint.key_names import DRAFT
from tandem.checkpoint.mapped.pages import Pages, Paging, joined
from tandem.checkpoint.mapped.shards import Shards
from tandem.checkpoint.parts import is_expert, is_table

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


class ShardPages:
    """A layer is the first number in a tensor's name. experts: routed ones only (True), or everything else (False)."""

    def __init__(self, shards: Shards) -> None:
        self._shards, self._paging = shards, Paging()
        self._joined: dict[bool | None, dict[int, list[Pages]]] = {}

    def read_ahead(self, layer: int, experts: bool | None = None) -> None:
        """Returns at once."""
        self._paging.read_ahead(self._pages(layer, experts), self)

    def forget(self, layer: int, experts: bool | None = None) -> None:
        self._paging.forget(self._pages(layer, experts), self)

    def read_ahead_tensors(self, names: Iterable[str]) -> None:
        """names: as in the files."""
        self._paging.read_ahead(self._shards.pages(names), self)

    def forget_tensors(self, names: Iterable[str]) -> None:
        self._paging.forget(self._shards.pages(names), self)

    def release(self, experts: bool | None = None) -> None:
        """`forget` for all that was read; waits until it is done."""
        if experts is None:
            self._paging.forget([shard.all_pages for shard in self._shards.each()], self)
        else:
            self.forget_tensors([name for name in self._shards.names() if is_expert(name) == experts])
        self.wait()

    def wait(self) -> None:
        """Until everything asked for so far has been said to the kernel."""
        self._paging.wait()

    @cached_property
    def _layers(self) -> dict[int, list[str]]:
        """Names by the first number in them."""
        layers: dict[int, list[str]] = defaultdict(list)
        for name in self._shards.names():
            number = _NUMBER.search(name)
            if number is not None and not name.startswith(DRAFT) and not is_table(name):
                layers[int(number[1])].append(name)
        return layers

    def _pages(self, layer: int, experts: bool | None) -> Iterator[Pages]:
        """A generator, so that `Paging` does the work for all layers at once, while the first weights are packed. Later
        the thread that gives workers the next layer would wait for the interpreter meanwhile."""
        if experts not in self._joined:
            by_layer = {
                layer: [name for name in names if experts is None or experts == is_expert(name)]
                for layer, names in self._layers.items()
            }
            self._joined[experts] = {layer: joined(self._shards.pages(names)) for layer, names in by_layer.items()}
        yield from self._joined[experts].get(layer, ())
