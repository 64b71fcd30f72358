"""A causal convolution of each channel over the last tokens of its sequence, on the CPU and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.step_rows import StepRows


def convolved(new: Tensor, rows: StepRows, ring: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """new [T, C] → float32 [T, C]. ring [slots, R, C], R at least as many as taps, takes in the new rows. weight:
    float32 [taps, C], the newest token's last."""
    taps = len(weight)
    if rows.row_per_sequence:  # they may follow each other in one ring
        rows.keep(ring, new)
    known, at = rows.joined(ring, new), rows.keys_of(ring.shape[1], taps)
    if not rows.row_per_sequence:  # a ring has no room for all rows of a prompt beside those before
        rows.keep(ring, new)
    mixed = new.float() * weight[-1]
    for back in range(1, taps):
        mask = (rows.positions >= back)[:, None]
        mixed += torch.where(mask, known[at[:, back]].float(), 0.0) * weight[-1 - back]
    return mixed if bias is None else mixed + bias
