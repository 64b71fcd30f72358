"""GGUF's `glm-dsa`: GLM-5, whose layers choose tokens by an indexer of their own, or take another's choice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from gguf_files import Kind, write_gguf
from sessions import Session, ours, reference, worst
from tandem.architectures.load import load_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import CheckpointError
from tiny import VARIANTS, save_tiny, settings

SHARED = settings(  # dense layers come first in a file, which only says how many there are
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"], first_k_dense_replace=1,
)  # fmt: skip


LAYERS = 8
CHOOSING = (0, 1, 2, 6)  # of eight layers, where config.json is GLM-5.2's
TYPES = "glm-dsa.attention.indexer.types"


@pytest.fixture(scope="module", params=["glm_moe_dsa", "glm_moe_dsa-every"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = SHARED if "mlp_layer_types" in VARIANTS[request.param][1] else {}
    return saved(request.param, tmp_path_factory.mktemp("glm") / "source", **shared)


def saved(variant: str, directory: Path, **changes) -> Path:
    family, usual = VARIANTS[variant]
    VARIANTS["glm-file"] = (family, usual | changes)
    save_tiny("glm-file", directory)
    del VARIANTS["glm-file"]
    return directory


def test_the_metadata_says_what_config_json_says(source, tmp_path) -> None:
    found, expected = load_model_config(write_gguf(source, tmp_path / "m.gguf")), load_config(source)
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


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexer in each layer, as in files of GLM-5.2 from before the key."""
    directory = tmp_path_factory.mktemp("glm") / "every"
    return saved("glm_moe_dsa-every", directory, num_hidden_layers=LAYERS, max_position_embeddings=1 << 20)


def choosing(file: Path) -> list[int]:
    """Layers without another's choice."""
    mixers = [layer.mixer for layer in load_model_config(file).layers]
    return [i for i, mixer in enumerate(mixers) if mixer.index.reuse is None]


def with_types(monkeypatch, values: list, kind: gguf.GGUFValueType) -> None:
    kept = gguf.GGUFWriter.add_indexer_top_k

    def add(writer, count):
        kept(writer, count)
        writer.add_key_value(TYPES, values, gguf.GGUFValueType.ARRAY, kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_indexer_top_k", add)


def with_context(monkeypatch, tokens: int) -> None:
    kept = gguf.GGUFWriter.add_context_length
    monkeypatch.setattr(gguf.GGUFWriter, "add_context_length", lambda writer, _: kept(writer, tokens))


def test_a_file_of_glm_5_2_without_the_key_is_what_its_config_json_says(every, tmp_path) -> None:
    """Also in what it computes: the indexers of the others are not asked."""
    file = write_gguf(every, tmp_path / "m.gguf")
    told = tmp_path / "told"
    shutil.copytree(every, told)
    config = json.loads((told / "config.json").read_text()) | {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    config.pop("indexer_types", None)
    (told / "config.json").write_text(json.dumps(config))
    assert choosing(file) == list(CHOOSING)
    assert load_model_config(file).layers == load_config(told).layers
    found = ours(Session(file))
    assert worst(found, ours(Session(told))) < 1e-5 < worst(found, ours(Session(every)))


def test_a_shorter_context_is_glm_5(every, tmp_path, monkeypatch) -> None:
    with_context(monkeypatch, (1 << 20) - 1)
    assert choosing(write_gguf(every, tmp_path / "m.gguf")) == list(range(LAYERS))


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.BOOL, gguf.GGUFValueType.UINT32])
@pytest.mark.parametrize("tokens", [4096, 1 << 20])
def test_the_key_counts_before_all_else(every, tmp_path, monkeypatch, kind, tokens) -> None:
    number = bool if kind is gguf.GGUFValueType.BOOL else int
    with_types(monkeypatch, [number(i in (0, 3, 4)) for i in range(LAYERS)], kind)
    with_context(monkeypatch, tokens)
    assert choosing(write_gguf(every, tmp_path / "m.gguf")) == [0, 3, 4]


@pytest.mark.parametrize(
    ("values", "says"),
    [([1] * (LAYERS - 1), "has 7 values for 8 layers"), ([2] * LAYERS, "is not an array of bools")],
)
def test_a_key_that_cannot_be_is_refused(every, tmp_path, monkeypatch, values, says) -> None:
    with_types(monkeypatch, values, gguf.GGUFValueType.UINT32)
    with pytest.raises(CheckpointError, match=f"indexer.types {says}"):
        load_model_config(write_gguf(every, tmp_path / "m.gguf"))


def test_draft_layers_may_be_listed_too(every, tmp_path, monkeypatch) -> None:
    kept = gguf.GGUFWriter.add_block_count

    def add(writer, count):
        kept(writer, count + 1)
        writer.add_nextn_predict_layers(1)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", add)
    with_types(monkeypatch, [True, *[False] * (LAYERS - 1), True], gguf.GGUFValueType.BOOL)
    assert choosing(write_gguf(every, tmp_path / "m.gguf")) == [0]
