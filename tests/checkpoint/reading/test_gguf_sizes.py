"""Integers of GGUF metadata that size something: bounded before anything is made of them, and held against tensors."""

from __future__ import annotations

import re

import pytest

from gguf_files import rewritten, write_gguf
from sessions import Session, ours
from tandem.checkpoint import load_model_config, open_checkpoint, resolve_model
from tandem.errors import CheckpointError, TandemError

HUGE = (1 << 31) - 1


def family(tiny_models, tmp_path, variant="qwen3_moe"):
    return write_gguf(tiny_models[variant], tmp_path / "whole.gguf")


@pytest.mark.parametrize(
    ("variant", "key"),
    [
        ("qwen3_moe", "qwen3moe.block_count"),
        ("qwen2_moe", "qwen2moe.block_count"),
        ("gemma4_text", "gemma4.block_count"),
        ("lfm2_moe", "lfm2moe.block_count"),
        ("granitemoehybrid", "granitehybrid.block_count"),
        ("nemotron_h", "nemotron_h_moe.block_count"),
        ("qwen3_moe", "qwen3moe.attention.head_count"),
        ("qwen3_moe", "qwen3moe.expert_count"),
        ("qwen3_moe", "qwen3moe.embedding_length"),
        ("qwen3_5_moe_text", "qwen35moe.ssm.time_step_rank"),
        ("qwen3_5_moe_text", "qwen35moe.ssm.group_count"),
        ("qwen3_5_moe_text", "qwen35moe.ssm.inner_size"),
        ("kimi_linear", "kimi-linear.kda.head_dim"),
    ],
)
def test_a_huge_one_is_refused_by_its_name(tiny_models, tmp_path, variant, key):
    path = rewritten(family(tiny_models, tmp_path, variant), tmp_path / "m.gguf", {key: HUGE})
    with pytest.raises(TandemError, match=re.escape(key) + f" is {HUGE}, and must be at most"):
        load_model_config(path)


def test_layers_without_blocks_are_refused(tiny_models, tmp_path):
    path = rewritten(
        family(tiny_models, tmp_path, "lfm2_moe"), tmp_path / "m.gguf", {"lfm2moe.block_count": 0}
    )
    with pytest.raises(CheckpointError, match="block_count is 0"):
        load_model_config(path)


def test_a_list_of_rows_is_made_only_where_a_matrix_has_them(tiny_models, tmp_path):
    key = "qwen35moe.ssm.inner_size"
    path = rewritten(family(tiny_models, tmp_path, "qwen3_5_moe_text"), tmp_path / "m.gguf", {key: 1 << 22})
    with pytest.raises(CheckpointError, match=r"implies 4194368 rows of attn_qkv\.weight, which has 160"):
        open_checkpoint(path)


@pytest.mark.parametrize("alignment", [True, 1, 2, 4, 12, 1 << 21])
def test_an_alignment_that_is_none_is_refused(tiny_models, tmp_path, alignment):
    path = rewritten(family(tiny_models, tmp_path), tmp_path / "m.gguf", {"general.alignment": alignment})
    with pytest.raises(
        CheckpointError, match=rf"m\.gguf.*general\.alignment is {alignment}, not a power of two from 8"
    ):
        load_model_config(path)


# -- layers with and without key heads ---


@pytest.mark.parametrize("interval", [True, False])
def test_key_heads_of_each_layer_say_which_layers_attend(tiny_models, tmp_path, interval):
    """Ollama's converter writes them, 0 for recurrent layers."""
    whole = family(tiny_models, tmp_path, "qwen3_5_moe_text")
    changes = {"qwen35moe.attention.head_count_kv": [0, 0, 0, 2]}
    if not interval:
        changes["qwen35moe.full_attention_interval"] = None
    path = rewritten(whole, tmp_path / "m.gguf", changes)
    assert load_model_config(path).layers == load_model_config(whole).layers
    assert all((a == b).all() for a, b in zip(ours(Session(path)), ours(Session(whole)), strict=True))


def test_key_heads_that_differ_are_refused(tiny_models, tmp_path):
    changes = {"qwen35moe.attention.head_count_kv": [0, 2, 0, 4]}
    path = rewritten(family(tiny_models, tmp_path, "qwen3_5_moe_text"), tmp_path / "m.gguf", changes)
    with pytest.raises(CheckpointError, match="head_count_kv differs between layers"):
        load_model_config(path)


# -- draft layers ---

COUNT, DRAFTS = "glm4moe.block_count", "glm4moe.nextn_predict_layers"


def test_a_draft_layer_that_was_taken_away_is_not_missed(tiny_models, tmp_path):
    """Its block is counted, and none of its tensors is there."""
    whole = family(tiny_models, tmp_path, "glm4_moe")
    path = rewritten(whole, tmp_path / "m.gguf", {COUNT: 4, DRAFTS: 1})
    assert load_model_config(path) == load_model_config(whole)
    assert all((a == b).all() for a, b in zip(ours(Session(path)), ours(Session(whole)), strict=True))


def test_a_draft_layer_that_is_named_and_not_counted_takes_no_layer_away(tiny_models, tmp_path):
    whole = family(tiny_models, tmp_path, "glm4_moe")
    path = rewritten(whole, tmp_path / "m.gguf", {DRAFTS: 1})
    assert load_model_config(path) == load_model_config(whole)


def test_a_block_without_tensors_is_refused_with_what_it_may_be(tiny_models, tmp_path):
    path = rewritten(family(tiny_models, tmp_path, "glm4_moe"), tmp_path / "m.gguf", {COUNT: 4})
    with pytest.raises(
        CheckpointError, match=r"block_count is 4, but .* is blk\.2: .*\(MTP\) was taken away.* is 3"
    ):
        load_model_config(path)


# -- directories ---


@pytest.mark.parametrize(
    "beside", ["mmproj-F16.gguf", "Model-mmproj-BF16.gguf", "imatrix.gguf", "m.imatrix.gguf"]
)
def test_what_lies_beside_a_model_is_none(tiny_models, tmp_path, beside):
    whole = family(tiny_models, tmp_path)
    (tmp_path / beside).write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == whole


def test_two_models_in_a_directory_are_named(tiny_models, tmp_path):
    for name in ("a-Q4_K_M.gguf", "b-Q8_0.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"several models: .* a-Q4_K_M\.gguf, b-Q8_0\.gguf$"):
        resolve_model(tmp_path)
