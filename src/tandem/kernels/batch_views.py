"""`BatchViews`: what the C++ core knows of a step's rows, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem import _core
from tandem.kernels.batch_layout import KernelBatch

KEPT = 2  # of a step: of layers that see all tokens, and of those that see a window
Refill = Callable[[KernelBatch], None]
"""Gives views that a recording has the indices of another step. Raises KernelError as `BatchViews.of`."""


@dataclass(frozen=True, slots=True)
class _View:
    batch: KernelBatch
    sizes: tuple[int, int]  # pages, and rows of one
    view: _core.BatchView


class BatchViews:
    """Layers of a step ask for the same views; the last ones are kept. A batch must not change after its first use."""

    def __init__(self) -> None:
        self._views: list[_View] = []
        self._sizes = (0, 0)  # of the pages that were read last
        self._count = 0  # since `forget`

    def forget(self) -> None:
        self._views, self._count = [], 0

    def of(self, batch: KernelBatch, pages: Tensor | None) -> _core.BatchView:
        """pages: None where none are read. Raises KernelError when an index points outside them."""
        sizes = None if pages is None else (pages.shape[0], pages.shape[1])
        for each in self._views:
            if each.batch is batch and sizes in (None, each.sizes):
                return each.view
        self._sizes = sizes or self._sizes
        limits = self._sizes if all(self._sizes) else (1 << 31, 1 << 31)  # no pages yet: any cache will do
        entry = _View(batch, limits, checked(batch, *limits))
        self._views = [*self._views[1 - KEPT :], entry]
        self._count += 1
        return entry.view

    def refilled(self, batch: KernelBatch) -> Refill | None:
        """For views made since `forget`, of a step of `batch`. None: they cannot be told from the batch alone."""
        views, own = list(self._views), (batch, batch.windowed)
        whose = [next((i for i, each in enumerate(own) if each is view.batch), None) for view in views]
        if self._count != len(views) or None in whose:
            return None

        windowed = own[1] is not batch

        def refill(other: KernelBatch) -> None:
            assert (other.windowed is not other) == windowed, "a step with windows, repeated as one without"
            for view, which in zip(views, whose, strict=True):
                view.view.become(checked(other.windowed if which else other, *view.sizes))

        return refill


def checked(batch: KernelBatch, num_pages: int, page_size: int) -> _core.BatchView:
    """Raises KernelError when an index points outside the cache."""
    draft_fields = {"state_lens": batch.state_lens, "num_verified": batch.num_verified}
    return _core.BatchView(
        positions=batch.positions if batch.turns is None else batch.turns,  # the core only turns rows by them
        cache_slots=batch.cache_slots,
        query_starts=batch.query_starts,
        seq_lens=batch.seq_lens,
        block_tables=batch.block_tables,
        page_size=page_size,
        num_pages=num_pages,
        slots=batch.slots,
        **({} if batch.state_lens is None else draft_fields),
    )
