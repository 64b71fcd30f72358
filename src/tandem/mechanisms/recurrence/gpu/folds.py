"""`StateUpdates` on a GPU: the recurrence in Triton. Rows that decode go row by row, prompts' rows in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.batch_layout import KernelBatch
from tandem.kernels.gpu.dependent_launch import begin, overlapped
from tandem.kernels.step_rows import StepContext
from tandem.mechanisms.recurrence.gpu.convolve import convolve
from tandem.mechanisms.recurrence.gpu.correct import correct
from tandem.mechanisms.recurrence.gpu.scan import MOST_KEYS, scan
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import Taps

COLUMNS = 32  # of a memory that a program holds


@triton.jit
def _fold(queries, written, values, decay, beta, out, memory, starts, lens, slots, slot_stride,
          HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, APART: tl.constexpr,
          CORRECTS: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Some columns of one head's memory through the rows of one sequence. APART: each key's channel decays by itself.
    Sequences without tokens before start from zeros."""
    begin(OVERLAP)
    s, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    k, v = tl.arange(0, KB), tl.program_id(1) * VB + tl.arange(0, VB)
    in_k, in_v = k < KEYS, v < VALUES
    first = tl.load(starts + s).to(tl.int64)
    count = tl.load(starts + s + 1).to(tl.int64) - first
    known = tl.load(lens + s).to(tl.int64) - count
    at = memory + tl.load(slots + s).to(tl.int64) * slot_stride + head * KEYS * VALUES
    at = at + k[:, None] * VALUES + v[None, :]
    inside = in_k[:, None] & in_v[None, :]
    state = tl.where(known > 0, tl.load(at, inside, other=0.0), 0.0)
    for row in range(first, first + count):
        of_head, of_group = row * HEADS + head, (row * (HEADS // GROUP) + head // GROUP) * KEYS
        q = tl.load(queries + of_group + k, in_k, other=0.0)
        w = tl.load(written + of_group + k, in_k, other=0.0)
        added = tl.load(values + of_head * VALUES + v, in_v, other=0.0)
        if APART:
            state *= tl.exp(tl.load(decay + of_head * KEYS + k, in_k, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(decay + of_head))
        if CORRECTS:
            added = (added - tl.sum(state * w[:, None], 0)) * tl.load(beta + of_head)
        state += w[:, None] * added[None, :]
        tl.store(out + of_head * VALUES + v, tl.sum(state * q[:, None], 0), in_v)
    tl.store(at, state, inside)


class GpuStateUpdates:
    """The last bits of a prompt's rows depend on where its chunks begin."""

    def convolved(self, new: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        out = torch.empty(new.shape, dtype=torch.float32, device=new.device)
        convolve(new, step, ring, taps, out, gated=False)
        return out

    def gated(self, projected: Tensor, step: StepContext, ring: Tensor, taps: Taps) -> Tensor:
        out = projected.new_empty((len(projected), taps.rows.shape[1]))
        convolve(projected, step, ring, taps, out, gated=True)
        return out

    def folded(self, tokens: RecurrentTokens, step: StepContext, memory: Tensor) -> Tensor:
        beta = None if tokens.beta is None else tokens.beta.contiguous()
        queries, written, values, decay = (part.contiguous() for part in tokens[:4])
        out = answered(RecurrentTokens(queries, written, values, decay, beta), step.batch, memory)
        # A copy must give what its row gives: it writes keys and values to the same places.
        return out.index_select(0, step.rows.copied) if is_alone(step.batch, out) else out


def is_alone(batch: KernelBatch, rows: Tensor) -> bool:
    return len(batch.seq_lens) == len(rows)


def answered(tokens: RecurrentTokens, batch: KernelBatch, memory: Tensor) -> Tensor:
    """tokens: contiguous. What each row's memory answers, copies of rows for themselves."""
    out = torch.empty_like(tokens.values)
    in_chunks = None if is_alone(batch, out) else way_of(tokens)
    single = batch.single_rows if in_chunks else len(batch.seq_lens)
    if single:
        _row_by_row(tokens, batch, range(single), memory, out)
    if single < len(batch.seq_lens):
        answer_prompts(tokens, batch, single, memory, out)
    return out


def answer_prompts(tokens: RecurrentTokens, batch: KernelBatch, first: int, memory: Tensor, out: Tensor) -> None:
    """Answers of all sequences from `first` on into their rows of out; those before have one row each."""
    if in_chunks := way_of(tokens):
        in_chunks(tokens, batch, first, memory, out)
    else:
        _row_by_row(tokens, batch, range(first, len(batch.seq_lens)), memory, out)


def way_of(tokens: RecurrentTokens) -> Callable[[RecurrentTokens, KernelBatch, int, Tensor, Tensor], None] | None:
    """How prompts' rows go in chunks, all sequences from one on; None: there is no code for it."""
    if tokens.queries.shape[2] > MOST_KEYS:
        return None
    if tokens.beta is not None:
        return correct
    return scan if tokens.decay.shape[2] == 1 else None


def _row_by_row(tokens: RecurrentTokens, batch: KernelBatch, which: range, memory: Tensor, out: Tensor) -> None:
    """Sequences `which`."""
    queries, written, values, decay, beta = tokens
    (heads, width), (groups, keys) = values.shape[1:], queries.shape[1:]
    columns = min(COLUMNS, max(16, triton.next_power_of_2(width)))
    _fold[(len(which) * heads, triton.cdiv(width, columns))](
        queries, written, values, decay, values if beta is None else beta, out, memory,
        *(each[which.start :] for each in (batch.query_starts, batch.seq_lens, batch.slots)), memory.stride(0),
        HEADS=heads, GROUP=heads // groups, KEYS=keys, VALUES=width, APART=decay.shape[2] > 1,
        CORRECTS=beta is not None, KB=max(16, triton.next_power_of_2(keys)), VB=columns, num_warps=4,
        **overlapped(values.device),
    )  # fmt: skip


def bound(ops: object, shape: object) -> GpuStateUpdates:
    return GpuStateUpdates()
