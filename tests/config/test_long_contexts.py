"""What grows with the context beside pages: rotary tables, and what DeepSeek-V4's entries take in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sessions import Session
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import named_config
from tandem.mechanisms.compressed_attention.cost import COMPRESSED_KEY_BYTES, compressed_scratch_bytes
from tandem.mechanisms.compressed_attention.shape import CompressedAttention
from tandem.mechanisms.grouped_query.cost import gqa_scratch_bytes
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.streams.shape import Hyper
from tandem.models import builder
from tandem.spec.gpu_scratch import StepSize
from tandem.spec.model_config import ModelConfig, rope_bytes
from tandem.spec.rope import Rope

LONG = 1 << 20


def v4() -> ModelConfig:
    return named_config("deepseek-v4-flash", None)


@pytest.mark.parametrize(
    "variant", ["laguna", "deepseek_v4", "qwen3_moe-yarn", "glm_moe_dsa", "deepseek_v32", "llama", "gemma4_text"]
)
def test_rotary_tables_are_counted_as_they_are_made(tiny_models, monkeypatch, variant) -> None:
    made, make = [], builder.rope_table
    monkeypatch.setattr(builder, "rope_table", lambda rope, positions: made.append(make(rope, positions)) or made[-1])
    config = Session(tiny_models[variant]).config
    assert sum(t.cos.nbytes + t.sin.nbytes for t in made) == rope_bytes(config, len(made[0].cos))


def test_the_positions_are_the_least_of_layers_that_look_back(tiny_models) -> None:
    """A layer with a window turns as well at any position; the others' YaRN stretches as far as it says."""
    keys = {
        "model_type": "laguna", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99,
        "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
        "intermediate_size": 64, "moe_intermediate_size": 64, "rms_norm_eps": 1e-6, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0,
                               "original_max_position_embeddings": 128},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        },
    }  # fmt: skip
    assert config_from_dict(keys).max_positions == 1024
    assert config_from_dict(keys | {"layer_types": ["sliding_attention"] * 3}).max_positions == 128


def test_entries_of_long_contexts_are_counted() -> None:
    """Places of each sequence's entries, and a row's products with the index once they are more than a piece."""
    kinds = {mixer for mixer in v4().mixers if isinstance(mixer, CompressedAttention)}
    for shape in kinds:
        sizes = [compressed_scratch_bytes(shape, StepSize(1, n, 8)) for n in (1 << 14, 1 << 17, LONG)]
        if shape.compression is None:
            assert len(set(sizes)) == 1
            continue
        assert sizes[0] < sizes[1] < sizes[2]
        entries, index = LONG // shape.compression.stride, shape.compression.index
        if index is not None:
            places = 3 * torch.empty((8, entries), dtype=torch.int64).nbytes
            products = 3 * torch.empty((1, index.heads + index.dim, entries)).nbytes
            assert sizes[2] > 9 * COMPRESSED_KEY_BYTES + places + products - 3 * COMPRESSED_KEY_BYTES


def test_matrices_of_streams_are_counted_as_they_are_packed() -> None:
    hyper = Hyper(4, 20, 1e-6, 1e-6)
    assert (hyper.weights, hyper.matrix_bytes(4096, 2)) == (24, 4 * 32 * 4 * 4096)
    model = v4()
    without = replace(
        model,
        layers=tuple(
            replace(layer, blocks=tuple(replace(b, hyper=None) for b in layer.blocks)) for layer in model.layers
        ),
    )
    more = model.dense_bytes("bfloat16") - without.dense_bytes("bfloat16")
    assert more == 2 * len(model.layers) * hyper.matrix_bytes(model.hidden, 2)


def test_gathered_keys_of_fp8_are_there_beside_those_of_bfloat16() -> None:
    """Of a piece of 32,768 tokens, keys or values at a time."""
    mixer, step = Gqa(32, 4, 128, Rope(1e4, 128)), StepSize(8192, 32768, 1)
    more = gqa_scratch_bytes(replace(mixer, cached="float8_e4m3fn"), step) - gqa_scratch_bytes(mixer, step)
    assert more == 32768 * 4 * 128


def test_results_of_a_long_step_are_there_twice() -> None:
    """Pieces of its rows wait for each other and are put together."""
    mixer, rows = Gqa(32, 4, 128, Rope(1e4, 128)), 1 << 20
    assert gqa_scratch_bytes(mixer, StepSize(rows, rows, 1)) == 2 * rows * 32 * 128 * 2
