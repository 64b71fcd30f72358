"""GGUF's `deepseek2`: DeepSeek-V2, V3 and Kimi-K2, with kv_b whole (older files) and divided (newer ones)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from gguf_files import Kind, matrices_as, write_gguf
from sessions import Session, ours, reference, rms, worst
from tandem import LLM, SamplingParams, _core
from tandem.architectures.load import load_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.kernels.cpu_ops import CpuOps
from tandem.spec.layers import Layer
from tandem.spec.model_config import STORED, ModelConfig
from tiny import VARIANTS, save_tiny, settings


def yarn(mscale: float) -> dict[str, object]:
    """Both scales alike, as in every model of DeepSeek's: the file has one of them."""
    return settings(rope_type="yarn", rope_theta=3000.0, factor=4.0, mscale=mscale, mscale_all_dim=mscale,
                    original_max_position_embeddings=32, beta_fast=32, beta_slow=1)  # fmt: skip


MADE = {
    "deepseek_v3-file": ("deepseek_v3", settings(rope_parameters=yarn(1.0))),
    "deepseek_v2-file": ("deepseek_v2", settings(rope_parameters=yarn(0.707))),
    "deepseek_v2-greedy": ("deepseek_v2-greedy", settings()),
    "deepseek_v3-blocks": ("deepseek_v3", settings(  # rows of whole blocks of 32
        hidden_size=128, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=64, intermediate_size=96,
        rope_parameters=yarn(1.0),
    )),
}  # fmt: skip
LIKE_TRAINED = ("deepseek_v3-file", "deepseek_v2-file", "deepseek_v2-greedy")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models(name)`: a directory."""
    base = tmp_path_factory.mktemp("deepseek")

    def get(name: str) -> Path:
        if not (base / name).exists():
            like, changes = MADE[name]
            family, others = VARIANTS[like]
            kept, VARIANTS[name] = VARIANTS.get(name), (family, others | changes)
            save_tiny(name, base / name)
            VARIANTS.pop(name)
            if kept is not None:
                VARIANTS[name] = kept
        return base / name

    return get


def without_factor(config: ModelConfig, eos: tuple[int, ...]) -> ModelConfig:
    attention = replace(config.mixers[0], softmax_factor=1.0)
    layers = [Layer((replace(layer.blocks[0], body=attention), *layer.blocks[1:])) for layer in config.layers]
    return replace(config, layers=tuple(layers), unread_keys=(), eos_ids=eos)


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole"])
@pytest.mark.parametrize("name", LIKE_TRAINED)
def test_the_metadata_says_what_config_json_says(models, tmp_path, name, whole) -> None:
    found = load_model_config(write_gguf(models(name), tmp_path / "m.gguf", whole=whole))
    expected = load_config(models(name))
    assert without_factor(found, ()) == without_factor(expected, ())
    theirs, mine = expected.mixers[0].softmax_factor, found.mixers[0].softmax_factor
    assert mine == pytest.approx(theirs, rel=1e-6)  # a float32 of it is stored


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole"])
@pytest.mark.parametrize("name", LIKE_TRAINED)
def test_the_model_is_that_of_the_directory(models, tmp_path, name, whole) -> None:
    file = write_gguf(models(name), tmp_path / "m.gguf", whole=whole)
    names = set(open_checkpoint(file).names())
    assert ("model.layers.0.self_attn.kv_b_proj.weight" in names) == whole
    found, expected = ours(Session(file)), ours(Session(models(name)))
    if "greedy" in name:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert worst(found, expected) < 1e-5
    assert worst(found, reference(models(name))) < 1e-4


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole"])
def test_blocks_are_computed_as_they_are_stored(models, tmp_path, whole) -> None:
    """As it is served. Q8_0: no further off than bfloat16 is from the same numbers."""
    file = write_gguf(
        models("deepseek_v3-blocks"), tmp_path / "m.gguf", matrices_as(Kind.Q8_0), whole=whole
    )
    checkpoint = open_checkpoint(file)
    assert checkpoint.formats().experts.name == "q8_0"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for stem in ("kv_b",) if whole else ("k_b", "v_b"):
        tensor = stored[f"blk.1.attn_{stem}.weight"]
        numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).flatten(0, -2)
        assert torch.equal(checkpoint.get(f"model.layers.1.self_attn.{stem}_proj.weight"), numbers)
    ops = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    exact = ours(Session(file))
    codes = Session(file, "bfloat16", ops=ops, expert_format=STORED, dense_codes=True)
    assert rms(ours(codes), exact) < 1.5 * rms(ours(Session(file, "bfloat16", ops=ops)), exact)


def test_a_file_is_served_alone(models, tmp_path) -> None:
    file = write_gguf(models("deepseek_v3-file"), tmp_path / "m.gguf")
    [answer] = LLM(str(file), max_total_tokens=256).generate(
        ["hi"], SamplingParams(max_tokens=5, temperature=0.0)
    )
    assert 1 <= len(answer.token_ids) <= 5


def test_experts_of_a_file_beside_the_originals_dense_layers(models, tmp_path) -> None:
    """`--kt-weight-path FILE.gguf`."""
    source = models("deepseek_v3-file")
    file = write_gguf(source, tmp_path / "m.gguf")
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answers = [
        LLM(str(source), dtype="float32", max_total_tokens=128, **flags).generate(["hi"], greedy)[0].token_ids
        for flags in ({}, {"kt_weight_path": str(file)})
    ]
    assert answers[0] == answers[1]
