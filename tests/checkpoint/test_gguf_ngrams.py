"""Qwen3.8-Flash-Next in GGUF files: the same model, its table in blocks and in pieces; files that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_files import Kind, rewritten, split, write_gguf
from sessions import Session, ours, worst
from tandem.architectures.load import load_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import CheckpointError, ConfigError
from tiny import save_tiny

TABLE = "per_layer_token_embd.weight"
MODULE = "model.layers.1.ple.ple_embedding.ngram_embedding"


def source(directory: Path) -> Path:
    """With a table whose rows are one block each."""
    save_tiny("qwen4_exp", directory, ple_embed_dim=256)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As safetensors, as GGUF."""
    directory = tmp_path_factory.mktemp("flash-next")
    return source(directory / "source"), write_gguf(directory / "source", directory / "m.gguf")


def test_a_gguf_file_is_the_same_model(model: tuple[Path, Path], tmp_path: Path) -> None:
    """Norms are 1 + w there, which rounds. What ends an answer need not end n-grams."""
    found, expected = load_model_config(model[1]), load_config(model[0])
    assert found.unread_keys == () and shortened(found.layers) == shortened(expected.layers)
    other = rewritten(model[1], tmp_path / "other.gguf", {"tokenizer.ggml.eos_token_id": 7})
    assert load_model_config(other).layers == found.layers
    assert worst(ours(Session(model[1])), ours(Session(model[0]))) < 1e-5


def shortened(layers: object) -> str:
    """Files have numbers in float32."""
    return re.sub(r"\d+\.\d*(e-?\d+)?|\de-\d+", lambda number: f"{float(number[0]):.6g}", repr(layers))


def test_hashes_are_those_of_the_metadata(model: tuple[Path, Path]) -> None:
    """Multipliers of a small vocabulary are more than a float64 can have."""
    whole, file = open_checkpoint(model[0]), open_checkpoint(model[1])
    for name, size in (("layer_multipliers", 3), ("ngram_heads_vocab_sizes", 8), ("ngram_heads_offsets", 8)):
        full = f"model.layers.1.ple.ple_embedding.{name}"
        assert full in file
        assert torch.equal(file.get(full, (size,), whole=True), whole.get(full, (size,), whole=True))
    with pytest.raises(CheckpointError, match="its metadata has 8 numbers for .*ngram_heads_offsets, but implies 9"):
        file.get("model.layers.1.ple.ple_embedding.ngram_heads_offsets", (9,), whole=True)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.IQ4_NL, Kind.BF16])
def test_a_table_in_blocks(model: tuple[Path, Path], tmp_path: Path, kind: Kind) -> None:
    file = write_gguf(model[0], tmp_path / "m.gguf", lambda name, _: kind if name == TABLE else Kind.F32)
    checkpoint = open_checkpoint(file)
    stored = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == TABLE)
    rows = gguf.dequantize(stored.data, stored.tensor_type)
    ids = torch.tensor([0, len(rows) - 1, 5, 5])
    for where in ("ram", "map", "disk"):
        found = checkpoint.table(MODULE, rows.shape, where)(ids).float().numpy()
        assert np.array_equal(found, rows[ids])
    formats = checkpoint.formats()
    assert formats.tables.name == kind.name.lower() and formats.dense.name != kind.name.lower()
    assert formats.tables.bytes_per_weight == stored.n_bytes / rows.size
    assert checkpoint.nbytes() == sum(t.n_bytes for t in gguf.GGUFReader(file).tensors) - stored.n_bytes
    assert all(row.isfinite().all() for row in ours(Session(file)))


def test_a_model_in_several_files(model: tuple[Path, Path], tmp_path: Path) -> None:
    files = split(model[1], tmp_path, 3)
    pairs = zip(ours(Session(files[0])), ours(Session(model[1])), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("changes", "message"), [
    ({"qwen4exp.ple.layers": [0, 1]}, "ple.layers names 2 layers, but a file has one table"),
    ({"qwen4exp.ple.layers": None}, "ple.layers names 0 layers"),
    ({"qwen4exp.ple.head_offsets": [0.5]}, "ple.head_offsets is not an array of whole numbers"),
    ({"qwen4exp.ple.head_offsets": [-1]}, "ple.head_offsets is not an array of whole numbers"),
    ({"qwen4exp.ple.layers": [77]}, "layers are 1 to 4"),
    ({"qwen4exp.ple.ngram_size": None}, "lacks qwen4exp.ple.ngram_size"),
    ({"qwen4exp.hyper_connection.count": 1}, "hc_count is 1"),
    ({"qwen4exp.ple.head_vocab_sizes": [1]}, "has 1 numbers for .*vocab_sizes, but implies 8"),
    ({"qwen4exp.ple.head_vocab_sizes": None}, "has 0 numbers for .*vocab_sizes, but implies 8"),
    ({"qwen4exp.ple.head_vocab_sizes": [9000] * 8}, "name rows beyond the table's"),
])  # fmt: skip
def test_a_file_that_is_not_understood_is_refused(
    model: tuple[Path, Path], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = rewritten(model[1], tmp_path / "other.gguf", changes)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        Session(file)


def test_a_file_without_its_table_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    file = rewritten(model[1], tmp_path / "other.gguf", {}, lambda name: name != TABLE)
    with pytest.raises(CheckpointError, match="has no matrix per_layer_token_embd"):
        load_model_config(file)
