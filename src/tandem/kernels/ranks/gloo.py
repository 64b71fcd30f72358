"""`GlooGroup`: ranks on one host that compute on CPUs, joined by gloo over the loopback.

A sum gathers all ranks' rows and adds them here: gloo's own would round bfloat16 at every addition.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tandem.errors import RankLost

JOIN_SECONDS = 600.0  # ranks load at different speeds; one that ends is noticed at once


class GlooGroup:
    """`Group`. A rank that ends makes the others' next call raise RankLost."""

    def __init__(self, rank: int, ranks: int, file: str) -> None:
        """file: a new one in a private folder, the same on all ranks, where they find each other."""
        gloo: Any = dist.ProcessGroupGloo  # torch types little of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout, options._threads = timedelta(seconds=JOIN_SECONDS), 1
        self._ranks = ranks
        self._group = gloo(FileStore(file, ranks), rank, ranks, options)

    def sum(self, rows: Tensor) -> Tensor:
        first, *others = self._all(rows)
        total = first.float()
        for each in others:
            total = total + each
        return total.to(rows.dtype)

    def gather(self, columns: Tensor, whole: int) -> Tensor:
        each = -(-whole // self._ranks)
        padded = torch.nn.functional.pad(columns, (0, each - columns.shape[1]))
        return torch.cat(self._all(padded), dim=1)[:, :whole]

    def _all(self, own: Tensor) -> list[Tensor]:
        """Every rank's, in their order. Raises RankLost."""
        own = own.contiguous()
        found = [torch.empty_like(own) for _ in range(self._ranks)]
        try:
            self._group.allgather([found], [own]).wait()
        except RuntimeError as error:
            raise RankLost(f"another rank has ended, or does not answer ({_last_part(str(error))})") from error
        return found


def _last_part(said: str) -> str:
    """Without the place in gloo's source, and the addresses."""
    return said.splitlines()[0].rpartition("] ")[2][:100] if said else "gloo does not say why"
