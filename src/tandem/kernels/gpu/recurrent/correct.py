"""Prompts' rows through a memory that is corrected: in chunks, whether a head decays as one or its channels apart.

With G the running sum of the decays' logarithms in a chunk, row t learns

    u_t = beta_t (v_t - (k_t e^G_t) S - sum over i < t of A_ti u_i),

where S is the memory before the chunk, and A the rows to each other (`faded.py`). So u = (I + beta A)^-1 (beta v) less
(I + beta A)^-1 (beta k e^G) S, of which only the second product needs S. Three kernels run for all chunks at once; from
chunk to chunk two products are left. Products are of float32 in three parts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tandem.config.mechanisms.channel_delta import CORRECT_CHUNK
from tandem.kernels.batch_layout import BatchLayout
from tandem.kernels.gpu.attention_prefill import SEQUENCES, sequence_of
from tandem.kernels.gpu.delta.chunk import inverse
from tandem.kernels.gpu.recurrent.faded import SMALL, faded_pairs, faded_to_end, logs_of
from tandem.kernels.recurrent.tokens import Tokens

CHUNK = CORRECT_CHUNK
PRECISION = "tf32x3"
SOLVE_COLUMNS, CARRY_COLUMNS, READ_COLUMNS = 64, 32, 64  # of values, in a program at a time


class Between(NamedTuple):
    """What the kernels leave each other, float32. Rows that are no chunk's are not written."""

    alike: Tensor  # [T, H, CHUNK]
    seen: Tensor  # [T, H, CHUNK]
    answered: Tensor  # [T, H, K]: times the memory it is what u lacks
    learnt: Tensor  # [T, H, V]: u as if the memory were empty, then u
    left: Tensor  # [T, H, K]: keys, faded to their chunk's end
    fade: Tensor  # [chunks, H, K]: what a chunk multiplies the memory with
    before: Tensor  # [chunks, H, K, V]: the memory before each

    @classmethod
    def of(cls, tokens: Tokens, sequences: int) -> Between:
        (rows, heads, width), keys = tokens.values.shape, tokens.asked.shape[2]
        made, chunks = tokens.values.new_empty, rows // CHUNK + sequences
        return cls(
            made(rows, heads, CHUNK), made(rows, heads, CHUNK), made(rows, heads, keys), made(rows, heads, width),
            made(rows, heads, keys), made(chunks, heads, keys), made(chunks, heads, keys, width),
        )  # fmt: skip


@triton.jit
def _number(chunk, s, CHUNK: tl.constexpr):
    """Of the chunk of sequence s that begins at row `chunk`: no two have the same."""
    return (chunk // CHUNK + s).to(tl.int64)


@triton.jit(do_not_specialize=["first", "sequences"])
def _solve(written, values, decay, beta, alike, answered, learnt, left, fade, starts, first, sequences,
           HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DECAYS: tl.constexpr,
           KB: tl.constexpr, VB: tl.constexpr, CHUNK: tl.constexpr, SMALL: tl.constexpr, AT_ONCE: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    if s + first >= sequences:
        return
    head, r, c = tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, KB)
    chunk, end = tl.load(starts + s + first) + block * CHUNK, tl.load(starts + s + first + 1)
    inside, rows = chunk + r < end, (chunk + r).to(tl.int64)
    of_heads, in_k = rows * HEADS + head, c < KEYS
    lower = inside[:, None] & (r[:, None] > r[None, :])
    a = tl.load(alike + of_heads[:, None] * CHUNK + r[None, :], lower, other=0.0)
    solved = inverse(a, CHUNK, SMALL, PRECISION)
    by = tl.load(beta + of_heads, inside, other=0.0)[:, None]
    for first_v in range(0, VALUES, VB):
        v = first_v + tl.arange(0, VB)
        at, there = of_heads[:, None] * VALUES + v[None, :], inside[:, None] & (v < VALUES)[None, :]
        given = by * tl.load(values + at, there, other=0.0)
        tl.store(learnt + at, tl.dot(solved, given, input_precision=PRECISION), there)
    there = inside[:, None] & in_k[None, :]
    of_groups = (rows * (HEADS // GROUP) + head // GROUP) * KEYS
    keys = tl.load(written + of_groups[:, None] + c[None, :], there, other=0.0)
    logs, at = logs_of(decay, of_heads, inside, c, KEYS, DECAYS), of_heads[:, None] * KEYS + c[None, :]
    faded = by * keys * tl.exp(tl.cumsum(logs, 0))
    tl.store(answered + at, tl.dot(solved, faded, input_precision=PRECISION), there)
    behind = (chunk + r + 1 < end) & (r < CHUNK - 1)
    tl.store(left + at, faded_to_end(keys, decay, of_heads, behind, c, HEADS, KEYS, DECAYS), there)
    tl.store(fade + (_number(chunk, s, CHUNK) * HEADS + head) * KEYS + c, tl.exp(tl.sum(logs, 0)), in_k)


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
    held = memory + tl.load(slots + s + first).to(tl.int64) * slot_stride + head * KEYS * VALUES + of_memory
    state = tl.where(known > 0, tl.load(held, inner, other=0.0), 0.0)
    for chunk in range(start, end, CHUNK):
        inside, of_chunk = chunk + r < end, _number(chunk, s, CHUNK) * HEADS + head
        of_heads = ((chunk + r).to(tl.int64) * HEADS + head)[:, None]
        there, here = inside[:, None] & in_k[None, :], inside[:, None] & in_v[None, :]
        by_key = tl.load(answered + of_heads * KEYS + c[None, :], there, other=0.0)
        u = tl.load(learnt + of_heads * VALUES + v[None, :], here, other=0.0)
        keys = tl.load(left + of_heads * KEYS + c[None, :], there, other=0.0)
        shrink = tl.load(fade + of_chunk * KEYS + c, in_k, other=0.0)
        tl.store(before + of_chunk * KEYS * VALUES + of_memory, state, inner)
        u -= tl.dot(by_key, state, input_precision=PRECISION)
        tl.store(learnt + of_heads * VALUES + v[None, :], u, here)
        state = state * shrink[:, None] + tl.dot(tl.trans(keys), u, input_precision=PRECISION)
    tl.store(held, state, inner)


@triton.jit(do_not_specialize=["first", "sequences"])
def _read(asked, decay, seen, learnt, before, out, starts, first, sequences, HEADS: tl.constexpr,
          GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, DECAYS: tl.constexpr, KB: tl.constexpr,
          VB: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    if s + first >= sequences:
        return
    head, r, c = tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, KB)
    v = tl.program_id(2) * VB + tl.arange(0, VB)
    chunk, end = tl.load(starts + s + first) + block * CHUNK, tl.load(starts + s + first + 1)
    inside, rows = chunk + r < end, (chunk + r).to(tl.int64)
    of_heads, in_k, in_v = rows * HEADS + head, c < KEYS, v < VALUES
    of_groups = (rows * (HEADS // GROUP) + head // GROUP) * KEYS
    q = tl.load(asked + of_groups[:, None] + c[None, :], inside[:, None] & in_k[None, :], other=0.0)
    q *= tl.exp(tl.cumsum(logs_of(decay, of_heads, inside, c, KEYS, DECAYS), 0))
    held = before + (_number(chunk, s, CHUNK) * HEADS + head) * KEYS * VALUES
    state = tl.load(held + c[:, None] * VALUES + v[None, :], in_k[:, None] & in_v[None, :], other=0.0)
    y = tl.dot(q, state, input_precision=PRECISION)
    lower = inside[:, None] & (r[:, None] >= r[None, :])
    pairs = tl.load(seen + of_heads[:, None] * CHUNK + r[None, :], lower, other=0.0)
    at, here = of_heads[:, None] * VALUES + v[None, :], inside[:, None] & in_v[None, :]
    y += tl.dot(pairs, tl.load(learnt + at, here, other=0.0), input_precision=PRECISION)
    tl.store(out + at, y, here)


def correct(tokens: Tokens, batch: BatchLayout, first: int, memory: Tensor, out: Tensor) -> None:
    """All sequences from `first` on; those before have one row each. tokens: contiguous, with beta."""
    asked, written, values, decay, beta = tokens
    (rows, heads, width), (groups, keys) = values.shape, asked.shape[1:]
    sequences, others = len(batch.seq_lens), len(batch.seq_lens) - first
    sizes = {"HEADS": heads, "KEYS": keys, "KB": _tile(keys), "CHUNK": CHUNK, "PRECISION": PRECISION}
    rules = {**sizes, "GROUP": heads // groups, "DECAYS": decay.shape[2], "AT_ONCE": SEQUENCES}
    b, chunks, starts = Between.of(tokens, others), (rows - first) // CHUNK + others, batch.query_starts
    faded_pairs[(chunks, heads, CHUNK // SMALL)](
        asked, written, decay, beta, b.alike, b.seen, starts, first, sequences, **rules, SMALL=SMALL, num_warps=4,
        num_stages=1,
    )
    _solve[(chunks, heads)](
        written, values, decay, beta, b.alike, b.answered, b.learnt, b.left, b.fade, starts, first, sequences, **rules,
        VALUES=width, VB=_tile(width, SOLVE_COLUMNS), SMALL=SMALL, num_warps=8, num_stages=1,
    )  # fmt: skip
    columns = _tile(width, CARRY_COLUMNS)
    _carry[(triton.cdiv(width, columns), heads, others)](
        b.answered, b.learnt, b.left, b.fade, b.before, memory, starts, batch.seq_lens, batch.slots, memory.stride(0),
        first, **sizes, VALUES=width, VB=columns, num_warps=4, num_stages=1,
    )  # fmt: skip
    columns = _tile(width, READ_COLUMNS)
    _read[(chunks, heads, triton.cdiv(width, columns))](
        asked, decay, b.seen, b.learnt, b.before, out, starts, first, sequences, **rules, VALUES=width, VB=columns,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _tile(size: int, most: int = 1 << 30) -> int:
    """The least that tensor cores multiply is 16."""
    return min(most, max(16, int(triton.next_power_of_2(size))))
