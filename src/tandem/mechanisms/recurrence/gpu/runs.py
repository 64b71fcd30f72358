"""Runs of rows that decode: neighbours of one slot, a token and the draft tokens behind it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def span(starts, lens, slots, s, rows, slot, RUN: tl.constexpr, BEFORE: tl.constexpr):
    """Tokens before the rows, and how many rows are folded: the neighbours from s on that have this slot. BEFORE 1: the
    rows are a prompt's chunk, of which none is."""
    ahead = s + tl.arange(0, RUN)
    new = tl.sum((tl.load(slots + ahead, ahead < rows, other=-1) == slot).to(tl.int32)) * (1 - BEFORE)
    own = tl.load(starts + s + 1) - tl.load(starts + s)
    return tl.load(lens + s) - own, new
