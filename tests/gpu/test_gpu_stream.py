"""Experts streamed to the GPU for a step give what those that live there give (on a GPU, or interpreted).

Tolerances are those of `test_gpu_prompts.py`: the products are the same, whoever brought the bytes. Where the CPU
computes a part, that part has fewer roundings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from fake_copies import advance, at_once, piece
from gpu import AVAILABLE, DEVICE, INTERPRETED, fed, needs_cuda, needs_triton
from gpu_sessions import DECODED, PROMPT, ROWS, Session, batch_of, on_the_cpu, rms
from kernel_cases import GGUF_BLOCKS, gguf_codes
from tandem import _core
from tandem.errors import EngineError
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.live.exchange import LiveExchange
from tandem.experts.live.virtual import Exchange
from tandem.experts.placement import ExpertPlacement
from tandem.formats.reference import stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertBiases, Routing
from tandem.planner.forecast.stream_rates import BUS_BESIDE, StreamRates
from tandem.spec.gpu_scratch import StagingRing

if AVAILABLE:
    from tandem.experts.hybrid_store import HybridStore
    from tandem.experts.live.copies import CudaCopies, hold_all
    from tandem.experts.streaming.copy_stream import CudaCopyStream
    from tandem.experts.streaming.measured import measured_rates
    from tandem.experts.streaming.stream import ExpertStream, StreamReadings, cpu_slot_of, streamed_layer
    from tandem.experts.streaming.stream import Layers as Layers_
    from tandem.experts.streaming.transfers import Transfers
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
TOLERANCE = (4.5 if INTERPRETED else 2.0) * 2.0**-8
LAYERS, EXPERTS, HIDDEN, WIDTH, TOKENS, TOP_K = 2, 6, 64, 32, 12, 2
CODED = ("int4_zeros", "q5_1")  # stored as codes, and packed as they are


@dataclass
class FakeBus:
    """Copies arrive when somebody waits for them, or (early) at once; the `failing`-th from now on fails."""

    early: bool = False
    failing: int = -1
    given: list[tuple[int, int, int]] = field(default_factory=list)
    arrived: int = 0
    waits: int = 0

    def copy(self, source: int, target: int, nbytes: int) -> None:
        self.failing -= 1
        if self.failing == -1:
            raise EngineError("a copy failed")
        self.given.append((source, target, nbytes))
        if self.early:
            self.compute_after(len(self.given))

    def copies_given(self) -> int:
        return len(self.given)

    def computing_given(self) -> int:
        return self.arrived

    def compute_after(self, copies: int | None) -> None:
        for source, target, nbytes in self.given[self.arrived : copies]:
            ctypes.memmove(target, source, nbytes)
        self.arrived = max(self.arrived, copies or 0)

    def copy_after(self, computing: int | None) -> None:
        self.waits += computing is not None

    def finish(self) -> None:
        self.compute_after(len(self.given))


def rates_of(share: float, beside: float = 1.0) -> StreamRates:
    """Such that this share is streamed, nearly; or none at all. beside: as long as alone the bus takes, so many
    times."""
    return StreamRates(1.0, 0.0, 0.0) if share == 0.0 else rates(share, beside=beside)


def rates(share: float, least_rows: int = 1, beside: float = 1.0) -> StreamRates:
    """Such that this share is streamed, nearly."""
    bus = 1e-9 if share == 1.0 else 1000 * (1 - share) / share / beside
    return StreamRates(bus, 1000.0, 0.0, least_rows)


def ring(parts: int, nbytes: int) -> StagingRing:
    """Of two experts each."""
    return StagingRing(parts, 2, -(-2 * nbytes // 256) * 256)


class ScriptedSetup:
    """What experts of each layer got since the start."""

    def __init__(self) -> None:
        self.counts = np.zeros((LAYERS, EXPERTS), np.int32)

    def tokens(self) -> np.ndarray:
        return self.counts.copy()


class Layers:
    """Two layers with experts on both sides, or one; and the same ones whole in CPU memory."""

    def __init__(self, on_gpu: int = 2, fmt: str = "int4", live: bool = False, nodes: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        workers = _core.WorkerPool([-1, -1], 20, list(nodes)) if nodes else _core.WorkerPool([-1, -1])
        self.ops = GpuOps(DEVICE, CpuOps(workers, _core.supported_tiers()[-1]))
        placed = torch.zeros(LAYERS, EXPERTS, dtype=torch.bool)
        placed[:, 1 : 1 + on_gpu] = True
        self.handoff = Handoff(HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K), DEVICE, 20.0)
        self.store = HybridStore(self.ops, ExpertPlacement(placed), self.handoff, HIDDEN, live=live)
        self.each, self.whole, packed = [], [], "bf16" if fmt in CODED else fmt
        for index in range(LAYERS):
            gate, up = torch.randn(2, EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5
            down = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
            weights = list(zip(gate, up, down, strict=True))
            if fmt in CODED:
                blocks = fmt in GGUF_BLOCKS
                weights = [
                    tuple(gguf_codes(fmt, *m.shape, seed=i) if blocks else stored(m, fmt) for m in each)
                    for i, each in enumerate(weights)
                ]
            self.each.append(self.store.layer(index, EXPERTS, WIDTH, packed))
            self.each[-1].load(fed(EXPERTS, weights.__getitem__))
            self.whole.append(self.ops.cpu.experts(EXPERTS, HIDDEN, WIDTH, packed))
            self.whole[-1].load_all(0, weights)

    def stream(
        self, share: float, least_rows: int = 1, bus: object = None, parts: int = 2, told: ScriptedSetup | None = None
    ) -> ExpertStream:
        """Attached, with a ring of so many parts of two experts."""
        layers = [streamed_layer(each.cpu, each.gpu, self.ops) for each in self.each]
        nbytes = max(layer.cpu.bytes_per_expert for layer in layers if layer)
        bus = bus or (FakeBus() if DEVICE.type == "cpu" else CudaCopyStream(DEVICE))
        followed = StreamReadings() if told is None else StreamReadings(ask=lambda: told)
        made = ExpertStream(layers, ring(parts, nbytes), bus, rates(share, least_rows), DEVICE, followed)
        for index, each in enumerate(self.each):
            each.stream, each.index = made, index
        return made

    def check(self, tokens: int = TOKENS, chosen: list[int] | None = None) -> None:
        """One step: all layers in order."""
        for index in range(LAYERS):
            self.check_layer(index, tokens, chosen)

    def check_layer(self, index: int, tokens: int = TOKENS, chosen: list[int] | None = None) -> None:
        each, whole = self.each[index], self.whole[index]
        x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, TOP_K)
        ids = torch.stack([torch.tensor(chosen or torch.randperm(EXPERTS)[:TOP_K].tolist()) for _ in range(tokens)])
        routing = Routing(ids.int().to(DEVICE), weights.to(DEVICE))
        got = each.wait(each.submit(x.to(DEVICE), routing)).float().cpu()
        expected = whole.forward(x.float(), ids.int(), weights)
        assert (got - expected).norm() <= TOLERANCE * expected.norm()

    @property
    def posts(self) -> int:
        return self.handoff.times().posts


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("on_gpu", [0, 2])
def test_what_is_streamed_is_computed_as_what_lives_there(on_gpu: int, share: float, early: bool) -> None:
    """Through a ring of two parts, whoever is faster; the CPU computes the rest, if there is one."""
    layers = Layers(on_gpu)
    stream = layers.stream(share, bus=FakeBus(early) if DEVICE.type == "cpu" else None)
    streamed = round(share * (EXPERTS - on_gpu))
    for step in range(2):
        stream.begin(TOKENS)
        assert stream.counts == dict.fromkeys(range(LAYERS), streamed)
        layers.check()
        assert layers.posts == (0 if share == 1.0 else LAYERS * (step + 1))
    each = layers.whole[0].bytes_per_expert
    assert stream.deliveries.bytes == 2 * LAYERS * streamed * each


@pytest.mark.parametrize("on_gpu", [0, 2])
def test_those_with_most_rows_are_streamed(on_gpu: int) -> None:
    """In the step after, or in the second if others had most before. The CPU computes the rest."""
    layers, told, nobody = (
        Layers(on_gpu),
        ScriptedSetup(),
        torch.full((1, EXPERTS), -1, dtype=torch.int32, device=DEVICE),
    )
    stream, everyone = layers.stream(0.5, told=told), torch.arange(EXPERTS, dtype=torch.int32, device=DEVICE)[None]
    first, second = ([0, 3], [3, 5]) if on_gpu else ([0, 1, 2], [1, 3, 5])
    third = [0, 4] if on_gpu else [0, 2, 4]
    for step, expected in enumerate((first, second, second, None, third)):
        stream.begin(TOKENS)
        keys = stream.keys(1, everyone, nobody)[0].cpu()
        assert expected is None or (keys >= 0).nonzero().flatten().tolist() == expected
        assert sorted(keys[keys >= 0].tolist()) == list(range(on_gpu, on_gpu + len(first)))
        layers.check()
        told.counts += np.array([1, 90, 2, 80, 3, 70] if step < 2 else [900, 1, 800, 2, 700, 3], np.int32)
    assert stream.deliveries.bytes == 5 * LAYERS * len(first) * layers.whole[0].bytes_per_expert


@pytest.mark.parametrize("on_gpu", [0, 2])
def test_biases_are_those_of_the_streamed_experts(on_gpu: int) -> None:
    """The CPU adds its own."""
    layers = Layers(on_gpu)
    for each, whole in zip(layers.each, layers.whole, strict=True):
        biases = ExpertBiases(*torch.randn(2, EXPERTS, WIDTH), torch.randn(EXPERTS, HIDDEN))
        each.set_biases(biases)
        whole.set_biases(biases)
    stream = layers.stream(0.6)
    stream.begin(TOKENS)
    layers.check()
    assert layers.posts == LAYERS


@pytest.mark.parametrize("fmt", ["bf16", "int8", *CODED])
@pytest.mark.parametrize("nodes", [(), (0, 1)])
def test_on_several_memory_nodes_too(fmt: str, nodes: tuple[int, ...]) -> None:
    """Where an expert lies in pieces."""
    layers = Layers(2, fmt, nodes=nodes)
    layers.stream(1.0).begin(TOKENS)
    layers.check()


@pytest.mark.parametrize("nodes", [(), (0, 1)])
def test_slots_in_any_order_are_as_few_copies_as_their_pieces_allow(nodes: tuple[int, ...]) -> None:
    layers = Layers(2, nodes=nodes)
    layer = streamed_layer(layers.each[0].cpu, layers.each[0].gpu, layers.ops)
    assert layer is not None
    for order in ([], [3], [0, 1, 2, 3], [3, 1, 2, 0], [2, 3, 0, 1]):  # of slots
        pieces = [(i, piece) for i, slot in enumerate(order) for piece in layer.cpu.pieces(slot)]
        expected: list[tuple[int, int, int]] = []
        for i, (offset, source, nbytes) in pieces:
            target = i * layer.cpu.bytes_per_expert + offset
            if expected and expected[-1][0] + expected[-1][2] == source and sum(expected[-1][1:]) == target:
                source, target, nbytes = *expected[-1][:2], expected.pop()[2] + nbytes
            expected.append((source, target, nbytes))
        assert layer.runs(iter(order)) == expected
        assert nodes or len(expected) == sum(np.diff(order, prepend=-9) != 1)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("on_gpu", [0, 2])
def test_only_experts_without_a_slot_on_the_gpu_are_looked_up(
    on_gpu: int, moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert that is not in CPU memory answers with an error, which takes 4 us: 0.6 ms for each layer. So, too, in
    layers where nothing has both places while exchanges are under way."""
    layers, asked = Layers(on_gpu, live=True), list[int]()
    each = layers.each[0]
    layer = streamed_layer(each.cpu, each.gpu, layers.ops)
    assert layer is not None and each.cpu is not None
    expected = [cpu_slot_of(each.cpu, expert) for expert in range(EXPERTS)]
    place_of = type(each.cpu).cpu_slot_of
    monkeypatch.setattr(type(each.cpu), "cpu_slot_of", lambda cpu, e: asked.append(e) or place_of(cpu, e))
    assert layer.expert_cpu_slots(moving) == expected
    assert asked == [expert for expert, place in enumerate(expected) if place >= 0]


@pytest.mark.parametrize("chosen", [[0, 5], [1, 2], [5, 5]])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_all_rows_to_few_experts_and_a_step_of_one_row(tokens: int, chosen: list[int]) -> None:
    layers = Layers()
    layers.stream(1.0).begin(tokens)
    layers.check(tokens, chosen)


def test_a_prompt_that_crosses_the_threshold() -> None:
    """Chunks of many rows are streamed, those of few and recorded steps are not; what is streamed next is not what was
    left."""
    layers = Layers()
    stream = layers.stream(1.0, least_rows=10)
    for rows, recorded in ((TOKENS, False), (9, False), (10, False), (10, True), (TOKENS, False)):
        before = layers.posts
        stream.begin(0 if recorded else rows)
        layers.check(rows)
        is_streamed = rows >= 10 and not recorded
        assert bool(stream.counts) == is_streamed and layers.posts == before + (0 if is_streamed else LAYERS)


@pytest.mark.parametrize("on_gpu", [0, 2])
def test_layers_of_an_engine_have_one_scratch(on_gpu: int) -> None:
    layers = Layers(on_gpu)
    made = [streamed_layer(each.cpu, each.gpu, layers.ops) for each in layers.each]
    assert [layer.prompts.scratch for layer in made if layer] == [layers.ops.scratch] * LAYERS


def test_rates_are_measured_with_the_layers_own_bytes() -> None:
    made = Layers()
    layers = [layer for each in made.each if (layer := streamed_layer(each.cpu, each.gpu, made.ops))]
    nbytes = layers[0].cpu.bytes_per_expert
    bus = FakeBus() if DEVICE.type == "cpu" else CudaCopyStream(DEVICE)
    found = measured_rates(layers, ring(2, nbytes), bus, DEVICE, TOP_K)
    assert 0 < found.bus < 1 and found.cpu_seconds(64) > 0 and found.cpu_row >= 0


@needs_cuda
@pytest.mark.parametrize("measured", [True, False])
def test_copies_wait_for_what_still_reads_their_memory(measured: bool) -> None:
    """A weight is made on the GPU from memory that the allocator then gives to the ring, before the GPU has read it."""
    layers = Layers(0)
    layer = streamed_layer(layers.each[0].cpu, None, layers.ops)
    assert layer is not None
    parts = ring(1, layer.cpu.bytes_per_expert)
    before = torch.full((parts.nbytes,), 7, dtype=torch.uint8, device=DEVICE)
    made, address = torch.zeros_like(before), before.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    made.copy_(before)
    del before
    if measured:
        measured_rates([layer], parts, CudaCopyStream(DEVICE), DEVICE, TOP_K)
    else:
        transfers = Transfers([layer], parts, CudaCopyStream(DEVICE), DEVICE)
        assert transfers.memory(0).data_ptr() == address
        transfers.begin({0: 2}, whole=False)
    torch.cuda.synchronize()
    assert made.eq(7).all()


def test_a_ring_that_is_let_go_of_waits_for_its_copies() -> None:
    """A step that was given up has taken none of them. Its memory is another's afterwards."""
    layers = Layers(0)
    layer = streamed_layer(layers.each[0].cpu, None, layers.ops)
    assert layer is not None
    parts = ring(2, layer.cpu.bytes_per_expert)
    bus = FakeBus() if DEVICE.type == "cpu" else CudaCopyStream(DEVICE)
    transfers = Transfers([layer], parts, bus, DEVICE)
    if isinstance(bus, CudaCopyStream):
        with torch.cuda.stream(bus._stream):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
    transfers.begin({0: EXPERTS}, whole=False)
    assert transfers.failed
    del transfers
    assert bus._stream.query() if isinstance(bus, CudaCopyStream) else bus.arrived == len(bus.given) > 0


def test_the_bus_is_read_between_steps_and_steps_are_right_afterwards() -> None:
    layers = Layers()
    stream = layers.stream(1.0)
    for _ in range(2):
        stream.begin(TOKENS)
        layers.check()
        assert stream.deliveries.copied_gbps() > 0


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_a_copy_that_fails_is_that_step_s_error(failing: int) -> None:
    """At its begin or between its layers; the next one is right."""
    bus = FakeBus()
    if DEVICE.type != "cpu":
        pytest.skip("the driver's copies are failed below")
    layers = Layers()
    stream = layers.stream(1.0, bus=bus)
    bus.failing = failing
    with pytest.raises(EngineError, match="a copy failed"):
        stream.begin(TOKENS)
        layers.check()
    bus.failing = -1
    for _ in range(2):
        stream.begin(TOKENS)
        assert bus.arrived <= len(bus.given)
        layers.check()


class AtOnce:
    """A recorder: what the host does between two graphs is done while they are recorded, as at a replay."""

    cuts = 0

    def cut(self, then: Callable[[], None]) -> None:
        self.cuts += 1
        then()


@pytest.mark.parametrize("on_gpu", [0, 2])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
@pytest.mark.parametrize("parts", [2, 6])
def test_layers_that_are_recorded_read_what_was_waited_for(on_gpu: int, share: float, parts: int) -> None:
    """All of a layer arrives before it, and its places are free after it; or each part in turn, where the ring does not
    hold a layer. Parts that stay at home are recorded, too: the same graphs serve every share."""
    layers, split = Layers(on_gpu), share < 1.0
    stream, beside = layers.stream(share, parts=parts), BUS_BESIDE if split else 1.0
    stream.rates = rates_of(share, beside)
    assert stream.holds_layers == (parts == 6)
    stream.begin(TOKENS, layers=Layers_.SPLIT if split else Layers_.WHOLE)
    layers.check()  # kernel by kernel, before a capture
    recorder, places, posts = AtOnce(), EXPERTS - on_gpu, layers.posts
    for other in (None, 0.5, 0.0, 1.0):
        stream.rates = stream.rates if other is None else rates_of(other, beside)
        stream.begin(TOKENS, layers=Layers_.SPLIT if split else Layers_.WHOLE)
        wanted = round((share if other is None else other) * places)
        expected = max(1, min(places - 1, wanted)) if split else places
        assert stream.counts == ({} if other == 0.0 and not split else dict.fromkeys(range(LAYERS), expected))
        if stream.counts:
            with stream.recording(recorder):
                layers.check()
    assert layers.posts == posts + (4 * LAYERS if split else 0)
    each = 2 if parts == 6 else 1 + -(-places // 2)
    assert recorder.cuts == (4 if split else 3) * each * LAYERS


def test_rows_that_fill_a_graph_up_are_not_the_cpu_s() -> None:
    """It computes those of the step; others' sums are whatever was there."""
    layers = Layers(0)
    stream = layers.stream(0.5, parts=6)
    stream.begin(TOKENS, layers=Layers_.SPLIT)
    layers.check()
    stream.begin(TOKENS - 3, layers=Layers_.SPLIT)
    each, whole = layers.each[0], layers.whole[0]
    x, weights = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.rand(TOKENS, TOP_K)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    posted = []
    compute = layers.handoff.copies.compute
    layers.handoff.copies.compute = lambda rows: (posted.append(rows), compute(rows))  # type: ignore[method-assign]
    with stream.recording(AtOnce()):
        got = each.wait(each.submit(x.to(DEVICE), Routing(ids.to(DEVICE), weights.to(DEVICE)))).float().cpu()
    expected = whole.forward(x.float(), ids, weights)[: TOKENS - 3]
    assert posted == [TOKENS - 3] and (got[: TOKENS - 3] - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_one_layer_alone_is_streamed_before_the_start(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rates say, first of all steps; the one after it is as ever, and has learnt nothing of its times."""
    layers = Layers()
    stream = layers.stream(share)
    observed = []
    monkeypatch.setattr(StreamRates, "observe", lambda self, *times: observed.append(times))
    stream.begin_only(TOKENS, [1])
    assert stream.counts == {1: EXPERTS - 2}
    layers.check_layer(1)
    assert stream.deliveries.ended
    stream.begin(TOKENS)
    layers.check()
    assert observed == []


def test_layers_out_of_order_are_an_error() -> None:
    layers = Layers()
    layers.stream(1.0).begin(TOKENS)
    layers.each.reverse()
    with pytest.raises(EngineError, match="not the one"):
        layers.check()


def test_experts_that_change_places_are_found_where_they_are() -> None:
    """An exchange between two steps, and copies of the first still to come: those read what was there."""
    layers = Layers(live=True)
    copies = layer_copies()
    sides = [each.sides for each in layers.each]
    exchange = LiveExchange(sides, layers.store.tables, copies, 1 << 30, between_answers=at_once, tail_seconds=60.0)
    stream = layers.stream(1.0)
    stream._followed = StreamReadings(moves=exchange.moves)
    for step in range(3):
        stream.begin(TOKENS)
        layers.check()
        wanted = [Exchange(layer, 0, [1, 0, 3][step], [0, 3, 4][step]) for layer in range(LAYERS)]
        exchange.add(wanted)
        assert not advance(exchange).done
        stream.begin(TOKENS)  # a step while they are exchanged looks up who is where, and the one after must again
        layers.check()
        if DEVICE.type == "cpu":
            copies.arrive(1.0)
        else:
            torch.cuda.synchronize()
        assert advance(exchange).done == wanted
    stream.begin(TOKENS)
    layers.check()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_step_between_any_two_pieces_of_an_exchange_is_right(share: float) -> None:
    """One that comes has its slot before the GPU's tables say so. It is streamed until then, or the CPU's."""
    layers, given = Layers(live=True), list[Any]()
    copies, sides = layer_copies(), [each.sides for each in layers.each]
    exchange = LiveExchange(sides, layers.store.tables, copies, 1 << 30, between_answers=given.append)
    stream = layers.stream(share)
    stream._followed = StreamReadings(moves=exchange.moves)
    exchange.add([Exchange(layer, 0, 1, 0) for layer in range(LAYERS)])
    exchange.prepare()
    exchange.begin()
    pieces = 0
    for arrives in (False, True):
        if arrives and DEVICE.type == "cpu":
            copies.arrive(1.0)
        elif arrives:
            torch.cuda.synchronize()
        while piece(given[0]):
            pieces += 1
            stream.begin(TOKENS)
            layers.check()
    assert pieces > 3 * LAYERS and len(exchange.end().done) == LAYERS


def layer_copies() -> Any:
    if DEVICE.type == "cuda":
        return CudaCopies(DEVICE)
    from fake_copies import FakeCopies

    return FakeCopies()


# -- the whole model, on a GPU ---


def streaming(
    path: object, share: float, streamed: float, graphs: tuple[int, ...] = (), copy: int = 0
) -> tuple[Session, ExpertStream]:
    """A session whose steps of more than eight rows stream."""
    session = Session(path, share, graphs)
    hybrids = session.side.hybrids
    layers = [streamed_layer(each.cpu, each.gpu, session.side.ops) for each in hybrids]
    held = CudaCopies(DEVICE)
    assert hold_all([layer.cpu for layer in layers if layer], held)
    nbytes = max(layer.cpu.bytes_per_expert for layer in layers if layer)
    stream = ExpertStream(
        layers, ring(3, nbytes), CudaCopyStream(DEVICE, held, copy), rates(streamed, ROWS + 1), DEVICE
    )
    for index, each in enumerate(hybrids):
        each.stream, each.index = stream, index
    session.runner._begin_step = lambda batch, captured: stream.begin(0 if captured else len(batch.input_ids))
    return session, stream


@needs_cuda
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("streamed", [1.0, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_logits_are_those_of_the_cpu(tiny_models, share: float, streamed: float, graphs: tuple[int, ...]) -> None:
    """Experts are streamed for prompts, not for decode steps. The tolerance is that of `test_gpu_engine.py`."""
    path = tiny_models["qwen3_moe-gpu"]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    session, stream = streaming(path, share, streamed, graphs)
    ours, allowed = session.logits(True), 1.5 * rms(theirs, exact)
    print(f"{rms(ours, exact):.2e} of {allowed:.2e}, {stream.deliveries.bytes} bytes")
    assert rms(ours, exact) < allowed and stream.deliveries.bytes > 0


CopyAsync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


@needs_cuda
def test_a_failed_copy_fails_its_step_and_the_next_one_works(tiny_models) -> None:
    path, left = tiny_models["qwen3_moe-gpu"], [1 << 30]
    driver = CopyAsync(CudaCopies(DEVICE).functions[0])

    def sometimes(target: int, source: int, nbytes: int, stream: int) -> int:
        left[0] -= 1
        return 700 if left[0] == 0 else driver(target, source, nbytes, stream)

    copy = CopyAsync(sometimes)
    session, _ = streaming(path, 0.5, 1.0, copy=ctypes.cast(copy, ctypes.c_void_p).value or 0)
    rows = list(range(ROWS))
    right = session.step(rows, 0, PROMPT)
    for failing in (1, 5):
        left[0] = failing
        with torch.inference_mode(), pytest.raises(EngineError, match="error 700"):
            session.runner.logits(batch_of(rows, 0, PROMPT))
        session.runner.after_failure()
        left[0] = 1 << 30
        assert torch.equal(session.step(rows, 0, PROMPT), right)
    assert session.step(rows, PROMPT, 1).isfinite().all() and DECODED > 1


@needs_cuda
def test_streamed_steps_have_the_same_bits_each_time(tiny_models) -> None:
    """Rows of an expert have any order; each has its own product."""
    session, _ = streaming(tiny_models["qwen3_moe-gpu"], 0.5, 1.0)
    rows = list(range(ROWS))
    first = session.step(rows, 0, PROMPT)
    assert all(torch.equal(session.step(rows, 0, PROMPT), first) for _ in range(5))
