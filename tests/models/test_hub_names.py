"""Families as they lie on the hub: text inside a multimodal checkpoint, layers for drafts, experts in fp8 blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plans import with_gpu
from quantised_models import CHOICES, save_quantised
from sessions import Session, ours, reference, worst
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.config import EngineConfig, resolve
from tandem.errors import ConfigError
from tiny import VARIANTS, file_tensors, save_tiny, settings


def nested(source: Path, path: Path, model_type: str, inner: str) -> Path:
    """The text of `source` beside a vision tower."""
    tensors = {f"language_model.{name}": tensor for name, tensor in file_tensors(source).items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 4)
    tensors["mm_projector.proj.0.weight"] = torch.zeros(4, 4)
    text = json.loads((source / "config.json").read_text()) | {"model_type": inner}
    config = {"model_type": model_type, "text_config": text, "vision_config": {"hidden_size": 4}}
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


NESTED = [
    ("kimi_k25", "kimi_k2", "deepseek_v3"), ("kimi_k25", "deepseek_v3", "deepseek_v3-plain"),
    ("mistral3", "mistral4", "mistral4"),
]


@pytest.mark.parametrize(("model_type", "inner", "variant"), NESTED)
def test_text_inside_a_multimodal_checkpoint(tiny_models, tmp_path, model_type, inner, variant):
    path = nested(tiny_models[variant], tmp_path / "nested", model_type, inner)
    assert worst(ours(Session(path)), reference(tiny_models[variant])) < 1e-4
    plan = resolve(EngineConfig(model="m"), load_model_config(path), with_gpu())
    assert any("vision_config" in notice and "images" in notice for notice in plan.notices)


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
    assert any(key in notice and "draft layers (MTP) are not loaded" in notice for notice in plan.notices)
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
