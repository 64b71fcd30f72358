"""Ling 2.0 (`bailing_moe_v2`): GLM-4.5's parts under other names, with q, k and v in one matrix; also from GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import gguf_files
import hub_copies
from gguf_files import write_gguf
from hub_copies import ling_keys
from sessions import Session, ours, reference, worst
from tandem.architectures.load import config_from_dict, load_config
from tandem.checkpoint import load_model_config
from tandem.errors import ConfigError


@pytest.fixture(scope="module")
def ling(tiny_models, tmp_path_factory) -> Path:
    return hub_copies.ling(tiny_models["glm4_moe"], tmp_path_factory.mktemp("ling"))


def test_it_is_the_model_that_it_was_made_of(tiny_models, ling) -> None:
    config = load_model_config(ling)
    assert config.unread_keys == () and config.layers == load_config(tiny_models["glm4_moe"]).layers
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
        config_from_dict(ling_keys(tiny_models["glm4_moe"]) | {"score_function": "softmax"})
