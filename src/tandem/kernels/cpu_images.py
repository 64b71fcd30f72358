"""Operations of a vision tower on the CPU: attention on as many threads as there are workers, the rest by the workers.

PyTorch's attention is faster than that of prompts for rows that see everything. Its own threads would spin between the
operations of a step; these sleep. Between the products one thread would take longer than they do.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem.kernels.images import ImageShape, PatchRotation


class ImageThreads:
    """Started when an image comes. They may run wherever this thread could when they were made: it has a CPU of its own
    later, which they would inherit."""

    def __init__(self, workers: _core.WorkerPool, tier: str) -> None:
        self.patches, self.count = _core.PatchOps(workers, tier), len(workers)
        self._cpus = os.sched_getaffinity(0)
        self._pool: ThreadPoolExecutor | None = None

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            place = partial(os.sched_setaffinity, 0, self._cpus)
            self._pool = ThreadPoolExecutor(self.count, "tandem-images", initializer=place)
        return self._pool


class OnThreads:
    """`ImageOps`; in attention each thread has some heads. Queries are [heads, n, channels]."""

    def __init__(
        self, threads: ImageThreads, shape: ImageShape, dtype: torch.dtype, turns: PatchRotation
    ) -> None:
        self._threads, each = threads, -(-shape.heads // threads.count)
        self._parts = [slice(first, first + each) for first in range(0, shape.heads, each)]
        self._cos, self._sin = (table[:, : shape.channels // 2].contiguous() for table in turns)
        self._kv = torch.empty(2, shape.heads, shape.patches, shape.channels, dtype=dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._threads.patches.layer_norm(x, weight, bias, out, eps)
        return out

    def split(self, qkv: Tensor, rows: slice) -> Tensor:
        q = qkv.new_empty(qkv.shape[2], len(qkv), qkv.shape[3])
        self._threads.patches.split(qkv, self._cos, self._sin, rows.start, q, *self._kv)
        return q

    def attend(self, q: Tensor) -> Tensor:
        out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
        list(self._threads.pool().map(partial(self._attend_heads, q, out), self._parts))
        return out.flatten(1)

    def _attend_heads(self, q: Tensor, out: Tensor, heads: slice) -> None:
        with torch.inference_mode():
            k, v = self._kv[:, None, heads]
            out[:, heads] = F.scaled_dot_product_attention(q[None, heads], k, v)[0].transpose(0, 1)

    def gelu(self, x: Tensor) -> Tensor:
        self._threads.patches.gelu(x, x)
        return x
