"""Prompts' rows through a memory that is corrected: in chunks, whether a head decays as one or its channels apart.

With G the running sum of the decays' logarithms in a chunk, row t learns

    u_t = beta_t (v_t - (k_t e^G_t) S - sum over i < t of A_ti u_i),

where S is the memory before the chunk, and A the rows to each other (`faded.py`). So u = (I + beta A)^-1 (beta v) less
(I + beta A)^-1 (beta k e^G) S, of which only the second product needs S. Four kernels run for all chunks at once; from
chunk to chunk two products are left. Products are of float32 in three parts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.attention_prefill import SEQUENCES, sequence_of
from tandem.mechanisms.channel_delta.shape import CORRECT_CHUNK
from tandem.mechanisms.delta_net.gpu.chunk import inverse
from tandem.mechanisms.recurrence.gpu.decayed import SMALL, across_blocks, number_of, within_blocks
from tandem.mechanisms.recurrence.tokens import RecurrentTokens

CHUNK = CORRECT_CHUNK
PRECISION = "tf32x3"
SOLVE_COLUMNS, CARRY_COLUMNS, READ_COLUMNS = 128, 32, 32  # of values, in a program at a time


class ChunkIntermediates(NamedTuple):
    """Tensors between the kernels, float32. Rows that are no chunk's are not written."""

    alike: Tensor  # [T, H, CHUNK]
    query_scores: Tensor  # [T, H, CHUNK]
    asks: Tensor  # [T, H, K], faded
    answered: Tensor  # [T, H, K]: keys, faded; then what times the memory u lacks
    ends: Tensor  # [T, H, K]
    totals: Tensor  # [blocks, H, K]
    left: Tensor  # [T, H, K]: keys, faded to their chunk's end
    fade: Tensor  # [chunks, H, K]: what a chunk multiplies the memory with
    learnt: Tensor  # [T, H, V]: u as if the memory were empty, then u
    before: Tensor  # [chunks, H, K, V]: the memory before each

    @classmethod
    def of(cls, tokens: RecurrentTokens, sequences: int) -> ChunkIntermediates:
        (rows, heads, width), keys = tokens.values.shape, tokens.queries.shape[2]
        chunks, empty = rows // CHUNK + sequences, tokens.values.new_empty
        alike, query_pairs = empty((2, rows, heads, CHUNK)).unbind()
        asks, answered, ends, left = empty((4, rows, heads, keys)).unbind()
        totals, fade = empty((chunks * (CHUNK // SMALL), heads, keys)), empty((chunks, heads, keys))
        learnt, before = empty((rows, heads, width)), empty((chunks, heads, keys, width))
        return cls(alike, query_pairs, asks, answered, ends, totals, left, fade, learnt, before)


@triton.jit(do_not_specialize=["first", "sequences"])
def _solve(values, beta, alike, answered, learnt, starts, first, sequences, HEADS: tl.constexpr, KEYS: tl.constexpr,
           VALUES: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr,
           AT_ONCE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    if s + first >= sequences:
        return
    head, r, c = tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, KB)
    chunk, end = tl.load(starts + s + first) + block * CHUNK, tl.load(starts + s + first + 1)
    inside, of_heads = chunk + r < end, (chunk + r).to(tl.int64) * HEADS + head
    lower = inside[:, None] & (r[:, None] > r[None, :])
    a = tl.load(alike + of_heads[:, None] * CHUNK + r[None, :], lower, other=0.0)
    solved = inverse(a, CHUNK, SMALL, PRECISION)
    by = tl.load(beta + of_heads, inside, other=0.0)[:, None]
    for first_v in range(0, VALUES, VB):
        v = first_v + tl.arange(0, VB)
        at, mask = of_heads[:, None] * VALUES + v[None, :], inside[:, None] & (v < VALUES)[None, :]
        scaled = by * tl.load(values + at, mask, other=0.0)
        tl.store(learnt + at, tl.dot(solved, scaled, input_precision=PRECISION), mask)
    at, mask = of_heads[:, None] * KEYS + c[None, :], inside[:, None] & (c < KEYS)[None, :]
    faded = tl.load(answered + at, mask, other=0.0)
    tl.store(answered + at, tl.dot(solved, faded, input_precision=PRECISION), mask)


@triton.jit(do_not_specialize=["first"])
def _carry(answered, learnt, left, fade, before, memory, starts, lens, slots, slot_stride, first,
           HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
           CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """From chunk to chunk, some columns of a head's memory."""
    s, head = tl.program_id(2), tl.program_id(1)
    r, c, v = tl.arange(0, CHUNK), tl.arange(0, KB), tl.program_id(0) * VB + tl.arange(0, VB)
    in_k, in_v = c < KEYS, v < VALUES
    start, end = tl.load(starts + s + first), tl.load(starts + s + first + 1)
    known = tl.load(lens + s + first) - (end - start)
    of_memory, inner = c[:, None] * VALUES + v[None, :], in_k[:, None] & in_v[None, :]
    memory_at = memory + tl.load(slots + s + first).to(tl.int64) * slot_stride + head * KEYS * VALUES + of_memory
    state = tl.where(known > 0, tl.load(memory_at, inner, other=0.0), 0.0)
    for chunk in range(start, end, CHUNK):
        inside, of_chunk = chunk + r < end, number_of(chunk, s, CHUNK) * HEADS + head
        of_heads = ((chunk + r).to(tl.int64) * HEADS + head)[:, None]
        mask_k, mask_v = inside[:, None] & in_k[None, :], inside[:, None] & in_v[None, :]
        by_key = tl.load(answered + of_heads * KEYS + c[None, :], mask_k, other=0.0)
        u = tl.load(learnt + of_heads * VALUES + v[None, :], mask_v, other=0.0)
        keys = tl.load(left + of_heads * KEYS + c[None, :], mask_k, other=0.0)
        shrink = tl.load(fade + of_chunk * KEYS + c, in_k, other=0.0)
        tl.store(before + of_chunk * KEYS * VALUES + of_memory, state, inner)
        u -= tl.dot(by_key, state, input_precision=PRECISION)
        tl.store(learnt + of_heads * VALUES + v[None, :], u, mask_v)
        state = state * shrink[:, None] + tl.dot(tl.trans(keys), u, input_precision=PRECISION)
    tl.store(memory_at, state, inner)


@triton.jit(do_not_specialize=["first", "sequences"])
def _read(asks, query_pairs, learnt, before, out, starts, first, sequences, HEADS: tl.constexpr, KEYS: tl.constexpr,
          VALUES: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    if s + first >= sequences:
        return
    head, r, c = tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, KB)
    v = tl.program_id(2) * VB + tl.arange(0, VB)
    chunk, end = tl.load(starts + s + first) + block * CHUNK, tl.load(starts + s + first + 1)
    inside, of_heads = chunk + r < end, (chunk + r).to(tl.int64)[:, None] * HEADS + head
    in_k, in_v = (c < KEYS)[None, :], (v < VALUES)[None, :]
    q = tl.load(asks + of_heads * KEYS + c[None, :], inside[:, None] & in_k, other=0.0)
    memory_at = before + (number_of(chunk, s, CHUNK) * HEADS + head) * KEYS * VALUES
    state = tl.load(memory_at + c[:, None] * VALUES + v[None, :], (c < KEYS)[:, None] & in_v, other=0.0)
    y = tl.dot(q, state, input_precision=PRECISION)
    lower = inside[:, None] & (r[:, None] >= r[None, :])
    pairs = tl.load(query_pairs + of_heads * CHUNK + r[None, :], lower, other=0.0)
    at, mask_v = of_heads * VALUES + v[None, :], inside[:, None] & in_v
    y += tl.dot(pairs, tl.load(learnt + at, mask_v, other=0.0), input_precision=PRECISION)
    tl.store(out + at, y, mask_v)


def correct(tokens: RecurrentTokens, batch: KernelBatch, first: int, memory: Tensor, out: Tensor) -> None:
    """All sequences from `first` on; those before have one row each. tokens: contiguous, with beta."""
    queries, written, values, decay, beta = tokens
    (rows, heads, width), (groups, keys) = values.shape, queries.shape[1:]
    sequences, others = len(batch.seq_lens), len(batch.seq_lens) - first
    b, chunks, starts = ChunkIntermediates.of(tokens, others), (rows - first) // CHUNK + others, batch.query_starts
    span, blocks = (starts, first, sequences), (chunks, heads, CHUNK // SMALL)
    sizes = {"HEADS": heads, "KEYS": keys, "KB": _tile(keys), "CHUNK": CHUNK}
    each, exact = {**sizes, "AT_ONCE": SEQUENCES}, {"PRECISION": PRECISION, "num_stages": 1}
    within_blocks[blocks](
        queries, written, decay, beta, *b[:6], *span, **each, GROUP=heads // groups, DECAYS=decay.shape[2],
        SMALL=SMALL, num_warps=2,
    )  # fmt: skip
    across_blocks[blocks](*b[:8], *span, **each, **exact, SMALL=SMALL, num_warps=2)
    _solve[(chunks, heads)](
        values, beta, b.alike, b.answered, b.learnt, *span, **each, **exact, VALUES=width,
        VB=_tile(width, SOLVE_COLUMNS), SMALL=SMALL, num_warps=4,
    )  # fmt: skip
    columns = _tile(width, CARRY_COLUMNS)
    _carry[(triton.cdiv(width, columns), heads, others)](
        b.answered, b.learnt, b.left, b.fade, b.before, memory, starts, batch.seq_lens, batch.slots, memory.stride(0),
        first, **sizes, **exact, VALUES=width, VB=columns, num_warps=4,
    )  # fmt: skip
    columns = _tile(width, READ_COLUMNS)
    _read[(chunks, heads, triton.cdiv(width, columns))](
        b.asks, b.query_scores, b.learnt, b.before, out, *span, **each, **exact, VALUES=width, VB=columns, num_warps=4
    )


def _tile(size: int, most: int = 1 << 30) -> int:
    """The least that tensor cores multiply is 16."""
    return min(most, max(16, int(triton.next_power_of_2(size))))
