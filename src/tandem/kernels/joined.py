"""Products that take in what stands before them, and blocks that begin beside others: a GPU's step of few rows then has
fewer kernels after each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from tandem.kernels.ops import Addend


class Sum(NamedTuple):
    """Summands that are normed before a product: x and addend join the residual, as in `Ops.add_rms_norm`."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    addend: Addend | None = None


class Normed(NamedTuple):
    """The residual, its norm, and the product with that."""

    residual: Tensor
    x: Tensor
    product: Tensor


@runtime_checkable
class AfterNorm(Protocol):
    """A matrix whose product may begin with the sum and norm before it."""

    def after_norm(self, s: Sum) -> Normed | None:
        """None: they have to come first. Nothing is changed in place."""
        ...


@runtime_checkable
class EarlyDense(Protocol):
    """A dense feed-forward block that can begin beside a router's choice."""

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """After `Ops.route` of logits that were made of x; what the choice takes stays in memory. The result's end."""
        ...
