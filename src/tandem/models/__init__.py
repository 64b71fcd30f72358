"""One file per architecture over shared layers, plus its checkpoint names."""

from __future__ import annotations

from tandem.checkpoint import Checkpoint
from tandem.config import ModelConfig, Plan
from tandem.errors import ConfigError
from tandem.experts import ExpertStore
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.ops import Ops
from tandem.kernels.packed.cache import PackedCache
from tandem.models import deepseek_v3, glm4_moe, llama, mixtral, olmoe, qwen2_moe, qwen3_moe
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder, Progress
from tandem.models.model import KVLayout, Model

ARCHITECTURES = {
    "deepseek_v2": deepseek_v3.layer,
    "deepseek_v3": deepseek_v3.layer,
    "glm4_moe": glm4_moe.layer,
    "kimi_k2": deepseek_v3.layer,
    "llama": llama.layer,
    "mixtral": mixtral.layer,
    "olmoe": olmoe.layer,
    "qwen2_moe": qwen2_moe.layer,
    "qwen3_moe": qwen3_moe.layer,
}


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
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"model_type {config.model_type!r} is not supported; these are: {known}")
    builder = Builder(config, plan, checkpoint, ops, progress, store, kept, usage)
    return Model(builder, ARCHITECTURES[config.model_type])


__all__ = ["ARCHITECTURES", "ForwardBatch", "KVLayout", "Model", "Progress", "build"]
