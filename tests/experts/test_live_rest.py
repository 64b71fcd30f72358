"""Live placement at rest: decisions become rare where routing is uniform, and a change of routing is followed soon.

Decisions are counted, and no time is. Shape and rates are those of `test_live_policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.bench.placement.simulation import simulate_live
from tandem.bench.placement.traces import ROUTINGS, TraceShape, expert_counts, generate
from tandem.experts.live.cost import StepCost
from tandem.experts.live.policy import HOME, LivePolicy, PolicySettings
from tandem.experts.placement import ExpertPlacement, place
from tandem.experts.residency import Residency

LAYERS, EXPERTS, TOP_K, CALM = 12, 512, 10, 4000
COST = StepCost(
    expert_bytes=3 * 2048 * 512 * (0.5 + 2 / 32), dram_gbps=130, pcie_gbps=55.4, hbm_gbps=2150,
    gpu_step_seconds=2.27e-3 / 4,
)  # fmt: skip
SETTINGS = PolicySettings()
RESTLESS = replace(SETTINGS, longest_rest=0)


@cache
def trace(routing: str, tokens: int, seed: int) -> Tensor:
    return generate(TraceShape(tokens, LAYERS, EXPERTS, TOP_K), ROUTINGS[routing], seed)


def home(share: float) -> ExpertPlacement:
    return place("uniform", LAYERS, EXPERTS, round(share * LAYERS * EXPERTS), None)


class Follower:
    """A policy that sees a trace, and whose exchanges are made at once."""

    def __init__(self, share: float, settings: PolicySettings = SETTINGS) -> None:
        at_home = home(share)
        slots = torch.stack([at_home.slots(layer) for layer in range(LAYERS)])
        self.policy = LivePolicy(Residency(slots), COST.expert_bytes, COST.reads_per_exchange, settings)
        self.reads, self.exchanges, self.steps = np.zeros(slots.shape, np.int64), 0, 0
        self.home, self.longest = slots >= 0, 0  # who is on the GPU at the start; steps between two decisions at most

    def sees(self, stream: Tensor, until: Callable[[], bool] = lambda: False) -> Follower:
        first = 0
        while first < len(stream) and not until():
            part = stream[first : first + self.policy.interval_steps]
            self.reads = self.reads + expert_counts(part, EXPERTS).numpy()
            self.policy.observe(self.reads, len(part))
            made = self.policy.next_exchanges()
            self.policy.done(*made)
            first += len(part)
            self.exchanges, self.steps = self.exchanges + len(made), self.steps + len(part)
            self.longest = max(self.longest, len(part))
        return self

    def follows(self) -> bool:
        return self.policy.followed != HOME

    def came_home(self) -> bool:
        return self.policy.rests > 0 and torch.equal(self.policy.slot_of >= 0, self.home)


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_uniform_routing_is_seldom_decided_about(share: float, seed: int) -> None:
    """A quarter of the calm steps pass between two decisions, so there are about 4 + 4 ln(192 / 4) of them until an
    interval has 192 steps, after 768, and 17 later ones: 36. Luck may look like a change once, for 20 more."""
    calm = Follower(share).sees(trace("uniform", CALM, seed))
    assert calm.exchanges == 0 and calm.policy.decisions <= 36 + 20
    assert calm.longest == SETTINGS.longest_rest


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("routing", ["zipf", "mild", "steady"])
def test_a_change_of_routing_is_followed_within_a_thousand_steps(routing: str, share: float, seed: int) -> None:
    """However calm it was: the longest interval until the first decision about it, one more that sees what moving
    gains, and what a clear lead takes then."""
    calm = Follower(share).sees(trace("uniform", CALM, seed))
    woken = calm.sees(trace(routing, 1000, seed), until=calm.follows)
    assert woken.follows() and woken.steps <= CALM + 1000
    assert woken.policy.interval_steps <= 16


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("routing", ["zipf", "mild", "steady", "adversarial"])
def test_where_moving_pays_nothing_is_decided_later(routing: str, share: float) -> None:
    """Each exchange is that of a policy which never rests for longer."""
    stream, at_home = trace(routing, 1000, 11), home(share)
    assert simulate_live(stream, at_home, COST, SETTINGS) == simulate_live(stream, at_home, COST, RESTLESS)


def test_the_way_home_takes_no_longer() -> None:
    """It has a decision for each expert of a layer. Only then decisions become rare."""
    stream = torch.cat((trace("zipf", 400, 11), trace("uniform", 3600, 11)))
    soon = {"net_half_life": 64.0, "clear": 3.0, "invested": 0.0}
    resting, restless = (Follower(0.1, replace(each, **soon)) for each in (SETTINGS, RESTLESS))
    for each in (resting, restless):
        each.sees(stream, until=each.came_home)
        assert each.came_home() and each.exchanges > 500
    assert (resting.steps, resting.exchanges) == (restless.steps, restless.exchanges)


def test_steps_that_read_nothing_say_nothing() -> None:
    policy, reads = Follower(0.3).policy, np.zeros((LAYERS, EXPERTS), np.int64)
    for _ in range(40):
        policy.observe(reads, 100)
    assert policy.interval_steps == 4 * SETTINGS.interval_steps
