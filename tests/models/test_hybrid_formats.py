"""Ling 3, GLM-5.3-Flash and Qwen3.8-Flash-Next as published: fp8 in blocks, and experts in nvfp4, of either tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantised_models import CHOICES, save_quantised
from sessions import Session, ours, reference, worst
from tandem.checkpoint import open_checkpoint
from tiny import VARIANTS, TinyModels, settings

SIZES = settings(
    hidden_size=128, moe_intermediate_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4,
    q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=32,
)  # fmt: skip
BLOCKS = {
    "bailing_hybrid": SIZES | settings(qk_rope_head_dim=32, num_local_experts=8, head_dim=32),
    "glm5_next": SIZES | settings(n_routed_experts=8, linear_num_heads=4, linear_head_dim=32, index_n_heads=16,
                                  index_head_dim=128),
    "qwen4_exp": settings(
        hidden_size=128, moe_intermediate_size=128, shared_expert_intermediate_size=128, num_experts=8, head_dim=32,
        num_key_value_heads=4, ple_embed_dim=128, linear_key_head_dim=64, linear_value_head_dim=64, hc_lowrank=128,
    ),
}  # fmt: skip
PLAIN = (
    "b_proj", "weights_proj", "mlp.gate", "conv1d", "A_log", "dt_bias", "compress_gate", "compress_ape", "lm_head",
    "_fn", "_base", "_scale", "embed_tokens", "word_embeddings", "g_proj", "kv_a_proj_with_mqa", "f_a_proj", "f_b_proj",
    "g_a_proj", "g_b_proj", "in_proj_a", "in_proj_b", "shared_expert_gate", "inject_weight", "index_qk_proj",
)  # fmt: skip
"""What stays numbers in published files, or has fewer rows than a block here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> TinyModels:
    for variant, sizes in BLOCKS.items():
        family, changes = VARIANTS[variant]
        VARIANTS[f"{variant}-blocks"] = (family, changes | sizes)
    yield TinyModels(tmp_path_factory.mktemp("blocks"))
    for variant in BLOCKS:
        del VARIANTS[f"{variant}-blocks"]


def _fp8(module: str) -> str | None:
    return None if module.endswith(PLAIN) or "norm" in module or "ngram" in module else "fp8 blocks"


WAYS: dict[str, Callable[[str], str | None]] = {
    "fp8": _fp8, "nvfp4 modelopt": CHOICES["experts nvfp4"], "nvfp4 packed": CHOICES["experts nvfp4 packed"],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", BLOCKS)
def test_stored_codes_are_the_numbers_that_they_stand_for(models, tmp_path: Path, variant: str, way: str) -> None:
    quantised, plain = save_quantised(models[f"{variant}-blocks"], tmp_path, WAYS[way])
    stored = open_checkpoint(quantised).formats()
    assert stored.experts.quantised and (way != "fp8" or stored.dense_codes)
    exact = ours(Session(quantised))
    assert worst(exact, reference(plain)) < 1e-4
    codes = ours(Session(quantised, dense_codes=True, expert_format="stored"))
    assert worst(codes, exact) < 1e-4
