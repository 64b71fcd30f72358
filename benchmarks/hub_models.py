"""Models as they lie on the hub: `config.json` in the hub's own keys, and how each tensor is named and stored.

Names of tensors are those that Transformers' converters call the hub's, where `renames` does not say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.bench.architectures import CONFIGS

Config = dict[str, Any]

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True, slots=True)
class HubModel:
    """config: the hub's. layers: the fewest that have each kind. stored: a name of `random_model.FORMATS`.

    text: model type of the part that makes text, beside images. plain: parts of names whose matrices stay bfloat16.
    fused: experts in 3-D tensors. renames: pairs, in order, for str.replace.
    """

    config: Config
    layers: int
    stored: str = "bf16"
    text: str = ""
    plain: tuple[str, ...] = ()
    fused: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, tuple[int, ...]], ...] = ()  # tensors that text does not need
    made: Config = field(default_factory=dict)  # what Transformers' configuration needs beside the hub's keys


def _bench(name: str, architecture: str, **keys: object) -> Config:
    common = {"architectures": [architecture], "torch_dtype": "bfloat16", "hidden_act": "silu"}
    return common | {"tie_word_embeddings": False, "use_cache": True} | CONFIGS[name] | keys


QWEN3_NEXT = _bench(
    "qwen3-next-80b", "Qwen3NextForCausalLM", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1,
    mlp_only_layers=[], output_router_logits=False, router_aux_loss_coef=0.001, rope_scaling=None,
)  # fmt: skip
QWEN3_NEXT_PLAIN = ("mlp.gate.", "shared_expert_gate", "in_proj_ba", "conv1d", "lm_head", "embed_tokens")

QWEN35 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "image_token_id": 248056,
    "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_moe_text", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-6,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "use_cache": True,
        "vocab_size": 248320, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    },
    "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
}  # fmt: skip

GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "image_token_id": 258880, "tie_word_embeddings": True, "audio_config": None,
    "text_config": {
        "model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True, "dtype": "bfloat16",
        "enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112, "max_position_embeddings": 262144, "moe_intermediate_size": 704,
        "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "sliding_window": 1024,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "tie_word_embeddings": True,
        "top_k_experts": 8, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
}  # fmt: skip

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attention_dropout": 0.0,
    "attn_type_list": [1] * 62, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip

MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "attention_bias": False,
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "attention_chunk_size": 128,
    "attention_value_scale": 0.707, "head_dim": 192, "hidden_act": "silu", "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0], "intermediate_size": 16384,
    "layernorm_epsilon": 1e-5, "max_position_embeddings": 262144, "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, *[1] * 47], "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": None,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128, "swa_head_dim": 192,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "v_head_dim": 128, "vocab_size": 152576,
    "quantization_config": _FP8 | {"ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(48)]},
}  # fmt: skip
MIMO_MADE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
    },
    "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
    "routed_scaling_factor": 1.0,
}  # fmt: skip

HY_V3 = {
    "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "enable_moe_fp32_combine": True, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13312, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536, "num_attention_heads": 64,
    "num_experts": 192, "num_experts_per_tok": 8, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "router_scaling_factor": 2.826, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 120832,
}  # fmt: skip

LAGUNA = {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "attention_bias": False, "gating": True,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10, "max_position_embeddings": 131072,
    "mlp_layer_types": ["dense", *["sparse"] * 39], "moe_intermediate_size": 512, "moe_routed_scaling_factor": 2.5,
    "num_attention_heads": 48, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_experts": 256,
    "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512, "sliding_window": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 100352, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip

INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {"group_0": {
        "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
            "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
        },
    }},
}  # fmt: skip
FP8_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp\\.gate$"], "config_groups": {"group_0": {
        "targets": ["Linear"], "output_activations": None,
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    }},
}  # fmt: skip
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "media_placeholder_token_id": 163605,
    "text_config": {key: value for key, value in _bench("kimi-k2", "DeepseekV3ForCausalLM").items()
                    if key != "quantization_config"}
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "quantization_config": INT4},
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip

_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_bias": False, "ep_size": 1}
_V3_CODED = _DEEPSEEK | {"quantization_config": _FP8}
DENSE_PLAIN = ("mlp.gate.", "lm_head", "embed_tokens", "weights_proj")

V4 = _bench(
    "deepseek-v4-flash", "DeepseekV4ForCausalLM", topk_method="noaux_tc", scoring_func="sqrtsoftplus",
    norm_topk_prob=True, routed_scaling_factor=1.5, index_n_heads=64, index_head_dim=128, hc_eps=1e-6,
    swiglu_limit=10.0, num_nextn_predict_layers=1, rope_theta=10000, compress_rope_theta=160000, bos_token_id=0,
    eos_token_id=1, quantization_config=_FP8 | {"scale_fmt": "ue8m0"},
)  # fmt: skip
V4_RENAMES = (
    ("model.embed_tokens.", "embed."), ("model.hc_head.", ""), ("model.", ""), ("hc_base", "hc_head_base"),
    ("hc_fn", "hc_head_fn"), ("hc_scale", "hc_head_scale"), ("attn.norm.", "attn.kv_norm."),
)  # fmt: skip

HUB = {
    "qwen3-30b-a3b": HubModel(_bench("qwen3-30b-a3b", "Qwen3MoeForCausalLM", attention_bias=False), 2),
    "qwen3-next-80b": HubModel(QWEN3_NEXT, 4),
    "qwen3-next-80b-fp8": HubModel(
        QWEN3_NEXT | {"quantization_config": _FP8 | {"modules_to_not_convert": ["lm_head", "model.embed_tokens"]}},
        4, "fp8", plain=QWEN3_NEXT_PLAIN, extra=(("mtp.fc.weight", (2048, 4096)),),
    ),
    "qwen3.5-35b-a3b": HubModel(
        QWEN35, 4, text="qwen3_5_moe_text", fused=True, renames=(("model.", "model.language_model."),),
        extra=(("model.visual.blocks.0.attn.proj.weight", (1152, 1152)), ("mtp.fc.weight", (2048, 4096))),
    ),
    "gpt-oss-120b": HubModel(
        _bench("gpt-oss-120b", "GptOssForCausalLM", initial_context_length=4096, attention_dropout=0.0,
               layer_types=["sliding_attention", "full_attention"] * 18, experts_per_token=4),
        2, "mxfp4",
    ),
    "deepseek-v4-flash": HubModel(
        V4, 5, "deepseek-v4", plain=("compressor", "weights_proj", "ffn.gate", "hc_", "embed", "head"),
        renames=V4_RENAMES,
    ),
    "deepseek-v3": HubModel(_bench("deepseek-v3", "DeepseekV3ForCausalLM", **_V3_CODED), 2, "fp8", plain=DENSE_PLAIN),
    "deepseek-v3.2": HubModel(
        _bench("deepseek-v32", "DeepseekV32ForCausalLM", **_V3_CODED), 2, "fp8", plain=DENSE_PLAIN
    ),
    "glm-5": HubModel(_bench("glm-5", "GlmMoeDsaForCausalLM", **_V3_CODED), 2, "fp8", plain=DENSE_PLAIN),
    "glm-4.6": HubModel(_bench("glm-4.6", "Glm4MoeForCausalLM", attention_dropout=0.0, n_group=1, topk_group=1), 2),
    "glm-4.5-air-fp8": HubModel(
        _bench("glm-4.5-air", "Glm4MoeForCausalLM", n_group=1, topk_group=1, quantization_config=FP8_CHANNELS),
        2, "fp8-channels", plain=DENSE_PLAIN,
    ),
    "minimax-m2": HubModel(MINIMAX_M2, 1, "fp8", plain=(".gate.", "lm_head", "embed_tokens")),
    "kimi-k2.5": HubModel(
        KIMI, 2, "int4", text="deepseek_v3", renames=(("", "language_model."),),
        extra=(("vision_tower.patch_embed.proj.weight", (1152, 588)), ("mm_projector.proj.0.weight", (64, 64))),
    ),
    "hy3": HubModel(HY_V3, 2),
    "mimo-v2-flash": HubModel(
        MIMO, 2, "fp8", plain=(*DENSE_PLAIN, "o_proj"), made=MIMO_MADE
    ),
    "gemma-4-26b-a4b": HubModel(
        GEMMA4, 6, text="gemma4_text", fused=True, renames=(("model.", "model.language_model."),),
        extra=(("model.vision_tower.patch_embedder.input_proj.weight", (1152, 768)),),
    ),
    "laguna-xs": HubModel(LAGUNA, 2),
}  # fmt: skip
