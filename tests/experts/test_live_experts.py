"""What live placement does between and beside steps: counts, policy and exchange together, and what it takes."""

from __future__ import annotations

import itertools
import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fake_copies import FakeCopies, at_once, piece
from fake_layers import EXPERTS, ON_GPU, PLENTY, Layer, made
from tandem import _core
from tandem.engine.start import gpu_side
from tandem.errors import EngineError
from tandem.experts.live.cost import READS_PER_EXCHANGE
from tandem.experts.live.live_experts import AT_ONCE, GIVE_UP, NOTHING_MOVES, LiveExperts
from tandem.experts.live.policy import LivePolicy, PolicySettings
from tandem.experts.live.virtual import Habits
from tandem.experts.residency import Residency
from tandem.experts.usage.expert_usage import Changes


class Usage:
    def __init__(self) -> None:
        self.counts = torch.zeros(2, EXPERTS, dtype=torch.int64)
        self.gpu_experts = torch.zeros(2, EXPERTS, dtype=torch.bool)
        self.gpu_experts[:, :ON_GPU] = True
        self.swaps = self.swap_rests = 0
        self.copy = None

    def ask(self) -> Asked:
        return Asked(self.counts, torch.empty(2, EXPERTS, dtype=torch.int64))

    def note(self) -> None: ...

    def moved(self, changes: Changes, swaps: int, now: Asked | None = None) -> None:
        assert now is None or (now.reads() == self.counts.numpy()).all()
        for layer, expert, here in changes():
            assert self.gpu_experts[layer, expert] != here
            self.gpu_experts[layer, expert] = here
        self.swaps += swaps


class Asked:
    def __init__(self, counts: Tensor, buffer: Tensor) -> None:
        self._reads = buffer.copy_(counts)

    def reads(self) -> np.ndarray:
        return self._reads.numpy()


def eager(horizon: float = 100.0, touches: float = 1.5, **settings: float) -> PolicySettings:
    """Whoever is ahead is followed at once."""
    habits = Habits(32.0, horizon, spends=1e9, touches=touches)
    at_once = {"clear": 0.0, "invested": 0.0, "worth": 0.0, "least_steps": 0, "spends": 1e9, "dwell_steps": 0}
    at_once |= {"interval_steps": 2}
    return PolicySettings((habits,), bytes_per_step=PLENTY, **(at_once | settings))


def live(
    layers: list[Layer], copies: FakeCopies, usage: Usage, cost: float = 1.0, **settings: float
) -> LiveExperts:
    s = eager(**settings)
    slot_of = torch.stack([layer.gpu.table for layer in layers])
    policy = LivePolicy(Residency(slot_of), layers[0].cpu.bytes_per_expert, cost, s)
    return LiveExperts(policy, made(layers, copies, s.bytes_per_step), usage)


def take_a_step(experts: LiveExperts) -> None:
    experts.beside_step()
    experts.after_step()


def test_what_is_used_comes_to_the_gpu() -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage)
    for _ in range(20):
        usage.counts[0, [4, 5, 6]] += 3
        usage.counts[1, [0, 5, 6]] += 3
        take_a_step(experts)
        copies.arrive(0.6)
        for layer in layers:
            layer.check()
    assert usage.gpu_experts[0].nonzero().flatten().tolist() == [4, 5, 6]
    assert usage.gpu_experts[1].nonzero().flatten().tolist() == [0, 5, 6]
    assert usage.swaps == 5
    for index, layer in enumerate(layers):
        assert torch.equal(layer.gpu.table >= 0, usage.gpu_experts[index])


def test_moving_that_pays_no_longer_goes_home_and_is_counted() -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage, cost=20.0, net_half_life=64.0, touches=3.0)
    home = usage.gpu_experts.clone()
    for step in range(400):  # for long one that is not at home, then those that are
        usage.counts[:, 5 if step < 100 else step % ON_GPU] += 1
        with torch.inference_mode():  # as the engine's steps are
            take_a_step(experts)
        copies.arrive(1.0)
        assert usage.swap_rests == 0 or step >= 100
        if step == 99:
            assert usage.gpu_experts[:, 5].all() and not experts.resting
    assert usage.swap_rests > 0 and experts.resting
    assert torch.equal(usage.gpu_experts, home)
    for layer in layers:
        layer.check()


def test_a_pass_finds_what_it_began_with_and_what_was_under_way_goes_on_after_it() -> None:
    """However much of a batch is done when the pass begins: before and after each piece of it."""
    for pieces in range(40):
        layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
        copies.prompt, works = True, list[_core.Meanwhile]()
        experts = live(layers, copies, usage)
        experts._exchange.between_answers = works.append
        while not experts._exchange.under_way:
            usage.counts[:, [4, 5, 6]] += 3
            take_a_step(experts)
        experts.beside_step()
        done = sum(piece(works[0]) for _ in range(pieces))
        assert experts.settling
        experts.pause()
        works.clear()
        before, swaps = placement_of(layers), usage.swaps
        for _ in range(20):  # steps go on, are counted and decided about
            usage.counts[:, [4, 5, 6]] += 3
            take_a_step(experts)
            assert not any(isinstance(work, _core.ExchangeTurn) for work in works)
            assert placement_of(layers) == before and usage.swaps == swaps
        for layer in layers:
            layer.check(under_way=True)
        experts.resume()
        for _ in range(40):
            usage.counts[:, [4, 5, 6]] += 3
            experts.beside_step()
            for work in works:
                at_once(work)
            works.clear()
            experts.after_step()
        assert [layer.gpu.table[4:].min() >= 0 for layer in layers] == [True, True]
        for layer in layers:
            layer.check()
        if done < pieces:
            return  # all of it was done before
    raise AssertionError("a batch never ends")


def placement_of(layers: list[Layer]) -> list[object]:
    """Tables and slots of the GPU, and where experts are in CPU memory: a pass reads them."""
    places = [[_place(layer, expert) for expert in range(EXPERTS)] for layer in layers]
    return [places, [layer.gpu.table.tolist() for layer in layers], [layer.gpu.memory.sum().item() for layer in layers]]


def _place(layer: Layer, expert: int) -> int:
    try:
        return layer.cpu.cpu_slot_of(expert)
    except ValueError:
        return -1


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, EXPERTS - 1), st.integers(0, 9), st.floats(0, 1), st.integers(0, 9)), max_size=80
    ),
    seed=st.integers(0, 1 << 20),
)
def test_holds_at_any_time_lose_no_expert(steps: list[tuple[int, int, float, int]], seed: int) -> None:
    """Hot experts, pieces of work done beside steps, shares of copies that arrive, passes that begin and end: while one
    is under way nothing that it reads changes, and always each expert is in one place with its own bytes."""
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(seed), Usage()
    works, held = list[_core.Meanwhile](), None
    experts = live(layers, copies, usage, cost=0.5)
    experts._exchange.between_answers = works.append
    for hot, pieces, arrive, turn in steps:
        usage.counts[seed % 2, hot] += 7
        experts.beside_step()
        for work in works:
            [piece(work) for _ in range(pieces)]
        works.clear()
        if turn == 0 and held is None:
            experts.pause()
            held = placement_of(layers)
        experts.after_step()
        if held is not None:
            assert placement_of(layers) == held
        for layer in layers:
            layer.check(under_way=True)
        copies.arrive(arrive)
        if turn == 1 and held is not None:
            experts.resume()
            held = None
    experts.resume()
    copies.prompt = True
    experts.finish()
    for layer in layers:
        layer.check()


class Timed:
    """Steps with a clock of their own: `tick` seconds pass in whatever is done at a step's begin or end, and an expert
    is read in `read` seconds. Pieces are done beside steps and take what they take, so experts are read far more slowly
    than that, where it is not to count."""

    def __init__(self, tick: float, read: float = 1e9, copies: FakeCopies | None = None) -> None:
        self.layers, self.copies, self.usage = [Layer(1), Layer(2)], copies or FakeCopies(), Usage()
        self.waits = True  # the GPU, after each step
        self.copies.prompt, ticks = True, itertools.count(step=tick)
        s = eager()
        slot_of, nbytes = torch.stack([x.gpu.table for x in self.layers]), self.layers[0].cpu.bytes_per_expert
        self.policy, self.works = LivePolicy(Residency(slot_of), nbytes, 1.0, s), list[_core.Meanwhile]()
        self.exchange = made(self.layers, self.copies, s.bytes_per_step)
        self.exchange.between_answers = self.works.append
        self.experts = LiveExperts(self.policy, self.exchange, self.usage, lambda: read, lambda: next(ticks))

    def steps(self, count: int, moving: bool = True) -> Timed:
        for step in range(count):
            self.usage.counts[:, 3 + step // 16 % 4 if moving else 0] += 1
            self.experts.beside_step()
            for work in self.works:
                at_once(work)
            self.works.clear()
            self.experts.after_step(lambda: self.waits)
        return self


def test_the_time_that_exchanges_take_is_measured_and_weighed() -> None:
    free, dear = Timed(0.0).steps(300), Timed(1e10).steps(300)
    assert free.policy.cost == pytest.approx(READS_PER_EXCHANGE) and free.usage.swaps > 0
    assert dear.policy.cost >= READS_PER_EXCHANGE + 10 / 2  # two exchanges at most end together
    assert dear.usage.swaps < free.usage.swaps


def test_looking_is_not_what_exchanges_take() -> None:
    timed = Timed(1e10).steps(40)
    timed.steps(60, moving=False)
    before, swaps = timed.policy.cost, timed.usage.swaps
    timed.steps(100, moving=False)
    assert timed.usage.swaps == swaps > 0 and timed.policy.cost == pytest.approx(before)


class SlowCopies(FakeCopies):
    """The driver returns when they are done, as those of memory that is not registered."""

    seconds = 1e-3

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        time.sleep(self.seconds)
        return super()._copy(target, source, nbytes, stream)


def test_copies_that_take_long_keep_no_post_waiting() -> None:
    """The step's thread makes them while it waits, and another one answers."""
    timed = Timed(0.0, 1e-3, SlowCopies()).steps(60)
    times = timed.experts.times()
    assert times.exchanges == timed.usage.swaps > 0
    copied = times.exchanges * 3 * SlowCopies.seconds
    assert 0 < copied <= times.overlapped_seconds - times.overrun_seconds  # no post waited for any of them


def test_what_is_done_after_a_step_is_counted_once() -> None:
    """By the clock of what is done at its end, not among the pieces beside it."""
    timed = Timed(0.0)
    timed.exchange.between_answers = lambda work: None
    times = timed.steps(40).experts.times()
    assert times.exchanges > 0 and (times.seconds, times.overlapped_seconds, times.waited) == (0.0, 0.0, 0.0)


def test_decisions_are_counted_among_what_is_done_beside_steps() -> None:
    timed = Timed(0.0).steps(3, moving=False)  # counts are asked for after two, and looked at after one more
    assert timed.experts.times().overlapped_seconds == 0.0
    times = timed.steps(1, moving=False).experts.times()
    assert times.exchanges == 0 and times.overlapped_seconds > 0.0


@pytest.mark.parametrize("over", [False, True])
def test_what_the_gpu_computes_beside_costs_nothing(over: bool) -> None:
    """Only what is given to a step that was started is then counted, for nobody knows when its first layer asks."""
    layers, copies, usage, ticks = [Layer(1), Layer(2)], FakeCopies(), Usage(), itertools.count()
    policy = live(layers, copies, usage)._policy
    experts = LiveExperts(policy, made(layers, copies), usage, lambda: 1e9, lambda: next(ticks))
    for step in range(60):
        usage.counts[:, 3 + step // 8 % 4] += 3
        experts.beside_step()
        experts.after_step(lambda: over)
        copies.arrive(1.0)
    times = experts.times()
    assert times.steps == 60 and times.exchanges == usage.swaps > 0
    assert min(times.parts.values()) > 0 and times.seconds == sum(times.parts.values())
    begun = times.parts["begin"] + times.parts["give"]
    assert times.waited == (times.seconds if over else begun) + times.overrun_seconds
    assert times.hidden == (0 if over else times.seconds - begun) and (times.put_off > 0) == over


@pytest.mark.parametrize("waits", ["never", "always", "in turn", "after a while"])
def test_a_step_waits_for_one_job_and_all_jobs_are_done_in_the_end(waits: str) -> None:
    """A job begins only while the GPU computes, but for the first, what counts, and what arrives. Whether it always
    waits or never does, experts come that are used, and each is in one place."""
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts, jobs, queries = live(layers, copies, usage), list[str](), itertools.count()
    guarded, copies.prompt = experts._guarded, True

    def noting(part: str, *rest: Any) -> bool:
        jobs.append(part)
        return guarded(part, *rest)

    def over() -> bool:
        number = next(queries)
        return {"never": False, "always": True, "in turn": number % 2 == 0}.get(waits, number % 3 == 2)

    experts._guarded = noting  # type: ignore[method-assign]
    for step in range(120):
        usage.counts[:, [4, 5, 6]] += 3
        experts.beside_step()
        jobs.clear()
        before = experts.times().put_off
        experts.after_step(over)
        others = [job for job in jobs if job not in AT_ONCE]
        assert waits != "always" or len(others) <= 1
        assert waits != "never" or experts.times().put_off == 0
        assert experts.times().put_off - before <= 1
        for layer in layers:
            layer.check(under_way=True)
        assert step < 80 or usage.gpu_experts[:, [4, 5, 6]].all()
    assert usage.swaps == 6


@pytest.mark.parametrize("waits", [False, True])
def test_counts_of_a_step_say_where_experts_were_in_it(waits: bool) -> None:
    """An exchange ends with the counts of the steps before, and with no later ones, however long jobs were put off."""
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage, interval_steps=4)
    moved, asked, copies.prompt = usage.moved, list[int](), True

    def noting(changes: Changes, swaps: int, now: Asked | None = None) -> None:
        asked.append(0 if now is None else int(now.reads().sum()))
        assert asked[-1] in (0, int(usage.counts.sum()))
        moved(changes, swaps, now)

    usage.moved = noting  # type: ignore[method-assign]
    for step in range(200):
        usage.counts[:, 3 + step // 16 % 4] += 3
        experts.beside_step()
        experts.after_step(lambda: waits)
    assert usage.swaps > 10 and (waits or all(asked[1:]))  # counts that a decision wants, too, are asked for once


def test_a_step_without_anything_to_do_looks_for_nothing() -> None:
    """Counted in calm steps: how often counts are asked for, and jobs are looked for. A decision has three such steps:
    one asks, one looks, one decides."""
    timed, asked, looked = Timed(0.0), list[int](), list[int]()
    jobs, ask = timed.experts._jobs, timed.usage.ask

    def noting(times: list[int], action: Any) -> Any:
        return lambda: times.append(timed.experts.times().steps) or action()  # type: ignore[func-returns-value]

    timed.experts._jobs = noting(looked, jobs)  # type: ignore[method-assign]
    timed.usage.ask = noting(asked, ask)  # type: ignore[method-assign]
    timed.steps(3000, moving=False)
    assert timed.usage.swaps == 0 and timed.experts.times().steps == 3000
    assert 0 < len(asked) <= 60 and len(looked) <= 3 * len(asked) + 1
    assert timed.steps(1000).usage.swaps > 0


def test_a_missing_package_keeps_experts_where_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Moving is the default: what it alone needs is no reason to end a start."""

    def missing(device: object) -> None:
        raise EngineError("moving experts needs cuda-bindings")

    monkeypatch.setattr(gpu_side, "CudaCopies", missing)
    hybrid = SimpleNamespace(sides=object())
    side = SimpleNamespace(store=SimpleNamespace(tables=object()), hybrids=[hybrid], ops=SimpleNamespace(device=None))
    plan = SimpleNamespace(gpu=SimpleNamespace(live=True))
    assert gpu_side.live_experts(cast(Any, plan), cast(Any, side), Usage()) is None
    assert "experts stay where they are: moving experts needs cuda-bindings" in caplog.text


def test_moving_that_has_failed_costs_no_step_anything() -> None:
    timed = Timed(0.0)
    timed.policy.look = None  # type: ignore[method-assign,assignment]
    timed.steps(20)
    assert timed.experts.resting
    timed.experts._jobs = None  # type: ignore[method-assign,assignment]
    assert timed.steps(20).experts.times().steps == 40
    assert timed.experts.moves() == NOTHING_MOVES
    timed.experts._exchange = cast(Any, SimpleNamespace(under_way=True, moves=lambda: None))
    assert timed.experts.moves() is None  # what was under way may go on: who is where is looked up each time


def test_what_was_decided_can_be_finished() -> None:
    """While copies are on their way it waits; each expert is in one place then."""
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage)
    while not experts._exchange.busy:
        usage.counts[:, [4, 5, 6]] += 3
        take_a_step(experts)
    copies.prompt = True
    experts.finish()
    assert usage.swaps > 0 and not experts._exchange.busy
    before = usage.swaps
    experts.beside_step()
    experts.finish()
    assert usage.swaps == before
    for layer in layers:
        layer.check()


def test_a_lost_layer_is_not_proposed_again_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage)
    for step in range(40 * GIVE_UP):
        usage.counts[0, 4:] += 3
        copies.refuse_downloads = step < 20
        if step >= 20:
            usage.counts[1, 3 + step // 20 % 4] += 9
        take_a_step(experts)
        copies.arrive(1.0)
    assert not experts.resting and usage.swaps > 40
    assert caplog.text.count("of MoE layer 0 stay") == 1
    for layer in layers:
        layer.check()


def test_moving_that_always_fails_ends_and_fails_no_step(caplog: pytest.LogCaptureFixture) -> None:
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    copies.refuse = True
    experts = live(layers, copies, usage)
    with caplog.at_level(logging.WARNING):
        for _ in range(40 * GIVE_UP):
            usage.counts[:, 4:] += 3
            take_a_step(experts)
    assert experts.resting and usage.swaps == 0
    assert "experts stay where they are" in caplog.text
    for layer in layers:
        layer.check()
