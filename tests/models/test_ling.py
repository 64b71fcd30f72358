"""Ling 2.0 (`bailing_moe_v2`): GLM-4.5's parts under other names, with q, k and v in one matrix; also from GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gguf_files
from gguf_files import write_gguf
from sessions import Session, ours, reference, worst
from tandem.checkpoint import load_model_config
from tandem.config import ModelConfig
from tandem.errors import ConfigError
from tiny import file_tensors, save_tokenizer

NAMES = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}  # fmt: skip
KEYS = {
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
}  # fmt: skip


def keys_of(source: Path) -> dict[str, Any]:
    """As the hub has them."""
    theirs = json.loads((source / "config.json").read_text())
    said = {ling: theirs.pop(glm) for ling, glm in KEYS.items()}
    rope = theirs.pop("rope_parameters")
    return theirs | said | {
        "model_type": "bailing_moe_v2", "use_bias": False, "use_rmsnorm": True, "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "rope_theta": rope["rope_theta"], "rope_scaling": None,
        "partial_rotary_factor": rope["partial_rotary_factor"], "router_dtype": "fp32", "num_nextn_predict_layers": 0,
        "moe_shared_expert_intermediate_size": theirs["moe_intermediate_size"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def ling(tiny_models, tmp_path_factory) -> Path:
    """The tiny GLM-4.5, as Ling has it."""
    source, path = tiny_models["glm4_moe"], tmp_path_factory.mktemp("ling")
    tensors, made = file_tensors(source), {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            made[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for theirs, lings in NAMES.items():
                name = name.replace(theirs, lings)
            made[name] = tensor
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(keys_of(source)))
    save_tokenizer(path)
    return path


def test_it_is_the_model_that_it_was_made_of(tiny_models, ling) -> None:
    config = load_model_config(ling)
    assert config.unread_keys == () and config.layers == ModelConfig.load(tiny_models["glm4_moe"]).layers
    assert worst(ours(Session(ling)), reference(tiny_models["glm4_moe"])) < 1e-4


def test_a_gguf_file_is_the_same_model(tiny_models, ling, tmp_path, monkeypatch) -> None:
    """Only q, k and v are not GLM's there."""
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "glm4_moe", gguf.MODEL_ARCH.BAILINGMOE2)
    kept = gguf_files.gguf_tensors

    def joined(*given: Any):
        tensors = dict(kept(*given))
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        yield from tensors.items()

    monkeypatch.setattr(gguf_files, "gguf_tensors", joined)
    file = write_gguf(tiny_models["glm4_moe"], tmp_path / "m.gguf")
    assert load_model_config(file).model_type == "bailing_moe_v2"
    for a, b in zip(ours(Session(file)), ours(Session(ling)), strict=True):
        assert torch.equal(a, b)


def test_another_relative_is_refused(tiny_models) -> None:
    with pytest.raises(ConfigError, match="score_function = 'softmax' is not supported"):
        ModelConfig.from_dict(keys_of(tiny_models["glm4_moe"]) | {"score_function": "softmax"})
