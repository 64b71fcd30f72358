"""Exchanges of experts between a (fake) GPU and CPU memory: after each step every expert is in one place, with its own
bytes, whatever copies do; and what live placement does between steps."""

from __future__ import annotations

import itertools
import logging
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernel_cases as cases
from fake_copies import FakeCopies, FakeSlots
from tandem.errors import KernelError
from tandem.experts.live_exchange import LiveExchange, LiveLayer, Settled
from tandem.experts.live_experts import GIVE_UP, HITS_PER_EXCHANGE, LiveExperts
from tandem.experts.live_policy import Exchange, LivePolicy, PolicySettings
from tandem.experts.usage import UsageTotals
from tandem.kernels.packed_experts import PackedExperts

EXPERTS, HIDDEN, WIDTH, ON_GPU = 7, 48, 32, 3
PLENTY = 1 << 40


@cache
def static(seed: int) -> PackedExperts:
    """All experts of a layer in CPU memory, where they never move."""
    g = torch.Generator().manual_seed(seed)
    layer = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, "int4")
    for expert in range(EXPERTS):
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        layer.load(expert, *(torch.randn(shape, generator=g) for shape in shapes))
    return layer


class Layer:
    """One MoE layer, its first experts on the fake GPU."""

    def __init__(self, seed: int, on_gpu: int = ON_GPU) -> None:
        self.static = static(seed)
        self.bytes = [self.static.packed(expert) for expert in range(EXPERTS)]
        places = min(EXPERTS, EXPERTS - on_gpu + 1)
        self.cpu = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, "int4", places=places)
        for expert in range(on_gpu, EXPERTS):
            self.cpu.load_packed(expert, self.bytes[expert])
        slot_of = torch.tensor([e if e < on_gpu else -1 for e in range(EXPERTS)])
        self.gpu = FakeSlots(slot_of, self.cpu, self.bytes)

    def check(self) -> None:
        """Each expert in one place, unchanged; together they compute what the static layer does, to the bit."""
        here = self.gpu.table >= 0
        slots = self.gpu.table[here].tolist()
        assert len(set(slots)) == len(slots)
        assert self.cpu.loaded == EXPERTS - len(slots)
        for expert in range(EXPERTS):
            slot = int(self.gpu.table[expert])
            found = self.gpu.memory[slot] if slot >= 0 else self.cpu.packed(expert)
            assert torch.equal(found, self.bytes[expert]), expert
        self._check_output(here)

    def _check_output(self, here: Tensor) -> None:
        x = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()
        ids, weights = torch.arange(EXPERTS, dtype=torch.int32)[:, None], torch.ones(EXPERTS, 1)
        expected = self.static.forward(x, ids, weights)
        left = torch.where(here[:, None], -1, ids)  # what the hand-off gives the CPU
        assert torch.equal(self.cpu.forward(x, left, weights), expected.where(~here[:, None], 0.0))

    def exchange(self, layer: int, which: int, other: int) -> Exchange:
        there = (self.gpu.table >= 0).nonzero().flatten().tolist()
        elsewhere = (self.gpu.table < 0).nonzero().flatten().tolist()
        leaving = there[which % len(there)]
        return Exchange(layer, int(self.gpu.table[leaving]), leaving, elsewhere[other % len(elsewhere)])


def made(layers: list[Layer], copies: FakeCopies, budget: int = PLENTY, stages: int = 2) -> LiveExchange:
    return LiveExchange([LiveLayer(layer.gpu, layer.cpu) for layer in layers], copies, budget, stages)


def finish(exchange: LiveExchange, copies: FakeCopies) -> Settled:
    """Until nothing is under way; everything that happened."""
    total = Settled()
    for _ in range(1000):
        if not exchange.busy:
            return total
        settled = exchange.advance()
        total.done.extend(settled.done)
        total.dropped.extend(settled.dropped)
        total.stranded.extend(settled.stranded)
        copies.arrive(1.0)
    raise AssertionError("never ends")


@pytest.mark.parametrize("on_gpu", [1, ON_GPU, EXPERTS - 1])
def test_two_experts_change_places(on_gpu: int) -> None:
    layer, copies = Layer(1, on_gpu), FakeCopies()
    wanted = layer.exchange(0, 0, 0)
    exchange = made([layer], copies)
    exchange.add([wanted])
    assert finish(exchange, copies).done == [wanted]
    assert int(layer.gpu.table[wanted.coming]) == wanted.slot and int(layer.gpu.table[wanted.leaving]) == -1
    layer.check()
    assert layer.cpu.loaded == EXPERTS - on_gpu


def test_nothing_changes_before_everything_has_arrived() -> None:
    layer, copies = Layer(1), FakeCopies()
    exchange = made([layer], copies)
    exchange.add([layer.exchange(0, 1, 2)])
    before = layer.gpu.table.clone()
    for share in (0.0, 0.5, 0.0):  # the upload or the download is still missing
        exchange.advance()
        copies.arrive(share)
        assert torch.equal(layer.gpu.table, before)
        layer.check()
    copies.arrive(1.0)
    assert len(exchange.advance().done) == 1
    layer.check()


def test_what_has_arrived_ends_later_unless_others_wait_for_its_memory() -> None:
    layer, copies = Layer(2), FakeCopies()
    exchange = made([layer], copies)
    before = layer.gpu.table.clone()
    exchange.add([layer.exchange(0, 0, 0)])
    exchange.advance(ending=False)
    copies.arrive(1.0)
    assert not exchange.advance(ending=False).done and torch.equal(layer.gpu.table, before)
    assert len(exchange.advance().done) == 1
    crowded = made([layer], copies, stages=1)
    crowded.add([layer.exchange(0, 0, 0), layer.exchange(0, 1, 1)])
    crowded.advance(ending=False)
    copies.arrive(1.0)
    assert len(crowded.advance(ending=False).done) == 1
    layer.check()


def test_no_step_moves_more_than_its_bytes() -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    nbytes = layers[0].cpu.bytes_per_expert
    exchange = made(layers, copies, budget=nbytes // 2)
    exchange.add([layers[0].exchange(0, 0, 0), layers[1].exchange(1, 1, 1), layers[0].exchange(0, 2, 2)])
    done, steps = 0, 0
    while exchange.busy:
        before = copies.bytes
        done += len(exchange.advance().done)
        assert copies.bytes - before <= nbytes // 2 + 2
        copies.arrive(1.0)
        steps += 1
    assert done == 3 and steps >= 3 * 2 * 2
    for layer in layers:
        layer.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "step", "step", "late", "refuse", "fail", "leaving", "slot", "none"]),
        st.integers(0, 1), st.integers(0, 50), st.integers(0, 50), st.sampled_from([0.0, 0.4, 1.0]),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, budget=st.sampled_from([700, 3000, PLENTY]), seed=st.integers(0, 9))
def test_no_expert_is_ever_lost_or_doubled(steps: list[tuple], budget: int, seed: int) -> None:
    """Any exchanges (sensible or not, of one expert twice), any delays, refused and failed copies."""
    layers, copies = [Layer(1), Layer(2)], FakeCopies(seed)
    exchange = made(layers, copies, budget, stages=3)
    asked, settled = 0, 0
    for what, index, which, other, share in steps:
        layer = layers[index]
        if what == "add":
            exchange.add([layer.exchange(index, which, other)])
            asked += 1
        elif what == "none":
            exchange.add([Exchange(index, which % ON_GPU, which % EXPERTS, other % EXPERTS)])
            asked += 1
        elif what == "refuse":
            copies.refuse = not copies.refuse
        elif what == "fail":
            copies.fail()
        elif what in ("leaving", "slot") and not any(each.gpu.fail_at for each in layers):
            layer.gpu.fail_at = what
        else:
            outcome = exchange.advance()
            settled += len(outcome.done) + len(outcome.dropped) + len(outcome.stranded)
            copies.arrive(0.0 if what == "late" else share)
        for each in layers:
            each.check()
    copies.refuse = False
    rest = finish(exchange, copies)
    assert settled + len(rest.done) + len(rest.dropped) + len(rest.stranded) == asked
    for each in layers:
        each.check()


def test_a_lost_slot_ends_the_layers_exchanges_and_loses_no_expert(caplog: pytest.LogCaptureFixture) -> None:
    layer, copies = Layer(1), FakeCopies()
    wanted = layer.exchange(0, 1, 1)
    exchange = made([layer], copies)
    exchange.add([wanted])
    exchange.advance()
    copies.arrive(1.0)
    layer.gpu.fail_at = "slot"
    assert exchange.advance().stranded == [wanted]
    assert "slot 1 of MoE layer 0 on the GPU is lost" in caplog.text
    layer.gpu.fail_at = ""
    layer.check()
    exchange.add([layer.exchange(0, 0, 0)])
    assert len(finish(exchange, copies).dropped) == 1
    layer.check()


def test_an_error_of_the_cpu_side_drops_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, copies = Layer(1), FakeCopies()

    def full(expert: int, packed: Tensor) -> None:
        raise KernelError("no memory")

    monkeypatch.setattr(layer.cpu, "load_packed", full)
    exchange = made([layer], copies)
    exchange.add([layer.exchange(0, 0, 0)])
    assert len(finish(exchange, copies).dropped) == 1
    layer.check()


# -- between steps: counts, policy and exchange together ---


class Usage:
    def __init__(self) -> None:
        self.tokens = torch.zeros(2, EXPERTS, dtype=torch.int64)
        self.on_gpu = torch.zeros(2, EXPERTS, dtype=torch.bool)
        self.swaps = self.swap_rests = 0

    def read(self) -> UsageTotals:
        return UsageTotals(self.tokens.clone(), self.tokens)

    def place(self, on_gpu: Tensor, swaps: int) -> None:
        self.on_gpu = on_gpu
        self.swaps += swaps


def live(
    layers: list[Layer], copies: FakeCopies, usage: Usage, cost: float = 1.0, horizon: float = 100.0
) -> LiveExperts:
    s = PolicySettings(interval_steps=2, dwell_steps=0, bytes_per_step=PLENTY, horizon_tokens=horizon)
    slot_of = torch.stack([layer.gpu.table for layer in layers])
    policy = LivePolicy(slot_of, layers[0].cpu.bytes_per_expert, cost, s)
    return LiveExperts(policy, made(layers, copies, s.bytes_per_step), usage)


def test_what_is_used_comes_to_the_gpu() -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage)
    for _ in range(20):
        usage.tokens[0, [4, 5, 6]] += 3
        usage.tokens[1, [0, 5, 6]] += 3
        experts.after_step(1)
        copies.arrive(0.6)
        for layer in layers:
            layer.check()
    assert usage.on_gpu[0].nonzero().flatten().tolist() == [4, 5, 6]
    assert usage.on_gpu[1].nonzero().flatten().tolist() == [0, 5, 6]
    assert usage.swaps == 5
    for index, layer in enumerate(layers):
        assert torch.equal(layer.gpu.table >= 0, usage.on_gpu[index])


def test_moving_that_does_not_pay_is_paused_and_counted() -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(
        layers, copies, usage, cost=20.0, horizon=1e9
    )  # moves at once, and each costs more than it gains
    for step in range(400):  # every few tokens another expert
        usage.tokens[:, 3 + step // 8 % 4] += 1
        with torch.inference_mode():  # as the engine's steps are
            experts.after_step(1)
        copies.arrive(1.0)
    assert usage.swap_rests > 0
    for layer in layers:
        layer.check()


def moving_with_a_clock(tick: float) -> tuple[float, int]:
    """Cost of an exchange at the end, and exchanges made, where `tick` seconds pass between steps with exchanges and an
    expert is read in 0.5 s."""
    layers, copies, usage, ticks = [Layer(1), Layer(2)], FakeCopies(), Usage(), itertools.count(step=tick)
    s = PolicySettings(interval_steps=2, dwell_steps=0, bytes_per_step=PLENTY, horizon_tokens=100.0)
    policy = LivePolicy(torch.stack([x.gpu.table for x in layers]), layers[0].cpu.bytes_per_expert, 1.0, s)
    exchange = made(layers, copies, s.bytes_per_step)
    experts = LiveExperts(policy, exchange, usage, lambda: 0.5, lambda: next(ticks))
    for step in range(300):
        usage.tokens[:, 3 + step // 16 % 4] += 1
        experts.after_step(1)
        copies.arrive(1.0)
    return policy.cost, usage.swaps


def test_the_time_that_exchanges_take_is_measured_and_weighed() -> None:
    free, cheap = moving_with_a_clock(0.0)
    cost, dear = moving_with_a_clock(5.0)
    assert free == HITS_PER_EXCHANGE and cheap > 0
    assert cost >= HITS_PER_EXCHANGE + 5.0 / 0.5 / 2  # two exchanges at most end together
    assert dear < cheap


def test_moving_that_always_fails_ends_and_fails_no_step(caplog: pytest.LogCaptureFixture) -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    copies.refuse = True
    experts = live(layers, copies, usage)
    with caplog.at_level(logging.WARNING):
        for _ in range(40 * GIVE_UP):
            usage.tokens[:, 4:] += 3
            experts.after_step(1)
    assert experts.resting and usage.swaps == 0
    assert "experts stay where they are" in caplog.text
    for layer in layers:
        layer.check()
