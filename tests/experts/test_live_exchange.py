"""Exchanges of experts between a (fake) GPU and CPU memory: after each step every expert is in one place, with its own
bytes, whatever copies do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_copies import COMPUTING, DOWN, UP, FakeCopies, FakeTables, advance, piece
from fake_layers import EXPERTS, HIDDEN, ON_GPU, PATIENCE, PLENTY, Layer, made
from tandem import _core
from tandem.errors import KernelError
from tandem.experts.live.copies import hold_all
from tandem.experts.live.exchange import ExchangeOutcome, LiveExchange
from tandem.experts.live.virtual import Exchange
from tandem.experts.residency import Location, Residency


def finish(exchange: LiveExchange, copies: FakeCopies) -> ExchangeOutcome:
    """Until nothing is under way; everything that happened."""
    total = ExchangeOutcome()
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
    assert len(layer.cpu.pieces(layer.cpu.cpu_slot_of(EXPERTS - 1))) == (4 if nodes else 1)
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
    exchange = made(layers, copies, buffers=4)
    exchange.between_answers = lambda work: [piece(work) for _ in range(pieces)]
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
    exchange = made(layers, copies, buffers=4)
    exchange.between_answers, exchange._tail_seconds = lambda work: None, 0.0
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
    exchange = made(layers, copies, buffers=8)
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
    exchange = made(layers, copies, buffers=1)
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
    exchange = made(layers, copies, budget, buffers=8)
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
        st.sampled_from([
            "add", "step", "step", "late", "refuse", "download", "fail", "publish", "slot", "none", "load", "drop",
        ]),
        st.integers(0, 1), st.integers(0, 50), st.integers(0, 50), st.sampled_from([0.0, 0.4, 1.0]),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, budget=st.sampled_from([700, 3000, PLENTY]), seed=st.integers(0, 9))
def test_no_expert_is_ever_lost_or_doubled(steps: list[tuple], budget: int, seed: int) -> None:
    """Any exchanges (sensible or not, of one expert twice), any delays, refused and failed copies; and experts that go
    to their file and come back. Whoever follows what has settled knows where each is: on the GPU, in CPU memory, or in
    its file, never in two of them."""
    layers, copies = [Layer(1), Layer(2)], FakeCopies(seed)
    tables = FakeTables([layer.gpu for layer in layers])
    exchange = made(layers, copies, budget, 3, tables)
    places = Residency(torch.stack([layer.gpu.table for layer in layers]))
    asked, settled, waiting = 0, 0, [0, 0]
    for what, index, which, other, share in steps:
        layer = layers[index]
        if what == "add" and len(host := in_memory(places, index)):
            exchange.add([layer.exchange(index, which, 0, host[other % len(host)])])
            asked, waiting[index] = asked + 1, waiting[index] + 1
        elif what == "none":
            exchange.add([Exchange(index, which % ON_GPU, which % EXPERTS, other % EXPERTS)])
            asked, waiting[index] = asked + 1, waiting[index] + 1
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
        elif what in ("load", "drop"):
            if not waiting[index]:  # an exchange may have the layer's spare place
                move(what, layer, places, index, which)
        else:
            outcome = advance(exchange)
            settled += follow(places, outcome, waiting)
            copies.arrive(0.0 if what == "late" else share)
        check(layers, places, waiting)
    copies.refuse = copies.refuse_downloads = False
    settled += follow(places, finish(exchange, copies), waiting)
    assert settled == asked and waiting == [0, 0]
    check(layers, places, waiting)


def in_memory(places: Residency, layer: int) -> list[int]:
    """Experts in CPU memory."""
    return places.on(Location.CPU)[layer].nonzero()[0].tolist()


def move(what: str, layer: Layer, places: Residency, index: int, which: int) -> None:
    """One expert to its file, or back."""
    there = places.on(Location.CPU if what == "drop" else Location.FILE)[index].nonzero()[0].tolist()
    if not there:
        return
    expert = there[which % len(there)]
    if what == "drop":
        layer.cpu.forget(expert)
        places.drop(index, expert)
    else:
        layer.cpu.load_packed(expert, layer.bytes[expert])
        places.load(index, expert)


def follow(places: Residency, outcome: ExchangeOutcome, waiting: list[int]) -> int:
    """As live placement follows; how many have settled."""
    for each in outcome.done:
        places.sink(each.layer, each.leaving)
        places.rise(each.layer, each.coming, each.slot)
    for each in outcome.stranded:
        places.sink(each.layer, each.leaving)
    every = [*outcome.done, *outcome.dropped, *outcome.stranded]
    for each in every:
        waiting[each.layer] -= 1
    return len(every)


def check(layers: list[Layer], places: Residency, waiting: list[int]) -> None:
    """The layers, and that they are as `places` says where nothing is under way."""
    counted = sum(places.on(location).astype(int) for location in Location)
    assert (counted == 1).all()
    for index, layer in enumerate(layers):
        layer.check(in_file=places.on(Location.FILE)[index].nonzero()[0].tolist())
        if not waiting[index]:
            assert places.slots[index].tolist() == layer.gpu.table.tolist()


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
    exchange = made(layers, copies, buffers=4)
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
    taken = {layer.cpu.cpu_slot_of(e) for e in range(EXPERTS) if layer.gpu.slot_of[e] < 0}
    (spare,) = set(range(layer.cpu.cpu_slots)) - taken
    layer.cpu.release(spare)


def forget(layer: Layer, wanted: Exchange) -> None:
    layer.cpu.forget(wanted.coming)


@pytest.mark.parametrize(("harm", "outcome"), [(unreserve, "dropped"), (forget, "done")])
def test_a_layer_whose_places_fail_leaves_the_others_alone(
    harm: Callable[[Layer, Exchange], None], outcome: str
) -> None:
    """What arrives together ends together, but for that one; its layer is ended."""
    layers, copies = [Layer(1), Layer(2), Layer(3)], FakeCopies()
    exchange = made(layers, copies, buffers=4)
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
    with pytest.raises(KernelError, match="buffer"):
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
        (piece,) = layer.pieces(layer.cpu_slot_of(EXPERTS - 1))
        assert address <= piece[1] and piece[1] + piece[2] <= address + nbytes
    hold_all(layers, FakeCopies(holds=sizes[0]))
    assert "no more memory can be locked; experts are not streamed" in caplog.text
