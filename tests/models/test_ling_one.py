"""Ling 1 (`bailing_moe`), whose code no package has: made of a Granite 3 without its scales; also from GGUF."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gguf_files import write_gguf
from hub_copies import keys_of, ling_one_keys, ling_one_names, plain_names, saved
from sessions import Session, ours, reference, worst
from tandem.architectures.load import config_from_dict
from tandem.checkpoint import load_model_config
from tandem.errors import ConfigError
from tandem.quality.stream import LayerStream, Variant
from tiny import VARIANTS, file_tensors, save_tiny, settings
from windows import some_windows

SIZES = settings(
    num_attention_heads=6, num_key_value_heads=3, num_local_experts=7, intermediate_size=28,
    shared_intermediate_size=56, attention_multiplier=12**-0.5, embedding_multiplier=1.0,
    logits_scaling=1.0, residual_multiplier=1.0, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """The Granite, whose head's columns have length 1; Ling as the hub has it, whose head's columns have others; and
    what llama.cpp's converter makes of it."""
    paths = {name: tmp_path_factory.mktemp("ling") / name for name in ("granite", "hub", "plain")}
    VARIANTS["ling-one"] = ("granitemoeshared", SIZES)
    save_tiny("ling-one", paths["granite"])
    del VARIANTS["ling-one"]
    tensors, keys = dict(file_tensors(paths["granite"])), keys_of(paths["granite"])
    head = tensors["lm_head.weight"]
    unit = tensors | {"lm_head.weight": head / (torch.linalg.vector_norm(head, dim=0) + 1e-7)}
    saved(paths["granite"], unit, keys)
    plain = {new: each for name, tensor in unit.items() for new, each in plain_names(name, tensor).items()}
    saved(paths["hub"], ling_one_names(plain) | {"lm_head.weight": head}, ling_one_keys(keys, True))
    saved(paths["plain"], plain, ling_one_keys(keys) | {"rope_parameters": keys["rope_parameters"]})
    return paths


def test_it_is_the_model_that_it_was_made_of(made) -> None:
    config = load_model_config(made["hub"])
    assert config.unread_keys == () and config.unit_head
    assert worst(ours(Session(made["hub"])), reference(made["granite"])) < 1e-4


def test_a_gguf_file_is_the_same_model(made, tmp_path) -> None:
    """There the head's columns have their length already, and q's and k's rows are in turns."""
    file = write_gguf(made["plain"], tmp_path / "m.gguf")
    assert load_model_config(file).model_type == "bailing_moe" and not load_model_config(file).unit_head
    assert worst(ours(Session(file)), reference(made["granite"])) < 1e-4


@pytest.mark.parametrize("key", ["use_bias", "norm_softmax", "use_qk_norm"])
def test_what_no_ling_one_has_is_refused(made, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = True is not supported"):
        config_from_dict(keys_of(made["hub"]) | {key: True})


def test_kt_quality_ends_as_the_model_does(made) -> None:
    stream = LayerStream(Variant(made["hub"], dtype="float32", threads=1), some_windows())
    _, norm = stream.final_norm()
    assert torch.equal(norm, Session(made["hub"]).model.final_norm)
