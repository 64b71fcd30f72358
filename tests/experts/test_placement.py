"""Strategies and statistics: which experts go to the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.errors import ConfigError
from tandem.experts.placement import load_counts, place

LAYERS, EXPERTS = 4, 6


def test_uniform_gives_every_layer_the_same_number() -> None:
    assert place("uniform", LAYERS, EXPERTS, 12).gpu_experts.sum(1).tolist() == [3, 3, 3, 3]
    assert place("uniform", LAYERS, EXPERTS, 14).gpu_experts.sum(1).tolist() == [4, 4, 3, 3]


def test_front_loading_fills_layer_after_layer() -> None:
    assert place("front-loading", LAYERS, EXPERTS, 14).gpu_experts.sum(1).tolist() == [6, 6, 2, 0]


def test_random_is_the_same_every_time_and_even() -> None:
    placement = place("random", 40, 100, 1000)
    assert torch.equal(placement.gpu_experts, place("random", 40, 100, 1000).gpu_experts)
    assert placement.total == 1000
    assert placement.gpu_experts.sum(1).min() > 5  # 25 expected, standard deviation 4.3


def test_frequency_takes_the_most_used_of_all_layers() -> None:
    counts = torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS)
    on_gpu = place("frequency", LAYERS, EXPERTS, 8, counts).gpu_experts
    assert on_gpu.flatten().nonzero().flatten().tolist() == list(range(16, 24))


def test_frequency_needs_statistics_of_this_model() -> None:
    with pytest.raises(ConfigError, match="--init-expert-location"):
        place("frequency", LAYERS, EXPERTS, 8)
    with pytest.raises(ConfigError, match=r"\[3, 6\], the model \[4, 6\]"):
        place("frequency", LAYERS, EXPERTS, 8, torch.zeros(3, 6))


@pytest.mark.parametrize("strategy", ["uniform", "random", "front-loading"])
@pytest.mark.parametrize("total", [0, 7, 24, 99])
def test_slots_count_up_within_a_layer(strategy: str, total: int) -> None:
    placement = place(strategy, LAYERS, EXPERTS, total)
    assert placement.total == min(total, LAYERS * EXPERTS)
    for layer in range(LAYERS):
        slots = placement.slots(layer)
        here = slots[placement.gpu_experts[layer]]
        assert here.tolist() == list(range(len(here)))
        assert (slots[~placement.gpu_experts[layer]] == -1).all()


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"logical_count": t}])
def test_statistics_are_summed_over_leading_dimensions(tmp_path: Path, wrap) -> None:
    counts = torch.arange(2 * LAYERS * EXPERTS).view(2, LAYERS, EXPERTS)
    torch.save(wrap(counts), tmp_path / "stats.pt")
    assert torch.equal(load_counts(str(tmp_path / "stats.pt"), LAYERS, EXPERTS), counts.sum(0).double())


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("stored", [torch.zeros(3, 6), {"counts": torch.zeros(4, 6)}, Harmful(), "text"])
def test_wrong_statistics_are_refused_and_never_executed(tmp_path: Path, stored, capsys) -> None:
    torch.save(stored, tmp_path / "stats.pt")
    with pytest.raises(ConfigError, match="--init-expert-location"):
        load_counts(str(tmp_path / "stats.pt"), LAYERS, EXPERTS)
    assert "executed" not in capsys.readouterr().out
