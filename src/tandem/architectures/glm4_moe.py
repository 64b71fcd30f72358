"""GLM-4.5 to 4.7, the text of GLM-4.5V and 4.6V, Solar Open, Ling 2.0: sigmoid router with a selection bias, ungated
shared expert, first layers dense."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import SIGMOID, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, Names, Renames
from tandem.architectures.shared import gqa, layer_count, model, moe, sigmoid_router, text_part, with_drafts
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig

NAMES = Names(shared="mlp.shared_experts")


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    return _model(keys, generation, keys.optional("attention_bias", False), keys.optional("use_qk_norm", False))


def vision(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """A token of text has one position in all three directions, so it turns as in GLM-4.5."""
    text = text_part(keys)
    return _model(text, generation, text.optional("attention_bias", True), False)


def solar(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """Every layer has experts, and every channel of a head turns."""
    keys.only("use_qk_norm", False, "heads are not normed")
    bias = keys.optional("attention_bias", False)
    return _model(keys, generation, bias, False, dense=0, turning=1.0)


def ling(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """Ling-flash-2.0, Ling-1T and Ring: GLM's parts under other names; q, k and v are one matrix."""
    for key, value in LING.items():
        keys.only(key, value, "as in every Ling 2.0")
    for key in ("rotary_dim", "router_dtype", "embedding_dropout", "output_dropout"):
        keys.get(key)
    width, shared = keys.size("moe_intermediate_size", 1024), keys.get("num_shared_experts")
    keys.only("moe_shared_expert_intermediate_size", width, "a shared expert is as wide as a routed one")
    counts = {"n_routed_experts": keys.get("num_experts"), "n_shared_experts": shared}
    glm_keys = keys.overlaid({key: value for key, value in counts.items() if value is not None})
    return _model(glm_keys, generation, keys.optional("use_qkv_bias", False), keys.optional("use_qk_norm", True))


LING = {
    "use_bias": False, "use_rmsnorm": True, "moe_router_enable_expert_bias": True, "score_function": "sigmoid",
    "norm_head": False, "norm_softmax": False,
}  # fmt: skip


LING_RENAMES = Renames(
    {
        "model.word_embeddings.": "model.embed_tokens.", ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.", ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.", ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    },
    signs=(".attention.query_key_value.",),
    relatives=(".attention.g_", ".kv_a_proj_with_mqa."),  # Transformers' own code runs those, and knows their names
)  # fmt: skip


def _model(
    keys: JsonKeys, generation: JsonKeys, bias: bool, norms: bool, *, dense: int = 1, turning: float = 0.5
) -> ModelConfig:
    """dense, turning: what absent first_k_dense_replace and partial_rotary_factor mean."""
    attention = gqa(keys, qkv_bias=bias, qk_norm="head" if norms else "none", rotary_share=turning)
    width = keys.size("moe_intermediate_size", 1408)
    experts = moe(sigmoid_router(keys), width, width * keys.count("n_shared_experts", 1))
    first = keys.optional("first_k_dense_replace", dense)
    base = model(keys, generation, lambda _: attention, experts, range(first, layer_count(keys)))
    return with_drafts(keys, base)


def gguf_ling(keys: GgufKeys) -> dict[str, Any]:
    experts = ("n_routed_experts", "n_shared_experts", "attention_bias")
    entries = {key: value for key, value in gguf_config(keys).items() if key not in experts}
    return entries | {
        "model_type": "bailing_moe_v2",
        "num_experts": keys.need("expert_count"),
        "num_shared_experts": keys.optional("expert_shared_count", 1),
        "use_qkv_bias": keys.has_tensor("blk.0.attn_qkv.bias"),
    }


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    keys.only("expert_gating_func", SIGMOID, "sigmoid")
    head = keys.size("attention.key_length")
    return {
        "model_type": "glm4_moe",
        "attention_bias": keys.has_bias,
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": keys.optional("rope.dimension_count", head) / head,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.optional("expert_shared_count", 1),
        "moe_intermediate_size": keys.expert_width,
        "first_k_dense_replace": keys.optional("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.optional("expert_group_count", 1),
        "topk_group": keys.optional("expert_group_used_count", 1),
        "num_nextn_predict_layers": keys.drafts,
    }


STEMS = GGUF_DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}

LING_STEMS = STEMS | {"attn_qkv": "self_attn.qkv_proj", "ffn_norm": "post_attention_layernorm"}

FAMILIES = (
    Family(("glm4_moe",), config, (NAMES,), Gguf("glm4moe", gguf_config, STEMS)),
    Family(("glm4v_moe",), vision, (NAMES,)),
    Family(("solar_open",), solar, (NAMES,)),
    Family(("bailing_moe_v2",), ling, (NAMES,), Gguf("bailingmoe2", gguf_ling, LING_STEMS), renames=LING_RENAMES),
)
