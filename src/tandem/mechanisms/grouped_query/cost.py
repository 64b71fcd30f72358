"""Planner costs of grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tandem.mechanisms import cost
from tandem.mechanisms.cost import KeyShape, Limit, Output, cost_of, pairs
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.spec.gpu_scratch import DECODE_PARTS, DECODED_ROWS, GQA_PIECE, GQA_ROUND, StepSize, gqa_rows
from tandem.spec.rope import Rope
from tandem.spec.state import DTYPE_BYTES
from tandem.spec.stored import StoredFormats

MAX_HEAD = 256  # channels of a key: several blocks of them lie in shared memory at a time


class Cost(cost.Cost[Gqa]):
    """Cost of keys and values of all tokens, or of a window."""

    needs_kernels = False
    each_row = True
    warms_up = True

    @property
    def prompt_graphs(self) -> bool:
        return not self.shape.window

    @property
    def keys(self) -> KeyShape:
        s = self.shape
        return KeyShape(s.heads, s.kv_heads, s.head_dim, s.value_dim, s.scale, s.window, s.sinks)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        index = self.shape.index
        return (self.shape.rope,) if index is None else (self.shape.rope, *cost_of(index).ropes)

    def scratch_bytes(self, step: StepSize, hidden: int, streams: int) -> int:
        """Rows that choose have sums of parts of their keys, as rows that decode, beside what an index takes."""
        whole, index = gqa_scratch_bytes(self.shape, step), self.shape.index
        if index is None:
            return whole
        own = cost_of(index).scratch_bytes(step, hidden, streams)
        sums, results = self.decode_sums_bytes(step.rows) // 2, 2 * step.rows * self.shape.heads * self.shape.value_dim
        return max(whole, own + sums + results)

    def decode_sums_bytes(self, rows: int) -> int:
        """Once for graphs and once for other steps."""
        each = self.shape.heads * (self.shape.value_dim + 2)
        return 2 * min(rows, DECODED_ROWS) * DECODE_PARTS * each * 4

    @property
    def row_bytes(self) -> int:
        s = self.shape
        return 2 * (s.head_dim * (2 * s.heads + 2 * s.kv_heads) + s.value_dim * s.heads)

    def with_cache(self, dtype: str) -> Gqa:
        return replace(self.shape, cached=dtype)

    def flops(self, rows: int, before: int, per_head: bool) -> float:
        s, end = self.shape, before + rows
        channels, most = s.heads * (s.head_dim + s.value_dim), s.window or end
        if s.index is None:
            return 2.0 * pairs(rows, before, most) * channels
        products = 2.0 * pairs(rows, before, min(end, s.index.most)) * channels
        return products + cost_of(s.index).flops(rows, before, per_head)

    def unread(self, context: int) -> int:
        s = self.shape
        unread_tokens = 0 if s.index is None else max(0, context - s.index.most)
        return unread_tokens * s.kv_heads * (s.head_dim + s.value_dim)

    def why_no_gpu(self) -> str:
        if self.shape.index is not None and (chooses := cost_of(self.shape.index).why_no_gpu()):
            return chooses
        wide = self.shape.head_dim > MAX_HEAD
        why = f"the GPU kernels read heads of at most {MAX_HEAD} channels, not {self.shape.head_dim}"
        return why if wide else super().why_no_gpu()

    @property
    def sums(self) -> int:
        """One whose heads are normed together is copied: every rank computes the same."""
        return 0 if self.shape.qk_norm == "width" else 1

    def cut(self, ranks: int) -> Gqa:
        s = self.shape
        kv, copies = max(1, s.kv_heads // ranks), max(1, ranks // s.kv_heads)
        return replace(s, heads=s.heads // ranks, kv_heads=kv, kv_copies=copies)

    def limits(self, expert_unit: int, stored: StoredFormats) -> Iterator[Limit]:
        yield Limit(f"{self.shape.heads} query heads", self.shape.heads)
        yield Limit(f"{self.shape.kv_heads} heads of keys", self.shape.kv_heads, copied=True)

    @property
    def output(self) -> Output:
        return Output("o_proj", self.shape.heads * self.shape.value_dim)


def gqa_scratch_bytes(mixer: Gqa, step: StepSize) -> int:
    """Bytes of one layer whose long chunks are computed piece by piece (`kernels/gpu/cudnn_attention/`). Two pieces'
    keys and values: the next is gathered before the last is free. Those in pages of another dtype are gathered as they
    are, one kind at a time, and converted. Results of all rows wait to be put together, which takes them twice."""
    if mixer.window or mixer.sinks:
        return 0
    rows = min(step.rows, gqa_rows(mixer.heads, mixer.head_dim, mixer.value_dim)) + 3 * GQA_ROUND
    tokens = max(rows, min(GQA_PIECE, step.context))
    each = mixer.heads * (2 * mixer.head_dim + (2 + 2 + 4) * mixer.value_dim)
    pieces = rows * each + 2 * 2 * tokens * mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
    if mixer.cached != "act":
        pieces += DTYPE_BYTES[mixer.cached] * tokens * mixer.kv_heads * mixer.head_dim
    results = 2 * step.rows * mixer.heads * mixer.value_dim
    return max(pieces + results, 2 * results)
