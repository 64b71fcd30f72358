"""Exchanges of experts between a (fake) GPU and CPU memory: after each step every expert is in one place, with its own
bytes, whatever copies do; and what live placement does between steps."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernel_cases as cases
from fake_copies import COMPUTING, DOWN, UP, FakeCopies, FakeSlots, FakeTables, advance, at_once
from tandem import _core
from tandem.errors import KernelError
from tandem.experts.live_copies import hold_all
from tandem.experts.live_cost import READS_PER_EXCHANGE
from tandem.experts.live_exchange import LiveExchange, LiveLayer, Settled
from tandem.experts.live_experts import GIVE_UP, LiveExperts
from tandem.experts.live_policy import Exchange, LivePolicy, PolicySettings
from tandem.experts.usage import Changes
from tandem.kernels.cpu import WorkerPool, Workspace
from tandem.kernels.packed_experts import PackedExperts

EXPERTS, HIDDEN, WIDTH, ON_GPU = 7, 112, 96, 3  # four pairs of panels of gate and up or down, or three
PLENTY = 1 << 40
PATIENCE = 60.0  # for work after a step that is never cut short here


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

    def __init__(self, seed: int, on_gpu: int = ON_GPU, nodes: tuple[int, ...] = ()) -> None:
        self.static = static(seed)
        self.bytes = [self.static.packed(expert) for expert in range(EXPERTS)]
        places = min(EXPERTS, EXPERTS - on_gpu + 1)
        where = (
            Workspace(WorkerPool([-1, -1], 20, list(nodes)), "scalar")
            if nodes
            else cases.workspace_of("scalar")
        )
        self.cpu = PackedExperts(where, EXPERTS, HIDDEN, WIDTH, "int4", places=places)
        for expert in range(on_gpu, EXPERTS):
            self.cpu.load_packed(expert, self.bytes[expert])
        slot_of = torch.tensor([e if e < on_gpu else -1 for e in range(EXPERTS)])
        self.gpu = FakeSlots(slot_of, self.cpu, self.bytes)

    def check(self, under_way: bool = False) -> None:
        """Each expert in one place, unchanged; together they compute what the static layer does, to the bit. under_way:
        one may be in CPU memory as well."""
        here = self.gpu.table >= 0
        slots = self.gpu.table[here].tolist()
        assert len(set(slots)) == len(slots)
        assert 0 <= self.cpu.loaded - (EXPERTS - len(slots)) <= under_way
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


def made(
    layers: list[Layer],
    copies: FakeCopies,
    budget: int = PLENTY,
    stages: int = 2,
    tables: FakeTables | None = None,
) -> LiveExchange:
    copies.tables = tables or FakeTables([layer.gpu for layer in layers])
    sides = [LiveLayer(layer.gpu, layer.cpu) for layer in layers]
    return LiveExchange(sides, copies.tables, copies, budget, stages, at_once, tail_seconds=PATIENCE)


def finish(exchange: LiveExchange, copies: FakeCopies) -> Settled:
    """Until nothing is under way; everything that happened."""
    total = Settled()
    for _ in range(1000):
        if not exchange.busy:
            return total
        settled = advance(exchange)
        total.done.extend(settled.done)
        total.dropped.extend(settled.dropped)
        total.stranded.extend(settled.stranded)
        total.ended.extend(settled.ended)
        copies.arrive(1.0)
    raise AssertionError("never ends")


@pytest.mark.parametrize("nodes", [(), (0, 1)])
@pytest.mark.parametrize("on_gpu", [1, ON_GPU, EXPERTS - 1])
def test_two_experts_change_places(on_gpu: int, nodes: tuple[int, ...]) -> None:
    layer, copies = Layer(1, on_gpu, nodes), FakeCopies()
    assert len(layer.cpu.pieces(layer.cpu.place_of(EXPERTS - 1))) == (4 if nodes else 1)
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
        advance(exchange)
        copies.arrive(share)
        assert torch.equal(layer.gpu.table, before)
        layer.check()
    copies.arrive(1.0)
    assert len(advance(exchange).done) == 1
    layer.check()


def test_a_running_step_finds_both_experts_where_its_tables_say() -> None:
    """All of it but one thing may happen beside a step: the coming expert stays in CPU memory until that has ended."""
    layer, copies = Layer(1), FakeCopies()
    copies.prompt = True
    exchange, wanted = made([layer], copies), layer.exchange(0, 1, 1)
    exchange.add([wanted])
    exchange.prepare()
    before, x = layer.gpu.table.clone(), torch.randn(EXPERTS, HIDDEN).bfloat16()
    ids, weights = torch.arange(EXPERTS, dtype=torch.int32)[:, None], torch.ones(EXPERTS, 1)
    left = torch.where(before[:, None] >= 0, -1, ids)
    expected = layer.cpu.forward(x, left, weights)
    exchange.begin()
    assert int(layer.gpu.table[wanted.coming]) == wanted.slot
    assert torch.equal(layer.cpu.forward(x, left, weights), expected)
    assert exchange.bytes_moved == 2 * layer.cpu.bytes_per_expert and exchange.beside_seconds > 0
    assert exchange.end().done == [wanted]
    layer.check()


@pytest.mark.parametrize("pieces", range(7))
def test_what_was_not_done_beside_a_step_is_done_after_it(pieces: int) -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    copies.prompt = True
    exchange = made(layers, copies, stages=4)
    exchange.meanwhile = lambda work: [work.next() for _ in range(pieces)]
    wanted = [layers[0].exchange(0, 0, 0), layers[1].exchange(1, 1, 1)]
    exchange.add(wanted)
    exchange.prepare()
    exchange.begin()
    assert exchange.end().done == wanted and not exchange.busy
    for layer in layers:
        layer.check()


def test_after_a_step_only_so_much_time_is_taken() -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    copies.prompt = True
    exchange = made(layers, copies, stages=4)
    exchange.meanwhile, exchange._tail_seconds = lambda work: None, 0.0
    exchange.add([layers[0].exchange(0, 0, 0), layers[1].exchange(1, 1, 1)])
    exchange.prepare()
    ends = 1
    while not exchange.end().done:
        ends += 1
        for layer in layers:
            layer.check(under_way=True)
    assert ends == 2 + 1 + 2 + 1 + 2 + 1  # begin, look, settle, hide, place, show
    for layer in layers:
        layer.check()


def test_exchanges_of_a_layer_follow_each_other_and_those_of_others_do_not_wait() -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    exchange = made(layers, copies, stages=8)
    first, second, other = (
        layers[0].exchange(0, 0, 0),
        layers[0].exchange(0, 1, 1),
        layers[1].exchange(1, 2, 2),
    )
    exchange.add([first, second, other])
    advance(exchange)
    copies.arrive(1.0)
    assert advance(exchange).done == [first, other]
    copies.arrive(1.0)
    assert advance(exchange).done == [second]
    for layer in layers:
        layer.check()


def test_no_more_exchanges_are_under_way_than_there_is_staging_memory() -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    exchange = made(layers, copies, stages=1)
    exchange.add([layers[0].exchange(0, 0, 0), layers[1].exchange(1, 1, 1)])
    advance(exchange)
    assert copies.bytes == 2 * layers[0].cpu.bytes_per_expert
    copies.arrive(1.0)
    assert len(advance(exchange).done) == 1
    copies.arrive(1.0)
    assert len(advance(exchange).done) == 1
    assert exchange.bytes_moved == 4 * layers[0].cpu.bytes_per_expert


@pytest.mark.parametrize("experts_per_step", [0.3, 1.0, 2.5])
def test_steps_move_their_bytes_on_average(experts_per_step: float) -> None:
    """Whole experts: a step that has given more than its share is followed by some that give nothing."""
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    budget = int(experts_per_step * layers[0].cpu.bytes_per_expert)
    exchange = made(layers, copies, budget, stages=8)
    exchange.add([layers[which].exchange(which, i, i) for i in range(3) for which in range(2)])
    steps = done = 0
    while exchange.busy:
        done += len(advance(exchange).done)
        steps += 1
        assert copies.bytes <= steps * budget + 2 * layers[0].cpu.bytes_per_expert
        copies.arrive(1.0)
    assert done == 6 and steps < 6 * 2 / experts_per_step + 6
    for layer in layers:
        layer.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "step", "step", "late", "refuse", "download", "fail", "publish", "slot", "none"]),
        st.integers(0, 1), st.integers(0, 50), st.integers(0, 50), st.sampled_from([0.0, 0.4, 1.0]),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, budget=st.sampled_from([700, 3000, PLENTY]), seed=st.integers(0, 9))
def test_no_expert_is_ever_lost_or_doubled(steps: list[tuple], budget: int, seed: int) -> None:
    """Any exchanges (sensible or not, of one expert twice), any delays, refused and failed copies."""
    layers, copies = [Layer(1), Layer(2)], FakeCopies(seed)
    tables = FakeTables([layer.gpu for layer in layers])
    exchange = made(layers, copies, budget, 3, tables)
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
        elif what == "download":
            copies.refuse_downloads = not copies.refuse_downloads
        elif what == "publish":
            tables.failing = {which % 3}
        elif what == "slot":
            copies.fail_in_order = True
        else:
            outcome = advance(exchange)
            settled += len(outcome.done) + len(outcome.dropped) + len(outcome.stranded)
            copies.arrive(0.0 if what == "late" else share)
        for each in layers:
            each.check()
    copies.refuse = copies.refuse_downloads = False
    rest = finish(exchange, copies)
    assert settled + len(rest.done) + len(rest.dropped) + len(rest.stranded) == asked
    for each in layers:
        each.check()


def test_a_lost_slot_ends_the_layers_exchanges_and_loses_no_expert(caplog: pytest.LogCaptureFixture) -> None:
    layer, copies = Layer(1), FakeCopies()
    wanted = layer.exchange(0, 1, 1)
    exchange = made([layer], copies)
    exchange.add([wanted])
    advance(exchange)
    copies.arrive(1.0)
    copies.fail_in_order = True
    assert advance(exchange).stranded == [wanted]
    assert "slot 1 of MoE layer 0 on the GPU is lost" in caplog.text
    layer.check()
    exchange.add([layer.exchange(0, 0, 0)])
    assert len(finish(exchange, copies).dropped) == 1
    layer.check()


@pytest.mark.parametrize(("turn", "outcome"), [(0, "dropped"), (1, "stranded")])
def test_tables_that_cannot_be_published_leave_each_expert_in_one_place(turn: int, outcome: str) -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    tables = FakeTables([layer.gpu for layer in layers])
    exchange = made(layers, copies, PLENTY, 4, tables)
    wanted = [layers[0].exchange(0, 0, 0), layers[1].exchange(1, 1, 1)]
    exchange.add(wanted)
    advance(exchange)
    copies.arrive(1.0)
    tables.failing = {turn}
    assert getattr(advance(exchange), outcome) == wanted
    for layer in layers:
        layer.check()
    again = layers[0].exchange(0, 0, 0)
    exchange.add([again])
    assert finish(exchange, copies).done == ([again] if outcome == "dropped" else [])
    layers[0].check()


def test_a_refused_copy_may_be_asked_for_again() -> None:
    layer, copies = Layer(1), FakeCopies()
    exchange = made([layer], copies)
    copies.refuse = True
    exchange.add([layer.exchange(0, 0, 0)])
    assert len(finish(exchange, copies).dropped) == 1
    copies.refuse = False
    exchange.add([layer.exchange(0, 0, 0)])
    assert len(finish(exchange, copies).done) == 1
    layer.check()


def test_a_failed_copy_ends_the_layers_exchanges_for_it_may_still_write(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers, copies = [Layer(1), Layer(2)], FakeCopies()
    exchange = made(layers, copies, stages=4)
    copies.refuse_downloads = True
    exchange.add([layers[0].exchange(0, 0, 0)])
    assert len(finish(exchange, copies).dropped) == 1
    copies.refuse_downloads = False
    exchange.add([layers[0].exchange(0, 1, 1), layers[1].exchange(1, 1, 1)])
    settled = finish(exchange, copies)
    assert [e.layer for e in settled.dropped] == [0] and [e.layer for e in settled.done] == [1]
    assert "no experts move in this layer any more" in caplog.text
    for layer in layers:
        layer.check()


def unreserve(layer: Layer, wanted: Exchange) -> None:
    """The place of the one that leaves."""
    taken = {layer.cpu.place_of(e) for e in range(EXPERTS) if layer.gpu.slot_of[e] < 0}
    (spare,) = set(range(layer.cpu.places)) - taken
    layer.cpu.release(spare)


def forget(layer: Layer, wanted: Exchange) -> None:
    layer.cpu.forget(wanted.coming)


@pytest.mark.parametrize(("harm", "outcome"), [(unreserve, "dropped"), (forget, "done")])
def test_a_layer_whose_places_fail_leaves_the_others_alone(
    harm: Callable[[Layer, Exchange], None], outcome: str
) -> None:
    """What arrives together ends together, but for that one; its layer is ended."""
    layers, copies = [Layer(1), Layer(2), Layer(3)], FakeCopies()
    exchange = made(layers, copies, stages=4)
    wanted = [layer.exchange(i, 1, 1) for i, layer in enumerate(layers)]
    exchange.add(wanted)
    advance(exchange)
    copies.arrive(1.0)
    harm(layers[1], wanted[1])
    settled = advance(exchange)
    assert getattr(settled, outcome)[-1 if outcome == "dropped" else 1] == wanted[1]
    assert settled.ended == [1] and {wanted[0], wanted[2]} <= set(settled.done)
    for layer in layers[::2]:
        layer.check()
    exchange.add([layer.exchange(i, 0, 0) for i, layer in enumerate(layers)])
    assert [e.layer for e in finish(exchange, copies).done] == [0, 2]


def test_moves_of_what_does_not_exist_are_refused() -> None:
    layer, copies = Layer(1), FakeCopies()
    sides = _core.MovingLayers()
    sides.add(layer.cpu.core, layer.gpu.slot_of.numpy(), layer.gpu.address(0), layer.gpu.slots)
    sides.add_none()
    given = sides, copies.functions, (UP, DOWN, COMPUTING), FakeTables([]).copied
    for exchange, why in (((2, 0, 0, 5), "no MoE layer 2"), ((-1, 0, 0, 5), "no MoE layer -1")):
        with pytest.raises(KernelError, match=why):
            _core.ExchangeTurn(*given, [exchange], [0])
    with pytest.raises(KernelError, match="stage"):
        _core.ExchangeTurn(*given, [(0, 0, 0, 5)], [])
    with pytest.raises(KernelError, match="slot_of"):
        sides.add(layer.cpu.core, layer.gpu.slot_of[1:].numpy(), 0, 1)
    wrong = [(1, 0, 0, 5), (0, 0, 0, EXPERTS), (0, 0, -1, 5), (0, 9, 0, 5), (0, -1, 5, 6), (0, 0, 0, 1)]
    turn = _core.ExchangeTurn(*given, wrong, [0] * len(wrong))
    assert turn.run(PATIENCE)
    assert [(index, fate, lost, ended) for index, fate, lost, ended, _ in turn.troubles()] == [
        (index, "dropped", False, False) for index in range(len(wrong))
    ]
    assert turn.bytes_given == 0 and not turn.troubles() and not copies.pending and not turn.next()
    layer.check()


def test_all_memory_of_experts_is_held_for_dma(caplog: pytest.LogCaptureFixture) -> None:
    layers, copies, told = [Layer(1).cpu, Layer(2).cpu], FakeCopies(), []
    hold_all(layers, copies, lambda what, done, total: told.append((what, done, total)))
    sizes = [layer.own_memory()[1] for layer in layers]
    assert copies.held == [layer.own_memory() for layer in layers] and min(sizes) > 0
    assert told == [("registering experts with CUDA", done, sum(sizes)) for done in (sizes[0], sum(sizes))]
    for layer, (address, nbytes) in zip(layers, copies.held, strict=True):
        (piece,) = layer.pieces(layer.place_of(EXPERTS - 1))
        assert address <= piece[1] and piece[1] + piece[2] <= address + nbytes
    hold_all(layers, FakeCopies(holds=sizes[0]))
    assert "no more memory can be locked; experts move more slowly" in caplog.text


# -- between steps: counts, policy and exchange together ---


class Usage:
    def __init__(self) -> None:
        self.counts = torch.zeros(2, EXPERTS, dtype=torch.int64)
        self.on_gpu = torch.zeros(2, EXPERTS, dtype=torch.bool)
        self.on_gpu[:, :ON_GPU] = True
        self.swaps = self.swap_rests = 0
        self.copy = None

    def ask(self) -> Asked:
        return Asked(self.counts, torch.empty(2, EXPERTS, dtype=torch.int64))

    def note(self) -> None: ...

    def moved(self, changes: Changes, swaps: int, now: Asked | None = None) -> None:
        assert now is None or (now.tokens() == self.counts.numpy()).all()
        for layer, expert, here in changes():
            assert self.on_gpu[layer, expert] != here
            self.on_gpu[layer, expert] = here
        self.swaps += swaps


class Asked:
    def __init__(self, counts: Tensor, buffer: Tensor) -> None:
        self._tokens = buffer.copy_(counts)

    def tokens(self) -> np.ndarray:
        return self._tokens.numpy()


def live(
    layers: list[Layer], copies: FakeCopies, usage: Usage, cost: float = 1.0, horizon: float = 100.0
) -> LiveExperts:
    s = PolicySettings(interval_steps=2, dwell_steps=0, bytes_per_step=PLENTY, horizon_tokens=horizon)
    slot_of = torch.stack([layer.gpu.table for layer in layers])
    policy = LivePolicy(slot_of, layers[0].cpu.bytes_per_expert, cost, s)
    return LiveExperts(policy, made(layers, copies, s.bytes_per_step), usage)


def take_a_step(experts: LiveExperts) -> None:
    experts.beside_step()
    experts.after_step(1)


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
        usage.counts[:, 3 + step // 8 % 4] += 1
        with torch.inference_mode():  # as the engine's steps are
            take_a_step(experts)
        copies.arrive(1.0)
    assert usage.swap_rests > 0
    for layer in layers:
        layer.check()


class Timed:
    """Steps with a clock of their own: `tick` seconds pass in whatever is done at a step's begin or end, and an expert
    is read in `read` seconds. Pieces are done beside steps and take what they take, so experts are read far more slowly
    than that, where it is not to count."""

    def __init__(self, tick: float, read: float = 1e9, copies: FakeCopies | None = None) -> None:
        self.layers, self.copies, self.usage = [Layer(1), Layer(2)], copies or FakeCopies(), Usage()
        self.copies.prompt, ticks = True, itertools.count(step=tick)
        s = PolicySettings(interval_steps=2, dwell_steps=0, bytes_per_step=PLENTY, horizon_tokens=100.0)
        slot_of, nbytes = torch.stack([x.gpu.table for x in self.layers]), self.layers[0].cpu.bytes_per_expert
        self.policy, self.works = LivePolicy(slot_of, nbytes, 1.0, s), list[_core.Meanwhile]()
        self.exchange = made(self.layers, self.copies, s.bytes_per_step)
        self.exchange.meanwhile = self.works.append
        self.experts = LiveExperts(self.policy, self.exchange, self.usage, lambda: read, lambda: next(ticks))

    def steps(self, count: int, moving: bool = True) -> Timed:
        for step in range(count):
            self.usage.counts[:, 3 + step // 16 % 4 if moving else 0] += 1
            self.experts.beside_step()
            for work in self.works:
                at_once(work)
            self.works.clear()
            self.experts.after_step(1)
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


def test_what_pieces_take_beyond_their_time_is_weighed() -> None:
    """An exchange begins with two copies in one piece, and places the third."""
    timed = Timed(0.0, 1e-3, SlowCopies()).steps(60)
    times = timed.experts.times()
    assert times.exchanges == timed.usage.swaps > 0
    assert times.waited == times.late >= times.exchanges * 2 * SlowCopies.seconds
    assert times.beside > times.late
    assert timed.policy.cost >= READS_PER_EXCHANGE + 2


def test_what_is_done_after_a_step_is_counted_once() -> None:
    """By the clock of what is done at its end, not among the pieces beside it."""
    timed = Timed(0.0)
    timed.exchange.meanwhile = lambda work: None
    times = timed.steps(40).experts.times()
    assert times.exchanges > 0 and (times.seconds, times.beside, times.waited) == (0.0, 0.0, 0.0)


def test_decisions_are_counted_among_what_is_done_beside_steps() -> None:
    timed = Timed(0.0).steps(2, moving=False)
    assert timed.experts.times().beside == 0.0
    times = timed.steps(1, moving=False).experts.times()
    assert times.exchanges == 0 and times.beside > 0.0


@pytest.mark.parametrize("over", [False, True])
def test_what_the_gpu_computes_beside_costs_nothing(over: bool) -> None:
    """Only what begins with a step is then counted, for nobody knows when its first layer asks: looking, too, which
    happens once for every time that is decided."""
    layers, copies, usage, ticks = [Layer(1), Layer(2)], FakeCopies(), Usage(), itertools.count()
    policy = live(layers, copies, usage)._policy
    experts = LiveExperts(policy, made(layers, copies), usage, lambda: 1e9, lambda: next(ticks))
    for step in range(60):
        usage.counts[:, 3 + step // 8 % 4] += 3
        experts.beside_step()
        experts.after_step(1, lambda: over)
        copies.arrive(1.0)
    times = experts.times()
    assert times.steps == 60 and times.exchanges == usage.swaps > 0
    assert min(times.parts.values()) > 0 and times.seconds == sum(times.parts.values())
    begun = times.parts["begin"] + times.parts["decide"] / 2
    assert times.waited == (times.seconds if over else begun) + times.late


def test_what_was_decided_can_be_finished() -> None:
    """While copies are on their way it waits; each expert is in one place then."""
    layers, copies, usage = [Layer(1), Layer(2)], FakeCopies(), Usage()
    experts = live(layers, copies, usage)
    for _ in range(5):
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
