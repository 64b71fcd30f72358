"""GGUF's `deepseek4`: windows, pooled entries, hyper-connections, and tables that choose experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import gguf_deepseek_v4
from gguf_deepseek_v4 import keys, write_deepseek_v4
from gguf_files import Kind
from sessions import Session, ours, reference, worst
from tandem.architectures.load import load_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import CheckpointError

VARIANTS = ["deepseek_v4-hub", "deepseek_v4-narrow"]


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_metadata_says_what_config_json_says(tiny_models, tmp_path, variant: str, drafts: int) -> None:
    """Also where a file names a draft layer that it does not have."""
    found = load_model_config(write_deepseek_v4(tiny_models[variant], tmp_path / "m.gguf", drafts=drafts))
    assert found.layers == load_config(tiny_models[variant]).layers and found.unread_keys == ()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_is_that_of_the_directory(tiny_models, tmp_path, variant: str) -> None:
    source = tiny_models[variant]
    found = ours(Session(write_deepseek_v4(source, tmp_path / "m.gguf")))
    assert worst(found, ours(Session(source))) < 1e-5
    assert worst(found, reference(source)) < 1e-4


def test_experts_as_the_hub_has_them(tiny_models, tmp_path) -> None:
    """MXFP4, of which a file holds the same codes in another order."""

    def choose(name: str, array: np.ndarray) -> Kind:
        return Kind.MXFP4 if "_exps" in name else Kind.F32

    checkpoint = open_checkpoint(
        write_deepseek_v4(tiny_models["deepseek_v4-hub"], tmp_path / "m.gguf", choose)
    )
    name = "model.layers.1.mlp.experts.3.down_proj"
    assert checkpoint.format(name).kind == "mxfp4"
    exact = open_checkpoint(tiny_models["deepseek_v4-hub"]).get(f"{name}.weight")
    got = checkpoint.get(f"{name}.weight")
    largest = exact.view(len(exact), -1, 32).abs().amax(2).repeat_interleave(32, 1)
    assert (
        (got - exact).abs().le(largest / 3).all()
    )  # half of the widest step, 4 to 6, where the scale is rounded up


def test_tables_are_whole_numbers(tiny_models, tmp_path) -> None:
    source = tiny_models["deepseek_v4-hub"]
    file = open_checkpoint(write_deepseek_v4(source, tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.gate.tid2eid"
    assert torch.equal(file.get(name, whole=True), open_checkpoint(source).get(name, whole=True))
    with pytest.raises(CheckpointError, match="is stored as I32; it is read as F32, F16, BF16 or blocks"):
        file.get(name)
    with pytest.raises(CheckpointError, match="is stored as F32; it is read as I32"):
        file.get("model.layers.0.mlp.gate.weight", whole=True)


def test_a_table_of_other_numbers_is_refused(tiny_models, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = gguf_deepseek_v4.gguf_tensors
    monkeypatch.setattr(
        gguf_deepseek_v4, "gguf_tensors",
        lambda source: {n: a.astype(np.float32) if "tid2eid" in n else a for n, a in kept(source).items()},
    )  # fmt: skip
    file = write_deepseek_v4(tiny_models["deepseek_v4-hub"], tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="tid2eid.weight is stored as F32; readable are I32: take"):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 2, "expert_gating_func is not 4"),
        ("swiglu_clamp_exp", [1.0, 2.0, 1.0, 1.0], "swiglu_clamp_exp is not one number"),
        ("swiglu_clamp_exp", [], "swiglu_clamp_exp is missing: convert"),
        ("swiglu_clamp_shexp", [3.0] * 4, "swiglu_clamp_shexp is not that of the experts"),
        ("attention.compress_ratios", ["a"], "compress_ratios is not an array of numbers"),
    ],
)
def test_what_is_not_computed_is_refused(
    tiny_models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, message: str
) -> None:
    monkeypatch.setattr(gguf_deepseek_v4, "keys", lambda config, drafts: keys(config, drafts) | {key: value})
    with pytest.raises(CheckpointError, match=message):
        load_model_config(write_deepseek_v4(tiny_models["deepseek_v4-hub"], tmp_path / "m.gguf"))
