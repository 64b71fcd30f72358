"""Mechanisms and layers: what `architectures/` describes, built from a checkpoint and operations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tandem.checkpoint import Checkpoint
from tandem.experts import ExpertStore
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.ops import Ops
from tandem.kernels.packed.cache import PackedCache
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder, Progress
from tandem.models.draft_layer import with_stored_drafts
from tandem.models.model import Model
from tandem.models.passing import States
from tandem.models.trial import check_headers
from tandem.models.vision.tower import with_stored_tower
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig


class AnyModel(Protocol):
    """Model that runs steps."""

    def forward(self, batch: ForwardBatch, states: States) -> Tensor:
        """As `Model.forward`."""
        ...


def build(
    config: ModelConfig,
    plan: Plan,
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress | None = None,
    store: ExpertStore | None = None,
    cache: PackedCache | None = None,
    usage: ExpertUsage | None = None,
) -> AnyModel:
    """Loads a model: reads and packs layer by layer, so the weights are never held twice.

    `store` says where routed experts live, None: where `ops` computes. What `cache` holds is not packed again, and what
    it lacks is written to it. `usage` counts which experts are chosen. `progress(what, bytes done, bytes in all)` is
    called after every layer. Raises CheckpointError naming file and tensor, ConfigError for an unknown family.
    """
    b = Builder(config, plan, checkpoint, ops, progress, store, cache, usage)
    if config.foreign is None:
        return Model(b)
    from tandem.models.foreign import foreign_model  # which imports transformers

    return foreign_model(b)


__all__ = [
    "AnyModel", "ForwardBatch", "Model", "Progress", "build", "check_headers", "with_stored_drafts",
    "with_stored_tower",
]  # fmt: skip
