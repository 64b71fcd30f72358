"""GGUF files: the same model as the directory they were written from; every block type; broken files are named."""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gguf_files import (
    ARCHITECTURES,
    HALVES,
    QUANTISED_HERE,
    Kind,
    gguf_tensors,
    matrices_as,
    only_f32,
    reordered,
    write_gguf,
)
from tandem.checkpoint import load_model_config, open_checkpoint, resolve_model
from tandem.config import ModelConfig
from tandem.engine.tokenizer import Tokenizer
from tandem.errors import CheckpointError, ConfigError, TandemError
from test_models import Session, ours, prompts, worst
from tiny import save_tokenizer, settings

# All but those with a sliding window, which these architectures' metadata do not have.
VARIANTS = (
    "llama", "llama-bias", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_moe-tied", "glm4_moe", "glm4_moe-plain",
    "olmoe", "olmoe-clip",
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tiny_models, tmp_path_factory):
    """`files(variant)`: the tiny model of that variant as a GGUF file in F32."""
    directory, made = tmp_path_factory.mktemp("gguf"), {}

    def file(variant: str) -> Path:
        if variant not in made:
            made[variant] = write_gguf(tiny_models[variant], directory / f"{variant}.gguf")
        return made[variant]

    return file


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_metadata_says_what_config_json_says(tiny_models, files, variant):
    found, expected = load_model_config(files(variant)), ModelConfig.load(tiny_models[variant])
    assert found.unread_keys == ()
    assert replace(found, unread_keys=()) == replace(expected, unread_keys=(), eos_ids=found.eos_ids)
    assert set(found.eos_ids) == {257}


@pytest.mark.parametrize("variant", VARIANTS)
def test_f32_files_give_the_same_tensors_and_bits(tiny_models, files, variant):
    source, found = open_checkpoint(tiny_models[variant]), open_checkpoint(files(variant))
    assert set(found.names()) == set(source.names())
    for name in source.names():
        assert torch.equal(found.get(name, tuple(source.get(name).shape)), source.get(name)), name
    for a, b in zip(ours(Session(tiny_models[variant])), ours(Session(files(variant))), strict=True):
        assert torch.equal(a, b)


def test_the_tokenizer_and_the_chat_template_come_from_inside(tiny_models, files):
    theirs, found = Tokenizer.load(tiny_models["olmoe"]), Tokenizer.load(files("olmoe"))
    for text in ("Grüße, 42 Äpfel!\n\n x", "<bos>a<eos>"):
        assert found.encode(text) == theirs.encode(text)
        assert found.decode(found.encode(text), skip_special_tokens=False) == text
    assert (found.bos_id, found.eos_ids) == (256, (257,))
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages) == theirs.apply_chat_template(messages) == "user: hi\n"


# -- block types ---

WIDE = settings(
    vocab_size=263, hidden_size=256, num_hidden_layers=1, max_position_embeddings=128, num_experts_per_tok=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, moe_intermediate_size=256,
    intermediate_size=256, norm_topk_prob=True, bos_token_id=256, eos_token_id=257,
)  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A Qwen3-MoE whose rows are whole blocks of every type."""
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **WIDE)).save_pretrained(path)
    save_tokenizer(path)
    return path


def dequantised(file: Path, source: Path) -> dict[str, torch.Tensor]:
    """All weights as the `gguf` package reads them, under Hugging Face's names."""
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(ARCHITECTURES["qwen3_moe"], 1)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in open_checkpoint(source)._parts.items():  # names and shapes only
        stem, dot, rest = name.partition(".experts.")
        index, _, matrix = rest.partition(".")
        renamed = names.get_name(f"{stem}{dot}{matrix}" if dot else name, try_suffixes=(".weight", ".bias"))
        array = stored[renamed][int(index)] if dot else stored[renamed]
        tensors[name] = torch.from_numpy(np.array(array, np.float32)).view(tensor.shape)
    return tensors


@pytest.mark.parametrize("kind", [*QUANTISED_HERE, *HALVES, Kind.F16], ids=lambda kind: kind.name)
def test_every_block_type_gives_the_logits_of_its_weights_in_transformers(wide, tmp_path, kind):
    """The weights as the `gguf` package dequantises them, in Transformers, float32."""
    file = write_gguf(wide, tmp_path / "model.gguf", matrices_as(kind))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(wide))
    reference_dir = tmp_path / "reference"
    shutil.copytree(wide, reference_dir)
    from safetensors.torch import save_file

    save_file(dequantised(file, wide), reference_dir / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(reference_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    assert worst(ours(Session(file)), expected) < 1e-4
    module = "model.layers.0.mlp.experts.3.down_proj"
    assert str(open_checkpoint(file).format(module)) == kind.name.lower()
