"""Operator of a block: a mechanism bound to its shape, weights and operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from tandem.architectures.names import Names
from tandem.experts import RoutedExperts
from tandem.kernels.joined import AfterNorm
from tandem.kernels.ops import SureRead
from tandem.kernels.step_rows import BlockRows, StepRows
from tandem.mechanisms.slices import part_of
from tandem.models.builder import Builder
from tandem.models.passing import ForwardState, States
from tandem.models.residual import Residual
from tandem.spec.layers import Body


class TokenSpan(NamedTuple):
    """Tokens [first, end) of a sequence that begins with tokens[0]."""

    tokens: list[int]
    first: int
    end: int


class Operator(Protocol):
    """A mechanism bound to its shape, weights and operations."""

    def reads(self) -> list[SureRead]:
        """Weights in the order in which a call reads them."""
        ...

    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        """x [T, hidden], normed -> [T, hidden], which the caller adds to the stream. Writes into `states`."""
        ...


class Routed(ABC):
    """An operator whose experts a router chooses."""

    first: AfterNorm | None  # what x is multiplied with first, if its norm may be a part of that
    fuse_shared_add: bool  # whoever takes the result adds the shared expert's, which is left in the pass
    experts: RoutedExperts
    sums_itself = False  # results are whole where ranks share the block; else they are summands

    @abstractmethod
    def reads(self) -> list[SureRead]:
        """As an `Operator`'s."""

    @abstractmethod
    def __call__(
        self, x: Tensor, p: ForwardState, states: States, host_work: Callable[[], None] | None = None
    ) -> Tensor:
        """As an `Operator`'s. host_work: called while others compute."""

    @abstractmethod
    def predict_experts(self, x: Tensor, p: ForwardState) -> None:
        """x: about what the next call will be given. Tells the experts who would be chosen; nobody is counted."""


class TakesStreams(ABC):
    """An operator that takes all residual streams, each normed, and adds to each of them."""

    norm_name: str  # of the weights of all streams' norms, one behind the other ...
    norm_channels: int  # ... and how many there are
    residual: Residual  # what it has of the streams

    @abstractmethod
    def reads(self) -> list[SureRead]:
        """As an `Operator`'s."""

    @abstractmethod
    def __call__(self, x: Tensor, p: ForwardState, states: States) -> Tensor:
        """x [T, n, hidden] -> what each stream is given, of the same shape."""


class ReadsTable(ABC):
    """An operator that reads rows of a table, which follow from tokens alone."""

    @abstractmethod
    def read_ahead(self, spans: Sequence[TokenSpan]) -> None:
        """These tokens come soon: rows that are not in memory are read meanwhile."""


class SeesBlocks(ABC):
    """An operator of layers that draft blocks of tokens, which see each other."""

    @abstractmethod
    def keep(self, x: Tensor, rows: StepRows, ring: Tensor) -> None:
        """Rows that others see later, and that ask for nothing."""

    @abstractmethod
    def block(self, x: Tensor, at: BlockRows, ring: Tensor) -> Tensor:
        """Rows that see each other, and what was kept."""


def operator_of(b: Builder, index: int, names: Names, body: Body) -> Operator:
    """Operator that layer `index` runs for `body`, from tensors called `names`: from the slice's `block.py`."""
    operator: Operator = part_of(body, "block").operator(b, index, names, body)
    return operator
