"""Qwen1.5-MoE and Qwen2-MoE: biases on q, k, v, a shared expert behind a sigmoid gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names
from tandem.architectures.shared import (
    gqa,
    layer_count,
    layer_kinds,
    model,
    moe,
    softmax_router,
    sparse_step_layers,
)
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    attention = gqa(keys, qkv_bias=keys.optional("qkv_bias", True))
    windows = _windows(keys)
    router = softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", False))
    experts = moe(
        router,
        keys.size("moe_intermediate_size", 1408),
        keys.size("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    mixers = [replace(attention, window=window) for window in windows]
    return model(keys, generation, mixers.__getitem__, experts, sparse_step_layers(keys))


def _windows(keys: JsonKeys) -> list[int]:
    """`layer_types` says which layers slide; without it every other one below `max_window_layers`."""
    if not keys.optional("use_sliding_window", False):
        keys.get("sliding_window"), keys.get("layer_types")
        return [0] * layer_count(keys)
    window, last = keys.size("sliding_window", 4096), keys.optional("max_window_layers", 28)

    def default(index: int) -> str:
        return "sliding_attention" if index % 2 == 0 and index < last else "full_attention"

    return [window if kind == "sliding_attention" else 0 for kind in layer_kinds(keys, default)]


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": keys.has_bias,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "moe_intermediate_size": keys.expert_width,
        "shared_expert_intermediate_size": keys.rows("ffn_gate_shexp.weight"),
    } | gguf_experts(keys)


def gguf_experts(keys: GgufKeys) -> dict[str, Any]:
    layers = range(keys.depth)
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "mlp_only_layers": [i for i in layers if not keys.has_tensor(f"blk.{i}.ffn_gate_inp.weight")],
    }


STEMS = GGUF_DECODER | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

FAMILY = Family(("qwen2_moe",), config, (NAMES,), Gguf("qwen2moe", gguf_config, STEMS))
