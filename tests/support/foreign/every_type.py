"""A tiny random configuration of every model type of the installed Transformers that has experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tiny import BOS, EOS, STEPS, VARIANTS, VOCAB, settings

OWN_EXPERTS = (
    "dbrx", "doge", "jetmoe", "llama4", "llama4_text", "longcat_flash", "nllb-moe", "step3p7", "switch_transformers",
)  # fmt: skip
"""Types whose experts are not in Transformers' registry."""

TEXT_OF = {
    "kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "mistral3": "mistral4", "qwen3_omni_moe": "qwen3_moe",
    "step3p5": "step3p7", "bailing_moe": "granitemoeshared", "bailing_moe_v2": "glm4_moe",
}  # fmt: skip
"""Types of the hub whose text is another's."""

PARTS_OF = {
    **dict.fromkeys(("kimi_k2", "bailing_moe", "bailing_moe_v2", "step3p5"), ()),
    "qwen3_omni_moe": ("thinker_config", "text_config"),
}  # fmt: skip
"""Where those have the keys of their text, unless in `text_config`."""

SMALL = settings(
    vocab_size=VOCAB, unpadded_vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, max_position_embeddings=128,
    initializer_range=0.15, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=7,
    intermediate_size=44, ffn_hidden_size=44, moe_intermediate_size=20, expert_intermediate_size=20,
    expert_ffn_hidden_size=20,
    shared_intermediate_size=28, shared_expert_intermediate_size=28, moe_shared_expert_intermediate_size=28,
    num_experts=6, n_routed_experts=6, num_local_experts=6, moe_num_experts=6, num_experts_per_tok=2,
    num_experts_per_token=2, moe_topk=2, moe_k=2, top_k_experts=2, n_shared_experts=1, n_group=1, topk_group=1,
    num_dense_layers=1,
    first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=12,
    linear_head_dim=16, linear_num_heads=4, index_n_heads=2, index_head_dim=16, index_topk=64, mamba_d_state=8,
    mamba_dt_rank=6, mamba_n_heads=6, mamba_d_head=16, mamba_expand=2, mamba_n_groups=1,
    bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS,
)  # fmt: skip
"""Whichever of these keys a configuration has."""

TOWER = settings(
    depth=1, num_heads=4, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=44, d_model=48, mlp_dim=44,
    out_hidden_size=48, output_dim=48, text_hidden_size=48, projection_dim=48, per_layer_config={},
    adapter_in_dim=48, adapter_out_dim=48, adapter_input_size=48,
)  # fmt: skip
"""Likewise, of parts that read images or sound."""

LATENT = settings(num_key_value_heads=4, head_dim=None)  # as many as heads; None: what the class says
SPARSE = settings(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
RECURRENT = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
QWEN4 = settings(
    indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=8, indexer_compress_ratio=4,
    ple_layer_ids=[2], ngram_vocab_size_base=50, split_ngram_parts=2,
)  # fmt: skip
"""A key of the indexer as wide as a published head, whose channels all turn where nothing else is said."""
GEMMA = settings(enable_moe_block=True, vocab_size_per_layer_input=VOCAB, global_head_dim=16)

# what else a type needs
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": LATENT | settings(head_dim=8),
    "axk2": LATENT,
    "bailing_hybrid": LATENT | settings(layer_group_size=2),
    "dbrx": settings(attn_config={"rope_theta": 1e4}),  # as every published one has it
    "deepseek_ocr2": SPARSE,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": VARIANTS["deepseek_v4"][1] | settings(num_key_value_heads=1),
    "diffusion_gemma": GEMMA,
    "doge": settings(is_moe=True),
    "dots3_note": LATENT | settings(per_layer_config={}, head_dim=20),
    "dots3_note_text": LATENT | settings(per_layer_config={}, head_dim=20),
    "ernie4_5_vl_moe": settings(moe_intermediate_size=[20, 20], rope_parameters=settings(
        rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 2])),
    "gemma4": GEMMA | settings(hidden_size_per_layer_input=0),
    "gemma4_text": GEMMA | settings(hidden_size_per_layer_input=0),
    "glm4_moe_lite": LATENT,
    "glm4v_moe": settings(rope_parameters=settings(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
                                                   mrope_section=[1, 1, 1])),
    "glm5_next": LATENT | settings(qk_rope_head_dim=0),
    "glm_moe_dsa": LATENT,
    "granitemoehybrid": settings(layer_types=["mamba", "attention", "mamba", "attention"]),
    "granitemoeshared": settings(attention_multiplier=12**-0.5, shared_intermediate_size=88),
    "hy_v4_vl": settings(rope_parameters=settings(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])),
    "jamba": settings(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                      use_mamba_kernels=False),
    "kimi_linear": LATENT | settings(layer_types=RECURRENT),
    "lfm2_moe": settings(layer_types=["conv", "full_attention", "conv", "full_attention"], conv_L_cache=3),
    "mimo_v2_flash": settings(head_dim=18),  # a third of the channels turns: an even number
    "minimax": settings(block_size=8, layer_types=RECURRENT),
    "minimax_m3_vl": settings(layer_types=["full_attention", "minimax_m3_sparse"] * 2),
    "minimax_m3_vl_text": settings(layer_types=["full_attention", "minimax_m3_sparse"] * 2),
    "mistral4": LATENT,
    "mistral_large4": LATENT,
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "step3p7": settings(
        share_expert_dim=28, num_sliding_attention_heads=6, layer_types=["full_attention", "sliding_attention"] * 2,
        moe_router_scaling_factor=1.7, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        swiglu_limits=[0.0, 0.0, 0.1, 0.05], swiglu_limits_shared=[0.05, 0.0, 0.0, 0.1],
        rope_theta=[5000.0, 300.0] * 2, partial_rotary_factors=[0.5, 1.0] * 2),
    "nemotron_h": STEPS | settings(
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, intermediate_size=64,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"]),
    "muse_spark": settings(moe_hidden_size=24),
    "zaya": settings(num_experts_per_tok=1),
}  # fmt: skip


def registered_types() -> list[str]:
    """Those that make text and whose modules hand their experts to Transformers' registry."""
    root = Path(transformers.__file__).parent / "models"
    files = root.glob("*/modeling_*.py")
    folders = {file.parent.name for file in files if "use_experts_implementation" in file.read_text()}
    making_text = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(
        t for t in CONFIG_MAPPING_NAMES if model_type_to_module_name(t) in folders and t in making_text
    )


def every_type() -> list[str]:
    return sorted({*registered_types(), *OWN_EXPERTS, *TEXT_OF})


def tiny_config(model_type: str, keep: Sequence[str] = ()) -> Any:
    """Configuration of a type that the installed Transformers has. keep: keys that stay what the class has for them."""
    cls, more = CONFIG_MAPPING[model_type], CHANGES.get(model_type, {}) | dict.fromkeys(keep)
    whole = cls()
    text = whole.get_text_config()
    if text is whole:
        return cls(**_given(_known(whole, SMALL) | more))
    parts = {}
    for name in whole.sub_configs:
        part = getattr(whole, name, None)
        if part is not None:
            sizes = _given(_known(part, SMALL) | more) if part is text else _tower(part)
            parts[name] = {"model_type": part.model_type, **sizes}
    return cls(**parts)


def _tower(part: Any) -> dict[str, Any]:
    """With the parts that it consists of."""
    sizes = _known(part, SMALL | TOWER)
    sizes.pop("vocab_size", None)
    inner = {name: getattr(part, name, None) for name in part.sub_configs}
    return sizes | {
        name: {"model_type": each.model_type, **_tower(each)}
        for name, each in inner.items()
        if each is not None
    }


def _given(sizes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if value is not None}


def _known(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    fields = {*getattr(type(config), "__dataclass_fields__", {}), *config.to_dict()}
    return {key: value for key, value in sizes.items() if key in fields}
