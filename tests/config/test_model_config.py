"""`ModelConfig`: what each family's keys become, and that what we do not compute is refused by name."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.architectures.load import config_from_dict
from tandem.errors import ConfigError
from tandem.mechanisms.router.shape import Router
from tandem.spec.json_keys import JsonKeys
from tiny import COMMON, VARIANTS

GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "partial_rotary_factor": 0.5, "rope_scaling": None, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "attention_bias": True, "use_qk_norm": False,
    "eos_token_id": [151329, 151336], "tie_word_embeddings": False,
}  # fmt: skip


def test_glm_as_published():
    config = config_from_dict(GLM)
    attention, router = config.mixers[0], config.moe.router
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.rope.dims) == (96, 8, 128, 64)
    assert attention.rope.theta == 1e6 and attention.qkv_bias and not attention.out_bias
    assert config.moe_layers == tuple(range(1, 46)) and config.moe.shared.width == 1408
    assert router.score == "sigmoid" and router.has_bias and router.float32_logits
    assert config.eos_ids == (151329, 151336)
    embedding = config.vocab * config.hidden
    assert 105e9 < embedding + config.dense_params + config.routed_params < 108e9  # GLM-4.5-Air: 106 B
    assert config.unread_keys == ()


def test_generation_config_decides_the_end_tokens():
    assert config_from_dict(GLM, {"eos_token_id": 7}).eos_ids == (7,)


def test_both_spellings_of_rope_say_the_same():
    new = {k: v for k, v in GLM.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert config_from_dict(new).layers == config_from_dict(GLM).layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_counted_as_transformers_counts_them(variant):
    model_type, changes = VARIANTS[variant]
    theirs = AutoConfig.for_model(model_type, **(COMMON | changes))
    config = config_from_dict(json.loads(theirs.to_json_string(use_diff=False)))
    model = AutoModelForCausalLM.from_config(theirs)
    small = (
        "bias",
        "q_norm",
        "k_norm",
        "shared_expert_gate",
        "a_layernorm",
        "query_layernorm",
        "key_layernorm",
        "q_layernorm",
        "k_layernorm",
        "A_log",
        "linear_attn.norm",
        "mamba.norm",
        "mamba.D",
        "mixer.norm",
        "mixer.D",
        "o_norm",
        "sinks",
        "q_a_norm",
        "kv_norm",
        "_hc.base",
        "_hc.scale",
        "hc_head",
        "compress_ape",
    )  # not counted: no planner needs them
    counted = sum(p.numel() for n, p in model.named_parameters() if not any(s in n for s in small))
    embedding = 0 if config.tied_embeddings else config.vocab * config.hidden
    tables = sum(table.rows * table.width for table in config.tables)
    assert config.dense_params + config.routed_params + embedding + tables == counted


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def test_deepseek_v3_is_what_its_authors_say_it_is():
    """671 B parameters (arXiv 2412.19437), 576 numbers per token and layer in the cache, all read."""
    config = config_from_dict(DEEPSEEK)
    assert round((config.dense_params + config.routed_params + config.vocab * config.hidden) / 1e9) == 671
    assert config.state_layout("bfloat16").token_bytes == 61 * 576 * 2
    assert not config.unread_keys and config.drafts.layer == config.layers[-1] and config.drafter is None
    attention = config.mixers[0]
    assert attention.rope.table_factor == 1.0
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    kimi = config_from_dict(DEEPSEEK | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1})
    assert kimi.moe.router.num_groups == 1 and kimi.mixers[0] == attention


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("topk_method", "greedy", "topk_method = 'greedy' is not supported .*'noaux_tc' is"),
        ("rope_interleave", False, "rope_interleave = False is not supported"),
        ("rope_scaling", {"type": "longrope", "factor": 2}, "rope type 'longrope' is not supported; .*yarn"),
        ("rope_scaling", {"type": "yarn"}, "lacks 'factor'"),
        ("rope_scaling", {"type": "yarn", "factor": 0.5}, "factor 0.5 must be at least 1"),
        ("moe_layer_freq", 2, "moe_layer_freq = 2 is not supported"),
        ("qk_rope_head_dim", 63, "qk_rope_head_dim 63 even; try 1536 and 64"),
    ],
)
def test_deepseek_keys_that_mean_something_else_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(DEEPSEEK | {key: value})


def test_sizes_for_the_planner():
    config = config_from_dict(GLM)
    assert config.state_layout("bfloat16").token_bytes == 46 * 2 * 8 * 128 * 2
    assert config.expert_bytes("bf16") == 3 * 4096 * 1408 * 2
    routed = 45 * 128 * config.expert_bytes("bf16")
    assert config.weight_bytes("bfloat16", "bf16") == 2 * config.dense_params + routed


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "n_routed_experts", "rms_norm_eps", "rope_theta"]
)
def test_a_missing_key_is_named_with_a_value_to_try(key):
    without = {k: v for k, v in GLM.items() if k != key}
    with pytest.raises(ConfigError, match=rf"lacks '{key}': add it, for example \{{\"{key}\": [\d.e-]+\}}"):
        config_from_dict(without)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", "4096", "hidden_size is '4096', not a int"),
        ("hidden_size", 0, "must be 1 to"),
        ("hidden_act", "mish", "hidden_act = 'mish' is not supported; these are: silu,"),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}, "rope type 'dynamic'"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("rms_norm_eps", 1e-30, "rms_norm_eps is 1e-30, whose square float32 does not have"),
        ("routed_scaling_factor", 1e308, "routed_scaling_factor is 1e.308, whose square float32"),
        ("rope_theta", 0, "rope_theta is 0"),
        (
            "rope_scaling",
            {"type": "yarn", "factor": 4.0, "rope_theta": 1},
            "rope_theta is 1.0, and must be above 1 for yarn",
        ),
        (
            "rope_scaling",
            {"type": "yarn", "factor": 4.0, "beta_slow": -1},
            "beta_slow is -1.0, and must be above 0",
        ),
        ("rope_scaling", {"type": ["yarn"]}, "rope_type is .'yarn'., not a word"),
        ("head_dim", 1 << 30, "head_dim is 1073741824, and must be at most 16777216"),
        ("head_dim", 1 << 20, "524288 rotary channels .* must be even, and 2 to 65536"),
        ("num_hidden_layers", (1 << 31) - 1, "num_hidden_layers is 2147483647, and must be at most 10000"),
        ("n_routed_experts", 1 << 20, "n_routed_experts is 1048576, and must be at most 65536"),
        ("rope_theta", float("inf"), "rope_theta is inf"),
        ("routed_scaling_factor", float("nan"), "routed_scaling_factor is nan"),
        ("n_shared_experts", -1, "n_shared_experts is -1, and must be 0 to"),
        ("num_key_value_heads", 7, "does not divide"),
        ("num_experts_per_tok", 129, "more than the 128 experts"),
        ("n_group", 3, "n_group 3, topk_group 1"),
        ("partial_rotary_factor", 0.01, "rotary channels"),
        ("first_k_dense_replace", 46, "no layer is MoE"),
        ("eos_token_id", "</s>", "eos_token_id is '</s>'"),
        ("eos_token_id", [[1, 2]], "eos_token_id is .* not a whole number or a list"),
        ("eos_token_id", [True], "eos_token_id is .* not a whole number or a list"),
        ("model_type", "gpt2", "'gpt2' is not supported: "),
        ("model_type", None, "config.json names no model_type"),
        ("model_type", ["a"], "is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(key, value, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        config_from_dict(GLM | {key: value})


def test_a_score_that_nobody_computes_is_refused_by_name():
    with pytest.raises(ConfigError, match="a router's score is 'tanh', and must be one of: softmax, sigmoid, sqrt"):
        Router(8, 2, score="tanh")
    with pytest.raises(ConfigError, match="a group of experts counts as 'mean'"):
        Router(8, 2, num_groups=2, group_score="mean")


def test_a_key_that_nobody_understood_is_reported():
    assert config_from_dict(GLM | {"use_xyz": True}).unread_keys == ("use_xyz",)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("junk", ["x", -1, 0, 10**9, 1.5, True, [], ["x"], {"x": 1}])
def test_junk_in_any_key_is_accepted_or_a_config_error(variant, junk):
    model_type, changes = VARIANTS[variant]
    good = COMMON | changes | {"model_type": model_type, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    config_from_dict(good)
    for key in (*good, "rope_parameters", "layer_types", "mlp_only_layers", "sliding_window", "head_dim"):
        with contextlib.suppress(ConfigError):
            config_from_dict(good | {key: junk})


def test_keys_that_are_null_say_nothing():
    """Every Qwen3 config has `"sliding_window": null`."""
    keys = JsonKeys({"sliding_window": None, "use_xyz": None, "use_abc": 0, "num_mtp_layers": 0})
    assert keys.unread == ("use_abc",)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("granitemoe", {"residual_multiplier": 1e-200}, "residual_multiplier is 1e-200"),
        ("granitemoe", {"residual_multiplier": 1e200}, "residual_multiplier is 1e.200"),
        ("hunyuan_v1_moe", {"head_dim": 2}, "alpha 20.0 does not fit heads of 2 channels"),
        ("deepseek_v3", {"mscale_all_dim": 1e308}, "mscale_all_dim is 1e.308"),
        ("laguna", {"partial_rotary_factor": -1.0}, "partial_rotary_factor is -1.0, and must be above 0"),
        ("kimi_linear", {"mlp_layer_types": [["dense"]] * 4}, "mlp_layer_types must be a list"),
        ("kimi_linear", {"layer_types": [[]] * 4}, "layer_types must say"),
    ],
)
def test_numbers_that_cannot_be_computed_with_are_refused(variant, change, message):
    family, sizes = VARIANTS[variant]
    rope = sizes.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    inside = {key: value for key, value in change.items() if key in ("mscale_all_dim", "partial_rotary_factor")}
    rope = rope | inside if "full_attention" not in rope else {kind: own | inside for kind, own in rope.items()}
    config = COMMON | {"model_type": family, "rms_norm_eps": 1e-6} | sizes | change | {"rope_parameters": rope}
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config)
