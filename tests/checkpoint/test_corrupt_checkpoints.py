"""200 checkpoints damaged with a fixed seed each: every one is a CheckpointError naming the file.

Bits that flip inside the weights are not among them: neither safetensors nor GGUF has checksums, so no reader can
see those (the packed cache's checksums do: tests/kernels/test_packed_cache.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import corrupt_checkpoints
from gguf_files import write_gguf
from tandem.checkpoint.checkpoint import SafetensorsCheckpoint
from tandem.checkpoint.gguf_model import open_gguf
from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer
from tiny import file_tensors

SEEDS = 170
GGUF_SEEDS = 30


def run(model: Path, scratch: Path, seeds: range) -> None:
    script = [sys.executable, corrupt_checkpoints.__file__, str(model), str(scratch), *map(str, seeds)]
    done = subprocess.run(script, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"died after {results[-1:]}: {done.stderr[-2000:]}"
    assert [r["seed"] for r in results] == list(seeds)
    wrong = [r for r in results if r["outcome"] != "named"]
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.fixture(scope="module")
def two_shards(tiny_models, tmp_path_factory) -> Path:
    """A model in two files with an index."""
    path = tmp_path_factory.mktemp("two-shards")
    source = tiny_models["qwen3_moe"]
    for file in source.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    tensors = file_tensors(source)
    names, mapping = sorted(tensors), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({n: tensors[n].to(torch.float32) for n in part}, path / name)
        mapping.update(dict.fromkeys(part, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    return path


def test_damaged_safetensors_are_named(two_shards: Path, tmp_path: Path) -> None:
    run(two_shards, tmp_path, range(SEEDS))


def test_damaged_gguf_files_are_named(tiny_models, tmp_path: Path) -> None:
    model = write_gguf(tiny_models["qwen3_moe"], tmp_path / "whole.gguf")
    run(model, tmp_path, range(SEEDS, SEEDS + GGUF_SEEDS))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", lambda path: SafetensorsCheckpoint(path.parent)),
        ("model.gguf", open_gguf),
        ("tokenizer.json", lambda path: Tokenizer.load(path.parent)),
        ("tiktoken.model", lambda path: Tokenizer.load(path.parent)),
    ],
)
def test_a_pointer_of_git_lfs_says_how_to_get_the_file(tmp_path: Path, name: str, read) -> None:
    """`git clone` without git-lfs leaves them, and a second clone would do so again."""
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"{name} is a pointer of git-lfs.*git lfs pull"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("pytorch_model.bin", r"pytorch_model\.bin is not read.*\*\.safetensors"),
        ("model-00001-of-00002.safetensors.incomplete", "is not finished.*fetch the rest"),
        ("readme.md", "is it a model directory"),
    ],
)
def test_a_directory_without_weights_says_what_is_there(tmp_path: Path, there: str, said: str) -> None:
    (tmp_path / there).touch()
    with pytest.raises(CheckpointError, match=said):
        SafetensorsCheckpoint(tmp_path)
