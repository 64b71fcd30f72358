"""Prompts' rows through a memory that decays as one and corrects nothing: in chunks (Mamba 2, arXiv 2405.21060, §6).

With G the running sum of the decays' logarithms in a chunk, row t reads

    y_t = e^G_t S q_t + sum over i <= t of e^(G_t - G_i) (q_t . w_i) v_i,

where S is the memory before the chunk. The products q . w of all chunks are made first: heads of a group share them.
Then each program takes some columns of one head's memory from chunk to chunk. Products are of float32 in three parts,
so a row differs from one that is computed alone in its last bits only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.attention_prefill import SEQUENCES, sequence_of
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.state_space.shape import SCAN_CHUNK

CHUNK = SCAN_CHUNK
COLUMNS = 32  # of a memory that a program holds
MOST_KEYS = 128  # that it has registers for
PRECISION = "tf32x3"


@triton.jit(do_not_specialize=["first", "sequences"])
def _pairs(queries, written, pairs, starts, first, sequences, GROUPS: tl.constexpr, KEYS: tl.constexpr,
           KB: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """pairs: float32 [T, GROUPS, CHUNK], a row's columns are its chunk's rows."""
    s, block = sequence_of(starts + first, sequences - first, tl.program_id(0), CHUNK, AT_ONCE)
    s += first
    if s >= sequences:
        return
    group, r, k = tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, KB)
    start = tl.load(starts + s) + block * CHUNK
    inside, rows = start + r < tl.load(starts + s + 1), (start + r).to(tl.int64)
    of_rows, mask = rows[:, None] * GROUPS + group, inside[:, None] & (k < KEYS)[None, :]
    q = tl.load(queries + of_rows * KEYS + k[None, :], mask, other=0.0)
    w = tl.load(written + of_rows * KEYS + k[None, :], mask, other=0.0)
    products = tl.dot(q, tl.trans(w), input_precision=PRECISION)
    tl.store(pairs + of_rows * CHUNK + r[None, :], products, inside[:, None])


@triton.jit(do_not_specialize=["first"])
def _scan(queries, written, values, decay, pairs, out, memory, starts, lens, slots, slot_stride, first,
          HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KB: tl.constexpr,
          VB: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """GROUP: heads that share what is asked and written."""
    s, head = tl.program_id(2) + first, tl.program_id(1)
    r, k, v = tl.arange(0, CHUNK), tl.arange(0, KB), tl.program_id(0) * VB + tl.arange(0, VB)
    in_k, in_v, lower = k < KEYS, v < VALUES, r[:, None] >= r[None, :]
    start, end = tl.load(starts + s), tl.load(starts + s + 1)
    known = tl.load(lens + s) - (end - start)
    at = memory + tl.load(slots + s).to(tl.int64) * slot_stride + head * KEYS * VALUES
    at = at + k[:, None] * VALUES + v[None, :]
    inner = in_k[:, None] & in_v[None, :]
    state = tl.where(known > 0, tl.load(at, inner, other=0.0), 0.0)
    for chunk in range(start, end, CHUNK):
        inside, rows = chunk + r < end, (chunk + r).to(tl.int64)
        of_heads, of_groups = rows * HEADS + head, rows[:, None] * (HEADS // GROUP) + head // GROUP
        mask_k, mask_v = inside[:, None] & in_k[None, :], inside[:, None] & in_v[None, :]
        q = tl.load(queries + of_groups * KEYS + k[None, :], mask_k, other=0.0)
        w = tl.load(written + of_groups * KEYS + k[None, :], mask_k, other=0.0)
        own = tl.load(values + of_heads[:, None] * VALUES + v[None, :], mask_v, other=0.0)
        scores = tl.load(pairs + of_groups * CHUNK + r[None, :], inside[:, None], other=0.0)
        log = tl.load(decay + of_heads, inside, other=0.0)
        passed, last = tl.cumsum(log, 0), tl.sum(log)
        scores *= tl.where(lower, tl.exp(tl.where(lower, passed[:, None] - passed[None, :], 0.0)), 0.0)
        y = tl.dot(q, state, input_precision=PRECISION) * tl.exp(passed)[:, None]
        y += tl.dot(scores, own, input_precision=PRECISION)
        tl.store(out + of_heads[:, None] * VALUES + v[None, :], y, mask_v)
        left = own * tl.exp(last - passed)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(w), left, input_precision=PRECISION)
    tl.store(at, state, inner)


def scan(tokens: RecurrentTokens, batch: KernelBatch, first: int, memory: Tensor, out: Tensor) -> None:
    """All sequences from `first` on; those before have one row each. tokens: contiguous."""
    queries, written, values, decay, _ = tokens
    (rows, heads, width), (groups, keys) = values.shape, queries.shape[1:]
    sequences, padded = len(batch.seq_lens), max(16, triton.next_power_of_2(keys))
    pairs = values.new_empty((rows, groups, CHUNK))
    others = sequences - first
    _pairs[((rows - first) // CHUNK + others, groups)](
        queries, written, pairs, batch.query_starts, first, sequences, GROUPS=groups, KEYS=keys, KB=padded, CHUNK=CHUNK,
        AT_ONCE=SEQUENCES, PRECISION=PRECISION, num_warps=4, num_stages=1,
    )  # fmt: skip
    columns = min(COLUMNS, max(16, triton.next_power_of_2(width)))
    _scan[(triton.cdiv(width, columns), heads, others)](
        queries, written, values, decay, pairs, out, memory, batch.query_starts, batch.seq_lens, batch.slots,
        memory.stride(0), first, HEADS=heads, GROUP=heads // groups, KEYS=keys, VALUES=width, KB=padded, VB=columns,
        CHUNK=CHUNK, PRECISION=PRECISION, num_warps=4, num_stages=1,
    )  # fmt: skip
