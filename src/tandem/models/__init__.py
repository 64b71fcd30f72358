"""Mechanisms and layers: what `architectures/` describes, built from a checkpoint and operations."""

from __future__ import annotations

from tandem.checkpoint import Checkpoint
from tandem.config import ModelConfig, Plan
from tandem.experts import ExpertStore
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.ops import Ops
from tandem.kernels.packed.cache import PackedCache
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder, Progress
from tandem.models.model import Model


def build(
    config: ModelConfig,
    plan: Plan,
    checkpoint: Checkpoint,
    ops: Ops,
    progress: Progress | None = None,
    store: ExpertStore | None = None,
    kept: PackedCache | None = None,
    usage: ExpertUsage | None = None,
) -> Model:
    """Loads a model: reads and packs layer by layer, so the weights are never held twice.

    `store` says where routed experts live, None: where `ops` computes. What `kept` holds is not packed again, and what
    it lacks is written to it. `usage` counts which experts are chosen. `progress(what, bytes done, bytes in all)` is
    called after every layer. Raises CheckpointError naming file and tensor, ConfigError for an unknown family.
    """
    return Model(Builder(config, plan, checkpoint, ops, progress, store, kept, usage))


__all__ = ["ForwardBatch", "Model", "Progress", "build"]
