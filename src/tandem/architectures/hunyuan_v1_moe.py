"""Hunyuan-A13B: q and k heads are normed behind the rotation; one ungated shared expert in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.family import Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names, Renames
from tandem.architectures.shared import gqa, layer_count, model, moe, softmax_router
from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig
from tandem.spec.rope import rope_keys

NAMES = Names(shared="mlp.shared_mlp")
RENAMES = Renames(
    {
        ".self_attn.query_layernorm.": ".self_attn.q_norm.", ".self_attn.key_layernorm.": ".self_attn.k_norm.",
        ".mlp.gate.wg.": ".mlp.gate.",
    },
    signs=(".mlp.gate.wg.",),
)  # fmt: skip

DESCRIBED = {
    "use_qk_norm": True, "use_cla": False, "use_mixed_mlp_moe": True, "mlp_bias": False, "use_rotary_pos_emb": True,
    "norm_type": "rms", "moe_drop_tokens": False, "moe_random_routing_dropped_token": False, "use_mla": False,
    "add_classification_head": False, "class_num": 0,
}  # fmt: skip
"""Keys of the hub's file with the same value in every model of the family."""

UNUSED = ("attention_head_dim", "cla_share_factor", "moe_layer_num_skipped", "org_vocab_size", "pool_type",
          "position_embedding_xdrope", "group_limited_greedy", "num_media_embeds", "mask_init_id", "sep_token_id",
          "eod_token_id", "im_end_id", "im_start_id", "im_newline_id", "image_token_id", "text_start_id", "text_end_id",
          "video_start_id", "video_end_id", "dense_list", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
          "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group", "routed_scaling_factor")  # fmt: skip


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    for key, value in DESCRIBED.items():
        keys.only(key, value, "as in every Hunyuan-A13B")
    for key in UNUSED:
        keys.get(key)
    keys = _turning(keys)
    width = keys.size("intermediate_size", 3072)
    for key, value in {"moe_intermediate_size": width, "num_shared_expert": 1}.items():
        if set(keys.integers(key)) - {value}:
            raise ConfigError(f"{keys.where}: {key} must be {value} in every layer")
    bias = keys.optional("attention_bias", False)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="turned")
    chosen = {
        "num_experts": _same(keys, 64, "num_experts", "num_local_experts"),
        "num_experts_per_tok": _same(keys, 8, "moe_topk", "num_experts_per_tok"),
    }
    router = replace(softmax_router(keys.overlaid(chosen), "num_experts", True), float32_logits=True)
    return model(keys, generation, lambda _: attention, moe(router, width, width), range(layer_count(keys)))


def _same(keys: JsonKeys, example: int, key: str, alias: str) -> int:
    """A number, or a list of the same for every layer."""
    numbers = set(keys.integers(key)) or {keys.size(key, example, alias)}
    if len(numbers) > 1:
        raise ConfigError(f"{keys.where}: {key} differs between layers, which is not supported; try {example}")
    return numbers.pop()


def _turning(keys: JsonKeys) -> JsonKeys:
    """"dynamic" scaling with a fixed `alpha` is another theta."""
    rope = rope_keys(keys)
    alpha = rope.optional("alpha", 0.0)
    if (rope.get("rope_type") or rope.get("type")) != "dynamic" or not alpha:
        return keys
    head = keys.optional("head_dim", keys.size("hidden_size", 4096) // keys.size("num_attention_heads", 32))
    if head <= 2 or alpha < 0:
        raise ConfigError(f"{keys.where}: alpha {alpha} does not fit heads of {head} channels; try 1000.0")
    theta = rope.need("rope_theta", 10000.0) * alpha ** (head / (head - 2))
    return keys.overlaid({"rope_parameters": {"rope_type": "default", "rope_theta": theta}})


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    """Keys of config.json from a GGUF file's; any scaling of the rotation is in its base already."""
    return {
        "model_type": "hunyuan_v1_moe",
        "attention_bias": keys.has_bias,
        "num_experts": keys.need("expert_count"),
        "moe_topk": keys.need("expert_used_count"),
        "intermediate_size": keys.expert_width,
        "num_shared_expert": keys.optional("expert_shared_count", 1),
    }


STEMS = GGUF_DECODER | {
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}

FAMILY = Family(("hunyuan_v1_moe",), config, (NAMES,), Gguf("hunyuan-moe", gguf_config, STEMS), renames=RENAMES)
