"""`Pass`: one batch on its way through the layers. It may pause between any two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tandem.kernels.token_index import Chosen
from tandem.models.batch import ForwardBatch

Arrays = tuple[Tensor, ...]
"""The tensors of one state, in the order in which it declares them."""

States = Sequence[Arrays]
"""Of a model: one for each state of its `StateLayout`. Of a block: those that its body declared."""


@dataclass(slots=True)
class Pass:
    """residual [T, hidden]: the stream, without what the last block computed; pending: that, None at the start.

    links: which tokens the last layer that chose has chosen, by its number. A batch's rows and indices do not change
    meanwhile.
    """

    batch: ForwardBatch
    residual: Tensor
    pending: Tensor | None = None
    links: dict[int, Chosen] = field(default_factory=dict)
