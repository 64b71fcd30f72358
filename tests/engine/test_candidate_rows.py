"""Rows whose tokens are chosen together have the tokens that each has alone."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling import on_device
from tandem.engine.sampling.logits import best_of
from tandem.engine.sampling.sampler import Sampled
from tandem.engine.sequence import Sequence


def logits_of(rows: int, vocab: int, seed: int, step: float) -> torch.Tensor:
    """step: between values; 0: hardly any are equal. Some rows have tokens that may not come, some nothing else."""
    made = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    made = (made / step).round() * step if step else made
    made[::7, ::3] = -torch.inf
    made[3, 1:] = -torch.inf
    made[5, 2] = torch.nan
    return made


def sequences_of(params: list[SamplingSettings], count: int) -> list[Sequence]:
    return [
        Sequence("x", i, [3, 4, 5 + i], params[i % len(params)], arrival=0, max_len=100, page_size=16, seed=i)
        for i in range(count)
    ]


def chosen(monkeypatch, logits: torch.Tensor, sequences: list[Sequence], few: int) -> list[Sampled | None]:
    monkeypatch.setattr(on_device, "FEW", few)
    return on_device.choose(lambda rows: logits[rows], best_of(logits).numpy(), sequences)


@pytest.mark.parametrize("step", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("vocab", [6, 40, 900])
def test_rows_together_choose_what_they_choose_alone(monkeypatch, vocab: int, step: float) -> None:
    monkeypatch.setattr(on_device, "CANDIDATES", 40)
    logits = logits_of(60, vocab, 1, step)
    settings = product((0.3, 1.0, 5.0), (-1, 1, 5, 17, 39, 40, 60), (1.0, 0.95, 0.4), (0.0, 0.02, 0.3))
    for temperature, top_k, top_p, min_p in settings:
        params = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sequences = sequences_of([params], len(logits))
        alone = chosen(monkeypatch, logits, sequences, len(logits))
        assert chosen(monkeypatch, logits, sequences, 0) == alone, params


def test_settings_of_all_kinds_in_one_step(monkeypatch) -> None:
    draw, logits = random.Random(3), logits_of(200, 3000, 2, 0.0)
    some = {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "logprobs": 3, "typical_p": 0.9, "xtc_probability": 0.5}
    picked = [{name: value for name, value in some.items() if draw.random() < 0.3} for _ in range(30)]
    params = [SamplingSettings(temperature=draw.choice((0.0, 0.6, 1.0)), **each) for each in picked]
    sequences = sequences_of(params, len(logits))
    alone = chosen(monkeypatch, logits, sequences, len(logits))
    assert chosen(monkeypatch, logits, sequences, 3) == alone
    assert sum(each is None for each in alone) < 40 and alone[5] == Sampled(-1, None)


def test_most_rows_are_decided_together(monkeypatch) -> None:
    logits = logits_of(50, 3000, 4, 0.0)
    sequences = sequences_of([SamplingSettings(temperature=0.7, top_k=20, top_p=0.9)], len(logits))
    alone: list[int] = []
    monkeypatch.setattr(on_device, "_chosen", lambda row, sequence: alone.append(sequence.index))
    found = chosen(monkeypatch, logits, sequences, 3)
    assert not alone and None not in found
    assert [i for i, each in enumerate(found) if each is not None and each.token_id < 0] == [5]
