"""`ModelConfig`: the checkpoint's architecture in our words, normalised once from its `config.json`.

Nothing below `models/` sees a Hugging Face key: a key is read in `config/families.py`, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from tandem.config.json_keys import JsonKeys, read_json
from tandem.config.latent import LatentConfig, YarnConfig
from tandem.config.stored import UNQUANTISED, StoredFormat, StoredFormats
from tandem.errors import ConfigError

FORMAT_BYTES = {"f32": 4.0, "bf16": 2.0, "int8": 1.0625, "int4": 0.5625}
"""Bytes per weight as packed; int8 and int4 carry one bf16 scale per group of 32 weights."""

STORED = "stored"  # the format that means: as the checkpoint has it

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention; rotary positions, half-split, on the first `rotary_dim` channels of a head.

    With `latent`: what is cached is one kv head of the rotary key, then the latent; it is key and value in one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: Literal["none", "head", "width"]  # RMS norm of q and k: per head, or over all heads at once
    windows: tuple[int, ...]  # per layer: how many last tokens a token sees (itself included); 0 = all
    clip_qkv: float = 0.0  # q, k, v are clamped to [-clip, clip]; 0 = not

    latent: LatentConfig | None = None
    yarn: YarnConfig | None = None

    @property
    def softmax_scale(self) -> float:
        width = self.head_dim if self.latent is None else self.latent.qk_dim
        return float(width**-0.5) * (1.0 if self.yarn is None else self.yarn.softmax_factor)

    @property
    def cached_width(self) -> int:
        """Numbers per token and layer in the KV cache."""
        return self.kv_heads * self.head_dim * (2 if self.latent is None else 1)

    def params(self, hidden: int) -> int:
        """Weights of one layer."""
        if self.latent is not None:
            return self.latent.params(hidden, self.heads)
        return hidden * 2 * (self.heads + self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How gate logits become experts and weights.

    Scores are softmax or sigmoid of the logits. With `bias`, experts are chosen by score + bias, but weighted
    by the score alone (DeepSeek-V3). With `num_groups` > 1 only the best `top_groups` groups stay in the
    race; a group counts as its two best biased scores added (DeepSeek-V3, GLM-4.5), or with
    `group_score="max"` as its best (DeepSeek-V2).
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # divide the chosen weights by their sum
    scale: float = 1.0  # routed_scaling_factor, applied last
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    epsilon: float = 0.0  # added to the sum before dividing (1e-20 in DeepSeek and GLM)
    has_bias: bool = False  # the checkpoint has a selection bias per expert
    float32_logits: bool = False  # logits are computed in f32; else in the activations' dtype


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Routed experts (gate, up [width, hidden], down [hidden, width]) and the shared one of each MoE layer."""

    layers: tuple[int, ...]  # which decoder layers are MoE
    width: int
    shared_width: int  # 0: no shared expert
    shared_gate: bool  # the shared expert's output is multiplied by sigmoid(gate · x)
    router: RouterConfig

    @property
    def fusible_shared(self) -> int:
        """How many routed-sized experts the shared expert equals; 0 when it has a gate or cannot be cut evenly."""
        if not self.width or self.shared_gate or self.shared_width % self.width:
            return 0
        return self.shared_width // self.width


DENSE = MoEConfig((), width=0, shared_width=0, shared_gate=False, router=RouterConfig(num_experts=0, top_k=0))
"""Of a model without experts."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, MoE or dense: pre-norm, RMSNorm, SwiGLU. Built by `ModelConfig.load`."""

    model_type: str
    hidden: int
    layers: int
    vocab: int
    rms_eps: float
    dense_width: int  # of layers that are not MoE
    tied_embeddings: bool
    max_positions: int
    attention: AttentionConfig
    moe: MoEConfig
    eos_ids: tuple[int, ...] = ()
    unread_keys: tuple[str, ...] = ()  # keys of config.json that may matter and were not understood

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """From a model directory: `config.json`, and `generation_config.json` for the eos ids.

        Raises ConfigError naming the key and a value to try, CheckpointError when a file is missing or broken.
        """
        directory = Path(path)
        generation = directory / "generation_config.json"
        return cls.from_dict(
            read_json(directory / "config.json"), read_json(generation) if generation.exists() else {}
        )

    @classmethod
    def from_dict(cls, config: dict[str, object], generation: dict[str, object] | None = None) -> ModelConfig:
        """From the parsed JSON files."""
        from tandem.config.families import FAMILIES

        model_type = str(config.get("model_type"))
        if model_type not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ConfigError(f"config.json: model_type {model_type!r} is not supported; these are: {known}")
        return FAMILIES[model_type](JsonKeys(config), JsonKeys(generation or {}, "generation_config.json"))

    @cached_property
    def moe_layers(self) -> frozenset[int]:
        return frozenset(self.moe.layers)

    # -- sizes, for the planner ---

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.layers * self.attention.cached_width * DTYPE_BYTES[dtype]

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.hidden * self.moe.width

    def expert_bytes(self, expert_format: str, stored: StoredFormat = UNQUANTISED.experts) -> int:
        """Packed bytes of one routed expert."""
        each = stored.bytes_per_weight if expert_format == STORED else FORMAT_BYTES[expert_format]
        return int(self.expert_params * each)

    @property
    def routed_params(self) -> int:
        """Weights of all routed experts of all layers."""
        return self.expert_params * self.moe.router.num_experts * len(self.moe.layers)

    @property
    def dense_params(self) -> int:
        """Weights that every token uses: attention, norms, routers, shared and dense MLPs, head; no embedding."""
        m, attention = self.moe, self.attention.params(self.hidden)
        moe = self.hidden * (m.router.num_experts + 3 * m.shared_width)
        dense = 3 * self.hidden * self.dense_width * (self.layers - len(m.layers))
        norms = (2 * self.layers + 1) * self.hidden
        return attention * self.layers + moe * len(m.layers) + dense + norms + self.vocab * self.hidden

    @property
    def shared_params(self) -> int:
        """Weights of all shared experts."""
        return 3 * self.hidden * self.moe.shared_width * len(self.moe.layers)

    def dense_bytes(self, dtype: str, stored: StoredFormats = UNQUANTISED, on_gpu: bool = False) -> int:
        """Packed bytes of all other weights; those that are stored as codes stay so, unless dtype is float32, or a GPU
        has no kernels for them."""
        if not stored.dense_codes or dtype == "float32":
            return self.dense_params * DTYPE_BYTES[dtype]
        kinds = stored.dense, stored.shared, stored.embedding
        dense, shared, embedding = (f.gpu_bytes_per_weight if on_gpu else f.bytes_per_weight for f in kinds)
        head = self.vocab * self.hidden if self.tied_embeddings else 0
        others = self.dense_params - self.shared_params - head
        return int(others * dense + self.shared_params * shared + head * embedding)

    def weight_bytes(self, dtype: str, expert_format: str, stored: StoredFormats = UNQUANTISED) -> int:
        """Bytes of all packed weights; the embedding stays in the mapped file and is not counted."""
        routed = self.moe.router.num_experts * len(self.moe.layers)
        return self.dense_bytes(dtype, stored) + self.expert_bytes(expert_format, stored.experts) * routed
