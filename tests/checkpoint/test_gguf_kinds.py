"""GGUF files of families whose layers differ, and of relatives that share an architecture's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import gguf_files
import tiny
from gguf_files import write_gguf
from sessions import Session, ours, worst
from tandem.architectures.load import load_config
from tandem.checkpoint import load_model_config
from tandem.errors import CheckpointError
from tandem.spec.model_config import ModelConfig

VARIANTS = (
    "gemma4_text", "gemma4_text-plain", "gemma4_text-dense", "mimo_v2_flash", "hy_v3", "hy_v3-bias", "afmoe",
    "exaone_moe", "hunyuan_v1_moe", "hunyuan_v1_moe-plain", "laguna", "laguna-element", "lfm2_moe",
    "granitemoe", "granitemoeshared", "granitemoehybrid", "nemotron_h", "nemotron_h-latent",
)  # fmt: skip


def same(file: Path, source: Path, close: float = 1e-6) -> None:
    """The same configuration, but for the family's name, and the same logits. Files have numbers in float32."""
    found, expected = load_model_config(file), load_config(source)
    assert found.unread_keys == ()
    expected = replace(expected, model_type=found.model_type, eos_ids=found.eos_ids, unread_keys=())
    assert shortened(found) == shortened(expected)
    assert worst(ours(Session(file)), ours(Session(source))) < close


def shortened(config: ModelConfig) -> str:
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", repr(config))


@pytest.fixture
def with_one_factor(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Files have one of YaRN's two factors."""

    def saved(variant: str) -> Path:
        family, sizes = tiny.VARIANTS[variant]
        rope = sizes["rope_parameters"] | {"mscale": 0.8}
        monkeypatch.setitem(tiny.VARIANTS, "one", (family, sizes | {"rope_parameters": rope}))
        tiny.save_tiny("one", tmp_path / "source")
        return tmp_path / "source"

    return saved


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_is_the_model_of_its_directory(tiny_models, tmp_path, variant) -> None:
    file = write_gguf(tiny_models[variant], tmp_path / "m.gguf")
    same(file, tiny_models[variant])
    assert load_model_config(file).model_type == variant.partition("-")[0].removesuffix("shared")


def test_deepseek2_without_scores_but_with_a_bias_is_sigmoid(tiny_models, tmp_path) -> None:
    """As GLM-4.7-Flash's files are."""
    file = write_gguf(tiny_models["glm4_moe_lite"], tmp_path / "m.gguf")
    assert load_model_config(file).moe.router.score == "sigmoid"
    same(file, tiny_models["glm4_moe_lite"])


@pytest.mark.parametrize("architecture", [gguf.MODEL_ARCH.MISTRAL4, gguf.MODEL_ARCH.DEEPSEEK2])
def test_mistrals_softmax_is_normalised(with_one_factor, tmp_path, monkeypatch, architecture) -> None:
    """Mistral-Small-4's files have a name of their own; Mistral-Large-3's are deepseek2's."""
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "mistral4", architecture)
    source = with_one_factor("mistral4")
    same(write_gguf(source, tmp_path / "m.gguf"), source)


def test_deepseek32_has_an_indexer_in_every_layer(with_one_factor, tmp_path) -> None:
    """Heads' matrices are divided in a file, so they are multiplied in another order."""
    source = with_one_factor("deepseek_v32")
    file = write_gguf(source, tmp_path / "m.gguf")
    assert load_model_config(file).model_type == "deepseek_v32"
    same(file, source, 1e-5)


def test_qwen3vlmoe_is_the_text_of_qwen3_vl(tiny_models, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "qwen3_moe", gguf.MODEL_ARCH.QWEN3VLMOE)
    same(write_gguf(tiny_models["qwen3_moe-tied"], tmp_path / "m.gguf"), tiny_models["qwen3_moe-tied"])


def test_a_rotation_that_gemma_4_does_not_have_is_named(tiny_models, tmp_path, monkeypatch) -> None:
    kept = gguf.GGUFWriter.add_rope_dimension_count_swa
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_dimension_count_swa", lambda self, count: kept(self, count // 2))
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count_swa is not 16: all channels turn"):
        load_model_config(write_gguf(tiny_models["gemma4_text"], tmp_path / "m.gguf"))


def test_q_k_and_v_may_be_one_matrix(tiny_models, tmp_path, monkeypatch) -> None:
    """As in files of MiMo-V2.5, whose values are narrower than keys."""
    kept = gguf_files.gguf_tensors

    def joined(*given: Any) -> Iterator[tuple[str, np.ndarray]]:
        tensors = dict(kept(*given))
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        yield from tensors.items()

    monkeypatch.setattr(gguf_files, "gguf_tensors", joined)
    same(write_gguf(tiny_models["mimo_v2_flash"], tmp_path / "m.gguf"), tiny_models["mimo_v2_flash"])


def test_kimi_linear(tmp_path, monkeypatch) -> None:
    """Heads' matrices are divided in a file, so they are multiplied in another order. Files have no groups."""
    family, sizes = tiny.VARIANTS["kimi_linear"]
    monkeypatch.setitem(tiny.VARIANTS, "kimi", (family, sizes | {"num_expert_group": 1, "topk_group": 1}))
    tiny.save_tiny("kimi", tmp_path / "source")
    same(write_gguf(tmp_path / "source", tmp_path / "m.gguf"), tmp_path / "source", 1e-5)
