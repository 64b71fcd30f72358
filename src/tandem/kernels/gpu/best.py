"""Best token of every row of logits, in two kernels, where PyTorch takes five; and the logarithm of the sum.

A step ends with these. Each row is summed in an order of its own: PyTorch's depends on how many rows there are, and a
log-probability must not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.gpu.dependent_launch import begin, overlapped

PART = 4096  # logits of a program
MOST_POLLS = 1 << 24  # about 15 s; the host never takes so long, but a GPU that waits for ever cannot be stopped


@triton.jit
def _best(x, at, inside, last):
    """The largest of x (NaN, if there is one) and the first of `at` that has it."""
    broken = inside & (x != x)
    key = tl.where(broken, float("inf"), tl.where(inside, x, float("-inf")))
    most = tl.max(key)
    first = tl.min(tl.where(inside & (key == most), at, last))
    return tl.where(tl.max(broken.to(tl.int32)) != 0, float("nan"), most), first


@triton.jit(do_not_specialize=["rows"])
def _until_made(masks, rows, most, OVERLAP: tl.constexpr):
    """Waits for the word whose address is behind those of the masks, in memory of the host. Says so in the next word
    when that takes too long."""
    begin(OVERLAP)
    address = tl.load(masks + rows)
    if address != 0:
        word = address.to(tl.pointer_type(tl.int32))
        stamp = tl.load(word, volatile=True)
        polls = 0
        while (stamp == 0) & (polls < most):
            stamp = tl.load(word, volatile=True)
            polls += 1
        if stamp == 0:
            tl.store(word + 2, 1)  # words are int64


@triton.jit
def _of_part(logits, masks, values, ids, vocab, parts, MASKED: tl.constexpr, PART: tl.constexpr,
             OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * vocab + at, at < vocab, other=0.0)
    if MASKED:
        place = tl.load(masks + row)
        is_masked = place != 0
        bits = tl.load(place.to(tl.pointer_type(tl.int32)) + at // 32, (at < vocab) & is_masked, other=-1)
        allowed = ((bits >> (at % 32)) & 1) != 0
        x = tl.where(allowed | (x != x), x, float("-inf"))
    value, first = _best(x, at, at < vocab, vocab)
    tl.store(values + row * parts + part, value)
    tl.store(ids + row * parts + part, first)


@triton.jit
def _of_row(values, ids, best, vocab, parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(values + row * parts + part, part < parts, other=0.0)
    at = tl.load(ids + row * parts + part, part < parts, other=0)
    value, first = _best(x, at, part < parts, vocab)
    tl.store(best + row * 2, first.to(tl.float64))
    tl.store(best + row * 2 + 1, value.to(tl.float64))


def best_of(logits: Tensor, masks: Tensor | None = None, best: Tensor | None = None) -> Tensor:
    """logits float32 [R, vocab] -> float64 [R, 2], as `engine.sampling.logits.best_of`; of equal ones the first.

    best: where they are written, on the device or in pinned memory, without a copy that would wait behind others.
    masks: int64 [R + 1], addresses of masks and of a word, see `engine.sampling.graph_masks`. They may lie in pinned
    memory of the host.
    """
    assert masks is None or (masks.is_contiguous() and masks.dtype == torch.int64 and len(masks) == len(logits) + 1)
    logits, (rows, vocab) = logits.contiguous(), logits.shape
    parts, device = triton.cdiv(vocab, PART), logits.device
    values = torch.empty(rows, parts, device=device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    if best is None:
        best = torch.empty(rows, 2, dtype=torch.float64, device=device)
    overlap = overlapped(device)
    masked = masks is not None
    if masks is not None:
        _until_made[(1,)](masks, rows, MOST_POLLS, num_warps=1, **overlap)
    _of_part[(rows, parts)](
        logits, masks if masked else ids, values, ids, vocab, parts, MASKED=masked, PART=PART, num_warps=8, **overlap,
    )  # fmt: skip
    block = triton.next_power_of_2(parts)
    _of_row[(rows,)](values, ids, best, vocab, parts, BLOCK=block, num_warps=1, **overlap)
    return best


@triton.jit
def _sum_of_part(logits, tops, sums, vocab, parts, PART: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * vocab + at, at < vocab, other=float("-inf")).to(tl.float64)
    top = tl.max(x)
    tl.store(tops + row * parts + part, top)
    tl.store(sums + row * parts + part, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top))))


@triton.jit
def _norm_of_row(tops, sums, norms, parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    top = tl.load(tops + row * parts + part, part < parts, other=float("-inf"))
    each = tl.load(sums + row * parts + part, part < parts, other=0.0)
    most = tl.max(top)
    tl.store(norms + row, most + tl.log(tl.sum(each * tl.exp(top - most))))


def norms_of(logits: Tensor) -> Tensor:
    """logits float32 [R, vocab] -> float64 [R], the logarithm of the sum of exp. A row has a finite logit at least."""
    logits, (rows, vocab) = logits.contiguous(), logits.shape
    parts, device = triton.cdiv(vocab, PART), logits.device
    tops = torch.empty(rows, parts, dtype=torch.float64, device=device)
    sums, norms = torch.empty_like(tops), torch.empty(rows, dtype=torch.float64, device=device)
    overlap = overlapped(device)
    _sum_of_part[(rows, parts)](logits, tops, sums, vocab, parts, PART=PART, num_warps=8, **overlap)
    block = triton.next_power_of_2(parts)
    _norm_of_row[(rows,)](tops, sums, norms, parts, BLOCK=block, num_warps=1, **overlap)
    return norms
