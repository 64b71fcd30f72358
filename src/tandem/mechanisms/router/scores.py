"""Scores that a router makes of its logits: one table, which configurations, the planner and both sides read.

A score that is only here is complete. Torch computes it on both sides until their router kernels know it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tandem.spec.state import LANES

if TYPE_CHECKING:
    from torch import Tensor

Side = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Score:
    """of: float32 logits [T, E] → scores. A row's bits must not depend on the rows beside it. kernels: sides whose
    router kernels compute it, too."""

    of: Callable[[Tensor], Tensor]
    kernels: tuple[Side, ...] = ()


def _sqrt_softplus(logits: Tensor) -> Tensor:
    from torch.nn.functional import pad, softplus

    whole = pad(logits, (0, -logits.shape[1] % (2 * LANES)))  # torch takes two vectors at a time, and then numbers
    return softplus(whole)[:, : logits.shape[1]].sqrt()


SCORES: dict[str, Score] = {
    "softmax": Score(lambda logits: logits.softmax(-1), ("cpu", "gpu")),
    "sigmoid": Score(lambda logits: logits.sigmoid(), ("cpu", "gpu")),
    "sqrt_softplus": Score(_sqrt_softplus, ("gpu",)),
}
