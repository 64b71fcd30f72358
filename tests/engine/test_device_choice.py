"""Rows whose best token is the next one: chosen at once, and as any other way chooses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.logits import DeviceLogits, HostLogits, HostRows, best_of
from tandem.engine.sampling.masks import bits_of
from tandem.engine.sequence import Sequence

CPU, VOCAB = torch.device("cpu"), 50
GREEDY = SamplingSettings(temperature=0.0)
OTHERS = [
    SamplingSettings(temperature=0.0, logprobs=2),
    SamplingSettings(temperature=0.0, logit_bias={3: 50.0}),
    SamplingSettings(temperature=0.0, min_tokens=4),
    SamplingSettings(temperature=0.0, repetition_penalty=1.5),
    SamplingSettings(temperature=0.0, dry_multiplier=1.0),
    SamplingSettings(temperature=1.0),
]


def sequence(params: SamplingSettings) -> Sequence:
    return Sequence("a", 0, [1, 2, 3, 1, 2], params, arrival=1, max_len=20, page_size=4, seed=3)


def rows(count: int) -> np.ndarray:
    """The second has a NaN, the third an infinite logit."""
    made = np.random.default_rng(5).normal(size=(count, VOCAB)).astype(np.float32)
    made[1, 4], made[2, 5] = np.nan, np.inf
    return made


def device_logits(array: np.ndarray) -> DeviceLogits:
    tensor = torch.from_numpy(array)
    return DeviceLogits(tensor, best_of(tensor), HostRows(CPU))


class Untouched:
    """Logits that nobody looks at."""

    def __getattr__(self, name: str):
        raise AssertionError(f"{name} of the logits was asked for")

    def __getitem__(self, rows: object):
        raise AssertionError("rows were fetched")


def test_the_best_of_a_row_needs_no_look_at_it() -> None:
    array, order = rows(6), [5, 1, 0, 2, 4]
    best = best_of(torch.from_numpy(array))
    made = DeviceLogits(Untouched(), best, HostRows(CPU))  # type: ignore[arg-type]
    sequences = [sequence(GREEDY) for _ in order]
    assert made.chosen(order, sequences, ()) == HostLogits(array).chosen(order, sequences, ())
    assert [each.token_id for each in made.chosen([1, 2], sequences[:2], ())] == [-1, -1]


@pytest.mark.parametrize("params", OTHERS, ids=str)
def test_other_rows_are_looked_at(params: SamplingSettings) -> None:
    """Alone, and among rows whose best is taken; a mask is heeded, too."""
    array = rows(5)
    for asked in ([params], [GREEDY, params], [params, GREEDY, GREEDY]):
        sequences, places = [sequence(each) for each in asked], [0, 3, 4][: len(asked)]
        found = device_logits(array).chosen(places, sequences, (7,))
        assert [each.token_id for each in found] == [
            each.token_id for each in HostLogits(array).chosen(places, sequences, (7,))
        ]
    masks = [bits_of({8, 9}, VOCAB)]
    assert device_logits(array).chosen([0], [sequence(GREEDY)], (), masks)[0].token_id in {8, 9}
