"""Operations of attention against sums over every row and every key that it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.bench.architectures import named_config
from tandem.mechanisms.cost import pairs
from tandem.mechanisms.grouped_query.shape import Gqa, Values
from tandem.mechanisms.latent.shape import Latent
from tandem.planner.forecast.attention import attention_flops
from tandem.spec.layers import Block, Layer
from tandem.spec.model_config import ModelConfig

SPANS = [(1, 0), (1, 40), (7, 0), (16, 24), (30, 3), (5, 100)]  # rows, tokens before them


def of_one_layer(name: str, **changes: object) -> tuple[ModelConfig, Gqa | Latent]:
    """The model's last layer alone, whose mixer has `changes`."""
    model = named_config(name, None)
    mixer = model.mixers[-1]
    assert isinstance(mixer, Gqa | Latent)
    changed = replace(mixer, **changes)
    block = next(block for block in model.layers[-1].blocks if block.body is mixer)
    assert isinstance(block, Block)
    return replace(model, layers=(Layer((replace(block, body=changed),)),)), changed


@pytest.mark.parametrize(("rows", "before"), SPANS)
@pytest.mark.parametrize("window", [0, 1, 8, 1000])
def test_windows(rows: int, before: int, window: int) -> None:
    model, mixer = of_one_layer("qwen3-30b-a3b", window=window, values=Values(dim=96))
    assert isinstance(mixer, Gqa)
    seen = sum(min(before + i + 1, window or before + rows) for i in range(rows))
    channels = mixer.heads * (128 + 96)
    assert attention_flops(model, rows, before, True) == pytest.approx(2 * channels * seen)


@pytest.mark.parametrize(("rows", "before"), SPANS)
@pytest.mark.parametrize("per_head", [False, True])
def test_latents(rows: int, before: int, per_head: bool) -> None:
    model, mixer = of_one_layer("deepseek-v3", index=None)
    assert isinstance(mixer, Latent)
    channels = 128 + 64 + 128 if per_head else 512 + 64 + 512
    seen = sum(before + i + 1 for i in range(rows))
    assert attention_flops(model, rows, before, per_head) == pytest.approx(2 * mixer.heads * channels * seen)


@pytest.mark.parametrize(("rows", "before"), SPANS)
@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_latents_that_choose(rows: int, before: int, budget: int) -> None:
    """Rows that may see everything are as above; the others see `budget` latents, and score all."""
    _, plain = of_one_layer("deepseek-v32")
    assert isinstance(plain, Latent) and plain.index is not None
    index = replace(plain.index, budget=budget, reuse=None)
    model, mixer = of_one_layer("deepseek-v32", index=index)
    expected = 0.0
    for seen in range(before + 1, before + rows + 1):
        channels = 128 + 64 + 128 if seen <= budget else 512 + 64 + 512
        expected += 2 * mixer.heads * channels * min(seen, budget) + 2 * seen * index.heads * index.dim
    assert attention_flops(model, rows, before, True) == pytest.approx(expected)


def test_pairs_are_counted_once() -> None:
    for rows, before in SPANS:
        for most in (1, 4, 25, 500):
            assert pairs(rows, before, most) == sum(min(before + i + 1, most) for i in range(rows))
