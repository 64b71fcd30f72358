"""Attention of all patches of an image to all, on as many threads as there are workers.

PyTorch's kernel is faster than that of prompts for rows that see everything. Its own threads would spin between the
operations of a step; these sleep.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.images import ImageShape


class ImageThreads:
    """Started when an image comes. They may run wherever this thread could when they were made: it has a CPU of its own
    later, which they would inherit."""

    def __init__(self, count: int) -> None:
        self.count, self._cpus = count, os.sched_getaffinity(0)
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            place = partial(os.sched_setaffinity, 0, self._cpus)
            self._pool = ThreadPoolExecutor(self.count, "tandem-images", initializer=place)
        return self._pool


class OnThreads:
    """`ImageAttention`: each thread has some heads."""

    def __init__(self, threads: ImageThreads, shape: ImageShape, dtype: torch.dtype) -> None:
        self._threads, each = threads, -(-shape.heads // threads.count)
        self._parts = [slice(first, first + each) for first in range(0, shape.heads, each)]
        self._kv = torch.empty(0), torch.empty(0)

    def show(self, k: Tensor, v: Tensor) -> None:
        self._kv = k.transpose(0, 1)[None].contiguous(), v.transpose(0, 1)[None].contiguous()

    def attend(self, q: Tensor) -> Tensor:
        out, queries = torch.empty_like(q), q.transpose(0, 1)[None]
        list(self._threads.pool().map(partial(self._some, queries, out), self._parts))
        return out.flatten(1)

    def _some(self, q: Tensor, out: Tensor, heads: slice) -> None:
        with torch.inference_mode():
            k, v = self._kv
            attention = F.scaled_dot_product_attention(q[:, heads], k[:, heads], v[:, heads])
            out[:, heads] = attention[0].transpose(0, 1)
