"""Matrices that are more than one: of one input whose formats differ (`SideBySide`), or whose outputs ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.ops import Linear, SureRead
from tandem.kernels.ranks.group import Group


class SideBySide:
    """`Linear` over the outputs of others, one after the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """One row is written in its place, which a recorded step can repeat; several are put together by torch."""
        if out is None:
            out = x.new_empty((len(x), self.out_features), dtype=out_dtype)
        if len(x) != 1:
            return torch.cat([part(x, out.dtype) for part in self.parts], dim=1, out=out)
        start = 0
        for part in self.parts:
            part(x, out=out[:, start : start + part.out_features])
            start += part.out_features
        return out


class GatheredLinear:
    """`Linear` of which every rank has some outputs."""

    def __init__(self, own: Linear, group: Group, outputs: int) -> None:
        self.own, self._group = own, group
        self.out_features, self.in_features = outputs, own.in_features

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        gathered = self._group.gather(self.own(x, out_dtype), self.out_features)
        return gathered if out is None else out.copy_(gathered)


def sure_reads(*matrices: Linear) -> list[SureRead]:
    """Matrices that every step multiplies by, in order."""
    own = (m.own if isinstance(m, GatheredLinear) else m for m in matrices)
    parts = (m.parts if isinstance(m, SideBySide) else (m,) for m in own)
    return [SureRead(part) for several in parts for part in several]
