"""What a model keeps of a sequence between steps: declared by its bodies, added up here, allocated from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Array(NamedTuple):
    """One array of a state: its shape for one token or one sequence. dtype "act": the activations'."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "act"

    def nbytes(self, activations: str) -> int:
        return prod(self.shape) * DTYPE_BYTES[activations if self.dtype == "act" else self.dtype]


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows that are kept for all tokens, one for every `stride` of them."""

    rows: tuple[Array, ...]
    stride: int = 1


State = Pages


@dataclass(frozen=True, slots=True)
class StateLayout:
    """All states of a model, in the order of its blocks, with activations of `dtype` and pages of `page` tokens.

    The only place that knows how many bytes a cache takes: planner, engine, quality, benches and tests ask it.
    """

    states: tuple[State, ...]
    dtype: str
    page: int

    @property
    def token_bytes(self) -> int:
        """Of one token, in all layers."""
        return sum(a.nbytes(self.dtype) // s.stride for s in self.states for a in s.rows)

    @property
    def page_bytes(self) -> int:
        return self.page * self.token_bytes

    def page_shape(self, state: Pages, array: Array, pages: int) -> tuple[int, ...]:
        """Of the tensor that holds `array` in `pages` pages."""
        return (pages, self.page // state.stride, *array.shape)


def state_layout(states: Iterable[State], dtype: str, page: int) -> StateLayout:
    return StateLayout(tuple(states), dtype, page)
