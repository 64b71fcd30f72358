"""Which matrix makes logits: what the files have decides, as in Transformers, and not config.json alone."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import save_file

from sessions import Session, ours, reference, worst
from tiny import file_tensors

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def said_tied(source, path, change=lambda tensors: tensors):
    """A copy whose config.json says that embedding and head are one; change: of its tensors."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = change(file_tensors(path))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "variant", ["qwen3_moe", "granitemoeshared", "gemma4_text-plain", "ernie4_5_moe-layers"]
)
def test_a_stored_head_is_used_though_config_json_says_tied(tiny_models, tmp_path, variant):
    def with_head(tensors):
        head = tensors.get(HEAD, tensors[EMBEDDING].flip(0))
        return tensors | {HEAD: head.contiguous()}

    path = said_tied(tiny_models[variant], tmp_path / variant, with_head)
    assert worst(ours(Session(path)), reference(path)) < 1e-4


def test_a_head_alone_is_the_embedding_too(tiny_models, tmp_path):
    def head_alone(tensors):
        tensors[HEAD] = tensors.pop(EMBEDDING)
        return tensors

    path = said_tied(tiny_models["qwen3_moe-tied"], tmp_path / "tied", head_alone)
    assert worst(ours(Session(path)), reference(tiny_models["qwen3_moe-tied"])) < 1e-4
