"""Formats from config.json and the index alone are those that the files' headers say."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import stored_formats
from quantised_models import everything, experts_only, save_quantised
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.checkpoint.metadata.from_names import INDEX, formats_from_names, read_index
from tiny import VARIANTS, file_tensors, save_tiny, settings

SIZES = settings(
    hidden_size=256, num_hidden_layers=2, moe_intermediate_size=256, intermediate_size=384, n_routed_experts=8,
    n_group=2, topk_group=1, num_attention_heads=8, num_key_value_heads=8, head_dim=32, vocab_size=64,
    bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip
UNKNOWN_FROM_NAMES = {
    "fp8 blocks of 64", "fp8 per tensor", "int8 per tensor", "mxfp8", "int4 bytes", "int4 packed per channel",
}  # fmt: skip
"""What only shapes or types tell from its neighbour; sizes differ by less than one in twenty."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    family, changes = VARIANTS["glm4_moe"]
    VARIANTS["from_names"] = (family, changes | SIZES)
    path = tmp_path_factory.mktemp("names") / "model"
    save_tiny("from_names", path)
    del VARIANTS["from_names"]
    return path


def without_weights(path: Path, target: Path) -> Path:
    """config.json and an index, as they are read before a download."""
    target.mkdir()
    shutil.copy(path / "config.json", target)
    tensors = file_tensors(path)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(tensors, "model-00001.safetensors"),
    }
    (target / INDEX).write_text(json.dumps(index))
    return target


@pytest.mark.parametrize("fmt", stored_formats.MAKERS)
def test_names_say_what_headers_say(model, tmp_path, fmt):
    quantised, _ = save_quantised(model, tmp_path, everything(fmt))
    known = open_checkpoint(quantised).formats()
    found = formats_from_names(without_weights(quantised, tmp_path / "bare"), load_config(model))
    for kind in ("experts", "shared", "dense"):
        ours, theirs = getattr(found, kind), getattr(known, kind)
        assert ours.quantised == theirs.quantised, kind
        assert ours.bytes_per_weight == pytest.approx(theirs.bytes_per_weight, rel=0.05), (kind, ours, theirs)
        if fmt not in UNKNOWN_FROM_NAMES and kind == "experts":
            assert (ours.name, ours.methods, ours.unread_by_gpu) == (
                theirs.name,
                theirs.methods,
                theirs.unread_by_gpu,
            )


def test_dense_matrices_may_be_left_as_they_are(model, tmp_path):
    quantised, _ = save_quantised(model, tmp_path, experts_only("int4 packed g32"))
    found = formats_from_names(without_weights(quantised, tmp_path / "bare"), load_config(model))
    assert found.experts.name == "int4 g32" and not found.dense.quantised and not found.shared.quantised


def test_the_total_size_settles_what_names_leave_open(model, tmp_path):
    """DeepSeek-V4: fp8 blocks by the configuration, experts of 4 bits by their size."""
    fp8, _ = save_quantised(model, tmp_path / "fp8", everything("fp8 blocks"))
    fp4, _ = save_quantised(model, tmp_path / "fp4", experts_only("mxfp4 deepseek"))
    config = json.loads((fp8 / "config.json").read_text())
    bare = without_weights(fp4, tmp_path / "bare")
    (bare / "config.json").write_text(json.dumps(config))
    assert formats_from_names(bare, load_config(model)).experts.name == "mxfp4"
    bare = without_weights(fp8, tmp_path / "bare8")
    assert formats_from_names(bare, load_config(model)).experts.name == "fp8 128x128"


def test_without_an_index_the_configuration_says_it(model, tmp_path):
    quantised, _ = save_quantised(model, tmp_path, everything("gptq"))
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(quantised / "config.json", bare)
    assert read_index(bare) == ((), 0)
    found = formats_from_names(bare, load_config(model))
    assert found.experts.name == found.dense.name.split(" + ")[0] and found.experts.methods[0] == "GPTQ_INT4"
    shutil.copy(model / "config.json", bare)
    assert not formats_from_names(bare, load_config(model)).experts.quantised


@pytest.mark.parametrize("ending", ["weight", "qweight", "weight_packed"])
def test_a_stored_head_counts_however_it_is_stored(model, tmp_path, ending):
    """It counts whatever config.json says of it; another module's head does not."""
    quantised, _ = save_quantised(model, tmp_path, everything("fp8 blocks"))
    tied = replace(load_config(model), tied_embeddings=True)
    names = [name for name in file_tensors(quantised) if not name.startswith("lm_head.")]
    inside = [f"language_model.{name}" for name in names]

    def dense_bytes(place, *names):
        (bare := tmp_path / place).mkdir()
        shutil.copy(quantised / "config.json", bare)
        (bare / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
        return formats_from_names(bare, tied).dense.bytes_per_weight

    without = dense_bytes("without", *names)
    counted = dense_bytes("own", *names, f"lm_head.{ending}")
    assert counted > without
    assert dense_bytes("inside", *inside, f"language_model.lm_head.{ending}") == counted
    assert dense_bytes("others", *names, f"vision.lm_head.{ending}", f"lm_head_norm.{ending}") == without
