"""`check_headers`: builds a model without weights and without operations: what its files lack is known in a second.

A model asks for its tensors itself, by the names and shapes of its family, and here nothing but headers answers. So
there is no second list of tensors that could differ from what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from tandem.checkpoint import Checkpoint
from tandem.checkpoint.metadata.headers import HeadersOnly
from tandem.kernels.ops import Ops
from tandem.models.builder import Builder
from tandem.models.model import Model
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig


def check_headers(config: ModelConfig, plan: Plan, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError with the first tensor that is missing or of another shape than `config` implies.

    Not for a model that runs through Transformers: its skeleton says which tensors there are, and is filled at once.
    """
    if config.foreign is None:
        small = replace(plan, context_length=1, experts_in_place=True)  # no tables, and no experts made ahead
        Model(Builder(config, small, HeadersOnly(checkpoint), cast(Ops, _NoOps())))


class _NoWeight:
    """Stands for whatever operations make of weights. Nobody calls it."""

    out_features = in_features = bytes_per_expert = 0
    packed = None

    def load(self, *weights: object) -> None: ...
    def load_all(self, first: int, experts: object) -> None: ...
    def set_biases(self, biases: object) -> None: ...
    def reads(self) -> list[object]:
        return []


class _NoOps:
    """`Ops` as far as a model that is built calls them."""

    def resident(self, tensor: Tensor) -> Tensor:
        return tensor

    def lookup(
        self, find: Callable[[Tensor], Tensor], rows: int, in_ram: bool = False
    ) -> Callable[[Tensor], Tensor]:
        return find

    def reads(self, weight: object) -> bool:
        return False

    def read_in_order(self, reads: object) -> None: ...
    def linear(self, *args: Any, **named: Any) -> _NoWeight:
        return _NoWeight()

    fuse_shared_add = False
    group = None
    bound = experts = mlp = linear
