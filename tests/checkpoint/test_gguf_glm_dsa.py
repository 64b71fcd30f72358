"""GGUF's `glm-dsa`: GLM-5, whose layers choose tokens by an indexer of their own, or take another's choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from gguf_files import Kind, write_gguf
from sessions import Session, ours, reference, worst
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.config import ModelConfig
from tandem.errors import CheckpointError
from tiny import VARIANTS, save_tiny, settings

SHARED = settings(  # dense layers come first in a file, which only says how many there are
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"], first_k_dense_replace=1,
)  # fmt: skip


@pytest.fixture(scope="module", params=["glm_moe_dsa", "glm_moe_dsa-every"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm") / "source"
    family, changes = VARIANTS[request.param]
    VARIANTS["glm-file"] = (family, changes | (SHARED if "mlp_layer_types" in changes else {}))
    save_tiny("glm-file", directory)
    del VARIANTS["glm-file"]
    return directory


def test_the_metadata_says_what_config_json_says(source, tmp_path) -> None:
    found, expected = load_model_config(write_gguf(source, tmp_path / "m.gguf")), ModelConfig.load(source)
    assert found.unread_keys == ()
    assert replace(found, eos_ids=()) == replace(expected, eos_ids=(), unread_keys=())


def test_the_model_is_that_of_the_directory(source, tmp_path) -> None:
    """Heads' matrices are divided in a file, so they are multiplied in another order."""
    file = write_gguf(source, tmp_path / "m.gguf")
    found = ours(Session(file))
    assert worst(found, ours(Session(source))) < 1e-5
    assert worst(found, reference(source)) < 1e-4


def test_blocks_of_an_indexer_are_the_numbers_they_stand_for(source, tmp_path) -> None:
    file = write_gguf(source, tmp_path / "m.gguf", lambda name, a: Kind.F16 if a.ndim > 1 else Kind.F32)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    numbers = torch.from_numpy(stored["blk.0.indexer.attn_q_b.weight"].data.copy()).float()
    assert torch.equal(open_checkpoint(file).get("model.layers.0.self_attn.indexer.wq_b.weight").float(), numbers)


def test_another_score_is_refused(source, tmp_path, monkeypatch) -> None:
    kept = gguf.GGUFWriter.add_expert_gating_func
    softmax = gguf.ExpertGatingFuncType.SOFTMAX
    monkeypatch.setattr(gguf.GGUFWriter, "add_expert_gating_func", lambda writer, _: kept(writer, softmax))
    with pytest.raises(CheckpointError, match="expert_gating_func is not 2"):
        load_model_config(write_gguf(source, tmp_path / "m.gguf"))
