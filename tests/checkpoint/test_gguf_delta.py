"""GGUF's `qwen3next` and `qwen35moe`: gated delta nets with heads, norms and decays as llama.cpp has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import gguf_files
from gguf_files import Kind, write_gguf
from sessions import Session, ours, reference, worst
from tandem.architectures.load import load_config
from tandem.checkpoint import gguf_rows, load_model_config, open_checkpoint
from tandem.errors import CheckpointError
from tiny import VARIANTS, save_tiny

CASES = [("qwen3_next", False), ("qwen3_next", True), ("qwen3_5_moe_text", False)]
WIDE = ("ssm_out", "attn_qkv", "attn_gate", "ssm_in", "ssm_ba", "ssm_beta", "ssm_alpha")


@pytest.mark.parametrize(("variant", "whole"), CASES)
def test_the_metadata_says_what_config_json_says(tiny_models, tmp_path, variant: str, whole: bool) -> None:
    source = tiny_models[variant]
    found = load_model_config(write_gguf(source, tmp_path / "m.gguf", whole=whole))
    expected = load_config(source)
    assert found.unread_keys == () and len(found.layers) == len(expected.layers)
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        assert mine.moe == theirs.moe
        if variant == "qwen3_next" and not whole and hasattr(mine.mixer, "layout"):
            assert (mine.mixer.layout, theirs.mixer.layout) == ("kinds", "heads")
            mine = replace(mine, blocks=theirs.blocks)
        assert mine == theirs


@pytest.mark.parametrize(("variant", "whole"), CASES)
def test_the_model_is_that_of_the_directory(tiny_models, tmp_path, variant: str, whole: bool) -> None:
    """exp and log, and 1 + w, round once more."""
    source = tiny_models[variant]
    found = ours(Session(write_gguf(source, tmp_path / "m.gguf", whole=whole)))
    assert worst(found, ours(Session(source))) < 2e-5
    assert worst(found, reference(source)) < 1e-4


def coded(name: str, array: np.ndarray) -> Kind:
    """Q8_0 has blocks of 32: of what fits, projections of delta nets alone."""
    return (
        Kind.Q8_0
        if array.ndim > 1 and any(stem in name for stem in WIDE) and not array.shape[1] % 32
        else Kind.F32
    )


@pytest.mark.parametrize(("variant", "whole"), CASES)
def test_codes_are_turned_like_numbers(tiny_models, tmp_path, monkeypatch, variant: str, whole: bool) -> None:
    """A file of codes computes what a file of the numbers they stand for does, to the last bit."""
    family, usual = VARIANTS[variant]
    sizes = {
        "hidden_size": 96,
        "linear_value_head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
    }
    monkeypatch.setitem(VARIANTS, "delta-file", (family, usual | sizes))
    save_tiny("delta-file", tmp_path / "source")
    file = write_gguf(tmp_path / "source", tmp_path / "m.gguf", coded, whole=whole)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {t.tensor_type for name, t in stored.items() if "ssm_out" in name} == {Kind.Q8_0}

    def rounded(name: str, array: np.ndarray) -> np.ndarray:
        kind = coded(name, array)
        return array if kind == Kind.F32 else gguf.dequantize(gguf.quantize(array, kind), kind)

    kept = gguf_files.gguf_tensors
    monkeypatch.setattr(
        gguf_files, "gguf_tensors", lambda *given: ((n, rounded(n, a)) for n, a in kept(*given))
    )
    plain = write_gguf(tmp_path / "source", tmp_path / "plain.gguf", whole=whole)
    pairs = zip(ours(Session(file)), ours(Session(plain)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def fused(tensors):
    """As llama.cpp's converter does on request: rows of gates, then those of ups, of each expert."""

    def made(*arguments):
        apart = {}
        for name, array in tensors(*arguments):
            if name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
                apart[name] = array
            else:
                yield name, array
        for name in [name for name in apart if "gate" in name]:
            both = apart[name], apart[name.replace("gate_exps", "up_exps")]
            yield name.replace("gate_exps", "gate_up_exps"), np.concatenate(both, 1)

    return made


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5_moe_text"])
def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path, monkeypatch, variant: str, kind: Kind) -> None:
    family, usual = VARIANTS[variant]
    monkeypatch.setitem(VARIANTS, "fused", (family, usual | {"hidden_size": 96}))
    save_tiny("fused", tmp_path / "source")

    def written(name: str) -> Path:
        return write_gguf(
            tmp_path / "source", tmp_path / name, lambda name, array: kind if "_up_exps" in name or "gate_exps" in name
            else Kind.F32
        )  # fmt: skip

    apart = ours(Session(written("apart.gguf")))
    monkeypatch.setattr(gguf_files, "gguf_tensors", fused(gguf_files.gguf_tensors))
    file = written("together.gguf")
    names = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert "blk.0.ffn_gate_up_exps.weight" in names and "blk.0.ffn_gate_exps.weight" not in names
    assert load_model_config(file) == load_model_config(tmp_path / "apart.gguf")
    assert worst(ours(Session(file)), apart) == 0.0


def test_what_is_turned_by_columns_counts_as_numbers(tiny_models, tmp_path, monkeypatch) -> None:
    """And is made once."""
    checkpoint = open_checkpoint(write_gguf(tiny_models["qwen3_5_moe_text"], tmp_path / "m.gguf"))
    name = "model.layers.0.linear_attn.out_proj"
    source = open_checkpoint(tiny_models["qwen3_5_moe_text"])
    assert torch.equal(checkpoint.get(f"{name}.weight"), source.get(f"{name}.weight"))
    assert checkpoint.format(name).kind == "f32"
    made, real = [], gguf_rows._converted
    monkeypatch.setattr(gguf_rows, "_converted", lambda *given: made.append(given[1]) or real(*given))
    expected = source.get(f"{name}.weight")
    assert torch.equal(checkpoint.weight(name, (expected.shape[0], expected.shape[1])), expected) and len(made) == 1


@pytest.mark.parametrize(
    ("key", "value", "read", "message"),
    [
        ("add_ssm_group_count", 4, open_checkpoint, "ssm.group_count 4 does not divide 6 value heads"),
        ("add_ssm_inner_size", 119, load_model_config, "ssm.inner_size is not a multiple of 6 value heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int, read, message: str
) -> None:
    kept = getattr(gguf.GGUFWriter, key)
    monkeypatch.setattr(gguf.GGUFWriter, key, lambda writer, _: kept(writer, value))
    file = write_gguf(tiny_models["qwen3_next"], tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message):
        read(file)
