"""`attention_flops`: how fast a CPU computes attention, which on every tier is float32."""

from __future__ import annotations

import statistics

import torch

from tandem import _core
from tandem.bench.ceilings import repeat_seconds

HEADS, KV_HEADS, DIM = 32, 4, 128  # Qwen3-30B-A3B's
ROWS, KEYS, PAGE = 16, 512, 16  # last rows of a sequence, which are one task for each head of keys; tokens


def attention_flops(pool: _core.WorkerPool, tier: str, min_seconds: float) -> float:
    """Operations per second of all workers, typically: a multiply-add counts as two. Every worker has a sequence of its
    own; all see the same keys, which a cache holds."""
    dense, batch, rows = _core.DenseOps(pool, tier), _batch(len(pool)), len(pool) * ROWS
    keys = torch.ones(KEYS // PAGE, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
    q = torch.ones(rows, HEADS, DIM, dtype=torch.bfloat16)
    values, out = keys.clone(), torch.empty(rows, HEADS * DIM, dtype=torch.bfloat16)
    shape = _core.Heads(HEADS, KV_HEADS, DIM, 0, 0)
    times = repeat_seconds(
        lambda: dense.attention(batch, shape, q, keys, values, out, DIM**-0.5, 0, None), min_seconds
    )
    pairs = rows * (KEYS - ROWS) + rows * (ROWS + 1) / 2
    return 4.0 * HEADS * DIM * pairs / statistics.median(times)


def _batch(sequences: int) -> _core.BatchView:
    """Each with its last rows in a step."""
    starts = torch.arange(sequences + 1, dtype=torch.int32) * ROWS
    positions = torch.arange(KEYS - ROWS, KEYS).repeat(sequences)
    return _core.BatchView(
        positions=positions, cache_slots=positions, query_starts=starts,
        seq_lens=torch.full((sequences,), KEYS, dtype=torch.int32),
        block_tables=torch.arange(KEYS // PAGE, dtype=torch.int32).repeat(sequences, 1), page_size=PAGE,
        num_pages=KEYS // PAGE, slots=torch.zeros(sequences, dtype=torch.int32),
    )  # fmt: skip
