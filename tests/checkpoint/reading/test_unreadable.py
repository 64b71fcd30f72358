"""Files that cannot be read say which, and why: no permission is no damage, and an adapter is no model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import finish, write_gguf
from tandem.checkpoint import load_model_config, open_checkpoint, read_generation, resolve_model
from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer

NOBODY = 65534


@pytest.fixture
def model(tiny_models) -> Iterator[Path]:
    """In a folder that everybody may enter, which a test's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    folder.chmod(0o755)
    yield shutil.copytree(tiny_models["qwen3_moe"], folder / "model")
    shutil.rmtree(folder)


@contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """Nobody else's to read. Root may read everything, so it becomes another user meanwhile."""
    before, root = path.stat().st_mode, os.geteuid() == 0
    path.chmod(0o700 if path.is_dir() and root else 0o600 if root else 0)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        path.chmod(before)


READ = {
    "config.json": load_model_config,
    "generation_config.json": read_generation,
    "model.safetensors": open_checkpoint,
    "tokenizer.json": Tokenizer.load,
    "tokenizer_config.json": Tokenizer.load,
}


@pytest.mark.parametrize("name", READ)
def test_a_file_of_another_user_is_no_damaged_one(model, name):
    with forbidden(model / name), pytest.raises(CheckpointError) as caught:
        READ[name](model)
    said = str(caught.value)
    assert (
        f"{model / name} cannot be read: user" in said
        and "no permission" in said
        and f"chmod -R a+rX {model}" in said
    )
    assert "truncated" not in said and "fetch" not in said and "copy it again" not in said


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tiktoken.model", "chat_template.jinja"])
def test_so_are_the_other_files_of_a_text(model, name):
    if name != "chat_template.jinja":
        (model / "tokenizer.json").unlink()
    for file in ("vocab.json", "merges.txt") if name in ("vocab.json", "merges.txt") else (name,):
        (model / file).write_text("{}" if file == "vocab.json" else "")
    settings = {"tokenizer_class": "TikTokenTokenizer" if name == "tiktoken.model" else "Qwen2Tokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with (
        forbidden(model / name),
        pytest.raises(CheckpointError, match=f"{name} cannot be read: user .* no permission"),
    ):
        Tokenizer.load(model)


def test_an_index_of_another_user(model):
    (model / "model.safetensors.index.json").write_text("{}")
    with (
        forbidden(model / "model.safetensors.index.json"),
        pytest.raises(CheckpointError, match=r"index\.json cannot be read: user"),
    ):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["m.gguf", "sha256-0123"])
def test_a_gguf_file_of_another_user(model, tiny_models, name):
    """Ollama's blobs have no ending."""
    file = write_gguf(tiny_models["qwen3_moe"], model / name)
    with (
        forbidden(file),
        pytest.raises(CheckpointError, match=f"{name} cannot be read: user .* no permission"),
    ):
        load_model_config(resolve_model(file))


@pytest.mark.parametrize("below", ["", "below"])
def test_a_folder_of_another_user(model, below):
    with (
        forbidden(model),
        pytest.raises(CheckpointError, match="cannot be read: user .* no permission.*chmod"),
    ):
        resolve_model(model / below)


# -- what is no model ---


def test_an_adapter_says_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"})
    )
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(
        CheckpointError, match=r"is an adapter \(LoRA\) of Qwen/Qwen3-30B-A3B, .*merge_and_unload\(\)"
    ):
        load_model_config(resolve_model(tmp_path))


def test_a_merged_model_beside_its_adapter_is_one(tiny_models, tmp_path):
    path = shutil.copytree(tiny_models["qwen3_moe"], tmp_path / "merged")
    (path / "adapter_config.json").write_text("{}")
    assert load_model_config(path) == load_model_config(tiny_models["qwen3_moe"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [("adapter", r"an adapter \(LoRA\)"), ("mmproj", "images or sound"), ("imatrix", "statistics")],
)
def test_a_gguf_file_that_is_no_model_says_what_it_is(tmp_path, kind, said):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "clip")
    writer.add_type(kind)
    writer.add_tensor("v.patch_embd.weight", np.ones(4, np.float32))
    finish(writer, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=f"m.gguf is .*{said}.*no model"):
        load_model_config(tmp_path / "m.gguf")
