"""Families whose layers keep pages alone, through the engine: found prefixes, preemption, and Transformers' answers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from sessions import generated

VARIANTS_OF_FAMILIES = [
    "gpt_oss", "glm4_moe_lite", "dots1-window", "minimax_m2", "hy_v3", "deepseek_v3", "mistral4",
    "ernie4_5_moe", "laguna", "mimo_v2_flash", "gemma4_text", "solar_open", "afmoe", "exaone_moe", "hunyuan_v1_moe",
    "granitemoeshared",
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS_OF_FAMILIES)
def test_found_prefixes_and_preempted_sequences_answer_alike(tiny_models, variant) -> None:
    """Windows of 7 tokens in pages of 4; the second call begins with what the first one left."""
    g = torch.Generator().manual_seed(3)
    path, prompts = tiny_models[variant], torch.randint(256, (3, 30), generator=g).tolist()
    longer = [[*prompt[:26], 7, 8, 9] for prompt in prompts]
    calls = [prompts, longer]
    plain, none, _ = generated(path, calls, disable_radix_cache=True, max_total_tokens=400)
    cached, found, _ = generated(path, calls, max_total_tokens=400)
    tight, _, preempted = generated(
        path, calls, max_total_tokens=72, context_length=64, chunked_prefill_size=8
    )
    assert none == 0 and found >= 3 * 24 and preempted > 0
    assert cached == plain and tight == plain
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        for prompt, answer in zip([*prompts, *longer], plain, strict=True):
            scores = model(torch.tensor([prompt + answer])).logits[0]
            assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
