"""Ranks of a model as threads of one process: each has its own shard, operations and cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from sessions import Session
from tandem.kernels.ops import Ops
from tandem.kernels.ranks.group import Group
from tandem.spec.shard import RankShard

T = TypeVar("T")


class RankThreads:
    """Where threads meet. One that fails ends the others' wait."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._barrier = ranks, Barrier(ranks, timeout=60)
        self._given: list[Tensor | None] = [None] * ranks
        self.sums = 0

    def given(self, rank: int, rows: Tensor) -> list[Tensor]:
        """All ranks' rows, in their order."""
        self._given[rank] = rows.clone()
        self._barrier.wait()
        found = [each for each in self._given if each is not None]
        self._barrier.wait()
        return found

    def run(self, of_rank: Callable[[int], T]) -> list[T]:
        """Of every rank, what `of_rank` gives."""

        def guarded(rank: int) -> T:
            try:
                with torch.inference_mode():
                    return of_rank(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(guarded, range(self.ranks)))


class RankThread(Group):
    """One rank's side."""

    def __init__(self, threads: RankThreads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def sum(self, rows: Tensor) -> Tensor:
        self._threads.sums += self._rank == 0
        total = torch.zeros(rows.shape)
        for each in self._threads.given(self._rank, rows):
            total += each.float()
        return total.to(rows.dtype)

    def gather(self, columns: Tensor, whole: int) -> Tensor:
        return torch.cat(self._threads.given(self._rank, columns), dim=1)


def with_ranks(
    ranks: int, path, ops: Callable[[], Ops], of_session: Callable[[Session], T], **how: object
) -> list[T]:
    """Of every rank's session, what `of_session` gives."""
    threads = RankThreads(ranks)

    def of_rank(rank: int) -> T:
        own = ops()
        own.group = RankThread(threads, rank)
        return of_session(Session(path, ops=own, shard=RankShard(rank, ranks), **how))

    return threads.run(of_rank)
