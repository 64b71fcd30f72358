"""Modules that take the places of Transformers' plain ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tandem.kernels.ops import Linear


class Matrix(nn.Module):
    """In place of `nn.Linear`: packed, multiplied by Tandem's operations."""

    def __init__(
        self, linear: Linear, read: Callable[[str], Tensor | None], late_bias: Tensor | None = None
    ) -> None:
        """read: "weight" or "bias" as numbers, for modules that use them themselves; late_bias: where the matrix was
        packed without."""
        super().__init__()
        self.linear, self.late_bias, self._read = linear, late_bias, read
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @cached_property
    def weight(self) -> Tensor:
        """Out of the mapped file, when somebody asks."""
        weight = self._read("weight")
        assert weight is not None
        return weight

    @cached_property
    def bias(self) -> Tensor | None:
        return self._read("bias")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        if not len(rows):
            return x.new_empty((*x.shape[:-1], self.out_features))
        y = self.linear(rows)
        if self.late_bias is not None:
            y = y + self.late_bias
        return y.view(*x.shape[:-1], self.out_features)


class MappedEmbedding(nn.Module):
    """In place of `nn.Embedding`: rows out of the mapped file."""

    def __init__(self, find: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._find, self._dtype = find, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self._find(ids.reshape(-1)).to(self._dtype).view(*ids.shape, -1)


def replace_module(model: Any, name: str, module: nn.Module) -> None:
    """The module called `name` is `module` from now on."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
