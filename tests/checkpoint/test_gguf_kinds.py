"""GGUF files of families whose layers differ, and of relatives that share an architecture's name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

import gguf_files
import tiny
from gguf_files import write_gguf
from sessions import Session, ours, worst
from tandem.checkpoint import load_model_config
from tandem.config import ModelConfig
from tandem.errors import CheckpointError

VARIANTS = ("gemma4_text", "gemma4_text-plain", "gemma4_text-dense", "mimo_v2_flash", "hy_v3", "hy_v3-bias")


def same(file: Path, source: Path) -> None:
    """The same configuration, but for the family's name, and the same logits. Files have numbers in float32."""
    found, expected = load_model_config(file), ModelConfig.load(source)
    assert found.unread_keys == ()
    expected = replace(expected, model_type=found.model_type, eos_ids=found.eos_ids, unread_keys=())
    assert shortened(found) == shortened(expected)
    assert worst(ours(Session(file)), ours(Session(source))) < 1e-6


def shortened(config: ModelConfig) -> str:
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", repr(config))


@pytest.fixture
def mistral4(tmp_path, monkeypatch) -> Path:
    """Files have one of YaRN's two factors."""
    family, sizes = tiny.VARIANTS["mistral4"]
    rope = sizes["rope_parameters"] | {"mscale": 0.8}
    monkeypatch.setitem(tiny.VARIANTS, "mistral", (family, sizes | {"rope_parameters": rope}))
    tiny.save_tiny("mistral", tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_is_the_model_of_its_directory(tiny_models, tmp_path, variant) -> None:
    file = write_gguf(tiny_models[variant], tmp_path / "m.gguf")
    same(file, tiny_models[variant])
    assert load_model_config(file).model_type == variant.partition("-")[0]


def test_deepseek2_without_scores_but_with_a_bias_is_sigmoid(tiny_models, tmp_path) -> None:
    """As GLM-4.7-Flash's files are."""
    file = write_gguf(tiny_models["glm4_moe_lite"], tmp_path / "m.gguf")
    assert load_model_config(file).moe.router.score == "sigmoid"
    same(file, tiny_models["glm4_moe_lite"])


@pytest.mark.parametrize("architecture", [gguf.MODEL_ARCH.MISTRAL4, gguf.MODEL_ARCH.DEEPSEEK2])
def test_mistrals_softmax_is_normalised(mistral4, tmp_path, monkeypatch, architecture) -> None:
    """Mistral-Small-4's files have a name of their own; Mistral-Large-3's are deepseek2's."""
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "mistral4", architecture)
    same(write_gguf(mistral4, tmp_path / "m.gguf"), mistral4)


def test_qwen3vlmoe_is_the_text_of_qwen3_vl(tiny_models, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "qwen3_moe", gguf.MODEL_ARCH.QWEN3VLMOE)
    same(write_gguf(tiny_models["qwen3_moe-tied"], tmp_path / "m.gguf"), tiny_models["qwen3_moe-tied"])


def test_a_rotation_that_gemma_4_does_not_have_is_named(tiny_models, tmp_path, monkeypatch) -> None:
    kept = gguf.GGUFWriter.add_rope_dimension_count_swa
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_dimension_count_swa", lambda self, count: kept(self, count // 2))
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count_swa is not 16: all channels turn"):
        load_model_config(write_gguf(tiny_models["gemma4_text"], tmp_path / "m.gguf"))
