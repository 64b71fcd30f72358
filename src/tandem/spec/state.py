"""State that a model keeps of a sequence between steps: declared by its bodies, added up here, allocated from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, lcm, prod
from typing import NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


class Array(NamedTuple):
    """One array of a state: its shape for one token or one sequence. dtype "act": the activations'."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "act"

    def nbytes(self, activations: str) -> int:
        return prod(self.shape) * DTYPE_BYTES[activations if self.dtype == "act" else self.dtype]


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows that are kept for all tokens, one for every `stride` of them. A row counts from its last token on.

    window: a token sees rows of so many last tokens, itself included; 0: of all. Rows that no later token sees may go.
    """

    rows: tuple[Array, ...]
    stride: int = 1
    window: int = 0


@dataclass(frozen=True, slots=True)
class Fold:
    """A recurrence: what all tokens so far have become, of constant size. It cannot be cut, only restored.

    A sequence without tokens has none yet: kernels start from zeros and do not read the arrays.

    inputs: what it took in of the last `last` tokens, and of rows that may turn out to be none. The recurrence has the
    sure rows only; accepted draft tokens are taken in again. Without inputs a sequence gets one token a step.
    """

    arrays: tuple[Array, ...]
    inputs: tuple[Array, ...] = ()
    last: int = 0

    def slot_arrays(self, draft_tokens: int) -> tuple[Array, ...]:
        """All arrays, where a step may have so many draft tokens of a sequence. Those of the step before are done again
        beside those of this step, so their rows have places of their own."""
        places = self.last + 2 * draft_tokens
        return (*(Array(a.name, (places, *a.shape), a.dtype) for a in self.inputs), *self.arrays)


@dataclass(frozen=True, slots=True)
class WindowRing:
    """Rows of the last tokens, `last` of which a new one may ask for: that of position p in place p modulo the number
    of places. Rows of draft tokens have places of their own, so rejected ones overwrite nothing that is asked for
    later. steps: of rows that come at once, as in a draft layer's pass over those of several."""

    row: Array
    last: int
    steps: int = 1

    def slot_arrays(self, draft_tokens: int) -> tuple[Array, ...]:
        """As a `Fold`'s."""
        places = self.last + self.steps * (1 + draft_tokens) - 1
        return (Array(self.row.name, (places, *self.row.shape), self.row.dtype),)


State = Pages | Fold | WindowRing
STEPS_AT_ONCE = 2  # whose rows a draft layer takes in together, in a graph
LANES = 16  # torch computes what is left over of a vector in another way, so that bits would depend on the rows beside
SLOT_ALIGNMENT = 256  # bytes: of every array in a slot
KEY_BLOCK = 64  # tokens: kernels read keys from a multiple of it on, and mask those before a window


@dataclass(frozen=True)
class StateLayout:
    """All states of a model, in the order of its blocks, with activations of `dtype` and pages of `page` tokens; a step
    may have so many draft tokens of a sequence.

    Pages are shared between sequences with an equal prefix. Whatever cannot be shared lies in the sequence's slot.

    The only place that knows how many bytes a cache takes: planner, engine, quality, benches and tests ask it.
    """

    states: tuple[State, ...]
    dtype: str
    page: int
    draft_tokens: int = 0

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token, in all layers; rounded up where rows stand for several tokens."""
        pages = (s for s in self.states if isinstance(s, Pages))
        return ceil(sum(Fraction(a.nbytes(self.dtype), s.stride) for s in pages for a in s.rows))

    @cached_property
    def window_token_bytes(self) -> int:
        """Bytes of one token, in the layers that see a window."""
        pages = (s for s in self.states if isinstance(s, Pages) and s.window)
        return sum(a.nbytes(self.dtype) // s.stride for s in pages for a in s.rows)

    @cached_property
    def window(self) -> int:
        """Tokens of the longest window; 0: every layer sees all of them."""
        return max((s.window for s in self.states if isinstance(s, Pages)), default=0)

    def window_begin(self, length: int) -> int:
        """The first token that layers with a window read, where `length` tokens were computed: a page's first."""
        first = max(0, length + 1 - self.window) // KEY_BLOCK * KEY_BLOCK
        return first // self.page * self.page

    def window_pages(self, running: int, step_tokens: int) -> int:
        """Pages that so many sequences need of layers with a window at once, whatever their length. They hold what each
        keeps between steps, draft tokens included, and a step's tokens, wherever these begin in a page."""
        each = -(-(self.window + KEY_BLOCK + self.page + self.draft_tokens) // self.page) + 2
        return running * each + -(-step_tokens // self.page)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page that the strides divide."""
        pages = (s for s in self.states if isinstance(s, Pages))
        return sum(self.page // s.stride * a.nbytes(self.dtype) for s in pages for a in s.rows)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one sequence, beside its pages."""
        return sum(self.slot_sizes())

    @property
    def rewritten_bytes(self) -> int:
        """Bytes of a slot that every step writes anew: what folds have become."""
        return sum(a.nbytes(self.dtype) for s in self.states if isinstance(s, Fold) for a in s.arrays)

    def slot_sizes(self) -> list[int]:
        """Bytes of each array of a slot, padded, one after the other."""
        own = (s for s in self.states if not isinstance(s, Pages))
        return [_padded(a.nbytes(self.dtype)) for s in own for a in s.slot_arrays(self.draft_tokens)]

    def page_shape(self, state: Pages, array: Array, pages: int) -> tuple[int, ...]:
        """Shape of the tensor that holds `array` in `pages` pages."""
        return (pages, self.page // state.stride, *array.shape)


def page_tokens(states: Iterable[State], least: int) -> int:
    """Tokens of a page: `least`, or the next number that has whole rows of every state."""
    unit = lcm(*(s.stride for s in states if isinstance(s, Pages)))
    return -(-least // unit) * unit


def _padded(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def state_layout(states: Iterable[State], dtype: str, page: int, draft_tokens: int = 0) -> StateLayout:
    return StateLayout(tuple(states), dtype, page, draft_tokens)
