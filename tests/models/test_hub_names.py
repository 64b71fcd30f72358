"""Families as they lie on the hub: text inside a multimodal checkpoint, layers for drafts, experts in fp8 blocks."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from hub_copies import nested, omni
from plans import with_gpu
from quantised_models import CHOICES, save_quantised
from sessions import Session, ours, reference, worst
from tandem.architectures.load import config_from_dict
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.resolve import resolve
from tiny import VARIANTS, file_tensors, save_tiny, settings

NESTED = [
    ("kimi_k25", "kimi_k2", "deepseek_v3"), ("kimi_k25", "deepseek_v3", "deepseek_v3-plain"),
    ("mistral3", "mistral4", "mistral4"), ("gemma4", "gemma4_text", "gemma4_text"),
    ("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_moe"), ("kimi_vl", "deepseek_v3", "deepseek_v3-plain"),
]  # the last is known by its text alone


@pytest.mark.parametrize(("model_type", "inner", "variant"), NESTED)
def test_text_inside_a_multimodal_checkpoint(tiny_models, tmp_path, model_type, inner, variant):
    path = nested(tiny_models[variant], tmp_path / "nested", model_type, inner)
    assert worst(ours(Session(path)), reference(tiny_models[variant])) < 1e-4
    plan = resolve(EngineConfig(model="m"), load_model_config(path), with_gpu())
    assert any("vision_config" in notice and "images" in notice for notice in plan.notices)


def test_what_speaks_beside_what_thinks_is_left_out(tiny_models, tmp_path):
    """Qwen3-Omni's names."""
    source = tiny_models["qwen3_moe"]
    omni(source, tmp_path)
    assert worst(ours(Session(tmp_path)), reference(source)) < 1e-4
    plan = resolve(EngineConfig(model="m"), load_model_config(tmp_path), with_gpu())
    assert [notice for notice in plan.notices if "audio_config" in notice and "sound" in notice]


@pytest.mark.parametrize(("model_type", "known"), [("kimi_k25", "kimi_k2"), ("mistral3", "mistral4")])
def test_another_text_is_refused(tiny_models, tmp_path, model_type, known):
    path = nested(tiny_models["llama"], tmp_path / "nested", model_type, "llama")
    with pytest.raises(ConfigError, match=f"text_config.model_type 'llama' is not supported; {known} is"):
        load_model_config(path)


DRAFTS = {
    "minimax_m2": ("num_mtp_modules", 3), "hy_v3": ("num_nextn_predict_layers", 1),
    "glm4_moe_lite": ("num_nextn_predict_layers", 1), "deepseek_v32": ("num_nextn_predict_layers", 1),
    "glm_moe_dsa-every": ("num_nextn_predict_layers", 1),
}  # fmt: skip


@pytest.mark.parametrize("variant", DRAFTS)
def test_layers_for_drafts_are_named_and_left_out(tiny_models, tmp_path, variant):
    source, (key, count) = tiny_models[variant], DRAFTS[variant]
    tensors = file_tensors(source)
    drafts = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if ".layers.2." in n}
    save_file(tensors | drafts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {key: count, "use_mtp": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = resolve(EngineConfig(model="m"), load_model_config(tmp_path), with_gpu())
    known = load_model_config(tmp_path).drafts is not None
    assert known == (variant in ("glm4_moe_lite", "deepseek_v32"))
    said = "a draft layer, which is not loaded; --speculative-algorithm NEXTN" if known else "(MTP) are not loaded"
    assert any(said in notice and (known or key in notice) for notice in plan.notices)
    assert not any("use_mtp" in notice for notice in plan.notices)
    assert worst(ours(Session(tmp_path)), reference(source)) < 1e-4


@pytest.mark.parametrize("variant", ["minimax_m2", "hy_v3", "ernie4_5_moe"])
def test_the_hubs_own_names_are_what_is_read(tiny_models, variant):
    """Transformers saves under the names of the hub, and holds others."""
    parts = {"minimax_m2": ".block_sparse_moe.experts.3.w1.", "hy_v3": ".mlp.router.gate.",
             "ernie4_5_moe": ".mlp.moe_statics."}  # fmt: skip
    names = list(open_checkpoint(tiny_models[variant]).names())
    assert any(parts[variant] in name for name in names)
    fused = list(open_checkpoint(tiny_models.fused(variant)).names())
    assert not any(parts[variant] in name for name in fused)


WIDE = settings(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    moe_intermediate_size=128, intermediate_size=256,
)  # fmt: skip


@pytest.mark.parametrize("variant", ["minimax_m2", "ernie4_5_moe", "hy_v3", "dots1"])
def test_fp8_blocks(tmp_path, monkeypatch, variant):
    """Rotary pairs of neighbours are put in another order inside blocks that share a scale."""
    family, changes = VARIANTS[variant]
    monkeypatch.setitem(VARIANTS, "wide", (family, changes | WIDE))
    save_tiny("wide", tmp_path / "source")
    quantised, plain = save_quantised(tmp_path / "source", tmp_path, CHOICES["all fp8"])
    assert open_checkpoint(quantised).formats().dense_codes
    assert worst(ours(Session(quantised, dense_codes=True)), reference(plain)) < 1e-4


MIMO = {
    "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "sliding_window": 8, "sliding_window_size": 8,
    "attention_chunk_size": 8, "swa_num_key_value_heads": 4, "swa_num_attention_heads": 8, "swa_head_dim": 24,
    "swa_v_head_dim": 20, "swa_rope_theta": 300, "rope_theta": 5000, "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None, "attention_value_scale": 0.707,
}  # fmt: skip
"""Keys of the hub's MiMo-V2-Flash."""
GEMMA = {
    "global_head_dim": 24, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 262144, "use_bidirectional_attention": "vision",
}  # fmt: skip
"""Keys of the hub's Gemma 4."""
SPELLED = {
    "mimo_v2_flash": (MIMO, ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")),
    "gemma4_text": (GEMMA, ("per_layer_config",)),
}


@pytest.mark.parametrize("variant", SPELLED)
def test_the_hubs_keys_say_what_transformers_do(tiny_models, variant):
    said, absent = SPELLED[variant]
    theirs = json.loads((tiny_models[variant] / "config.json").read_text())
    if variant == "mimo_v2_flash":
        theirs |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    ours = {key: value for key, value in theirs.items() if key not in absent} | said
    found = config_from_dict(ours)
    assert found.layers == config_from_dict(theirs).layers and not found.unread_keys


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("mimo_v2_flash", "v_head_dim", 25, "values of 25 channels are wider than keys of 24"),
        ("mimo_v2_flash", "swa_head_dim", 32, "swa_head_dim = 32 is not supported"),
        ("mimo_v2_flash", "moe_layer_freq", [0, 2, 1], "moe_layer_freq must be a list of 3 times 0 or 1"),
        ("gemma4_text", "hidden_size_per_layer_input", 8, "embeddings of layers are not supported; 0 is"),
        ("gemma4_text", "num_kv_shared_layers", 1, "layers that read another's keys are not supported; 0 is"),
        ("gemma4_text", "per_layer_config", {"1": 3}, "per_layer_config.1 is 3, not an object"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(tiny_models, variant, key, value, message):
    theirs = json.loads((tiny_models[variant] / "config.json").read_text())
    if key == "moe_layer_freq":
        del theirs["mlp_layer_types"]
    with pytest.raises(ConfigError, match=message):
        config_from_dict(theirs | {key: value})


def test_wide_heads_stay_on_the_cpu(tiny_models):
    keys = json.loads((tiny_models["gemma4_text"] / "config.json").read_text()) | GEMMA | {"global_head_dim": 512}
    del keys["per_layer_config"]
    plan = resolve(EngineConfig(model="m"), config_from_dict(keys), with_gpu())
    why = next(each.reason for each in plan.decisions if each.name == "device")
    assert plan.gpu is None and "heads of at most 256 channels, not 512" in why
