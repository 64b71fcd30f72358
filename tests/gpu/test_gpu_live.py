"""Exchanges between a real layer's GPU experts and its CPU experts (on a GPU, or interpreted with fake copies).

The placement changes between calls, the result does not: each call is compared with all experts on the CPU. Tolerances
as in test_gpu_ops.py: hidden activations and the sum are rounded to bfloat16, 2^-8 each on average even in the
interpreter, which cuts bits off.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from fake_copies import FakeCopies, advance, at_once
from gpu import AVAILABLE, DEVICE, fed, needs_cuda, needs_triton
from plans import gpu_plan
from tandem import _core
from tandem.bench.architectures import named_config
from tandem.bench.placement.request import PlacementFlags, traffic
from tandem.bench.placement.traces import TraceShape, Zipf, expert_counts, generate
from tandem.errors import EngineError
from tandem.experts.live.copies import CudaCopies, ExchangeCopies, hold_all
from tandem.experts.live.exchange import LiveExchange
from tandem.experts.live.virtual import Exchange
from tandem.experts.placement import ExpertPlacement, place
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing
from tandem.kernels.packed.experts import PackedExperts
from tandem.planner.plan import Plan

if AVAILABLE:
    from tandem.bench.placement import turns as placement_turns
    from tandem.bench.placement.trace_usage import TraceUsage
    from tandem.bench.placement.turns import OneModel, Sides, Switched, placements, room_for
    from tandem.bench.synthetic import SyntheticStore
    from tandem.engine.start import gpu_side
    from tandem.engine.start.gpu_side import GpuSide, StepStart, live_experts
    from tandem.experts.handoff import Handoff
    from tandem.experts.handoff_counts import HandoffSizes
    from tandem.experts.hybrid_store import HybridStore
    from tandem.kernels.gpu import ops as gpu_ops
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 8, 64, 48, 3, 4


def copies() -> ExchangeCopies:
    return CudaCopies(DEVICE) if DEVICE.type == "cuda" else FakeCopies()


def arrive(made: ExchangeCopies) -> None:
    if isinstance(made, FakeCopies):
        made.arrive(1.0)
    else:
        torch.cuda.synchronize()


def sides(nodes: tuple[int, ...] = ()) -> tuple[GpuOps, HybridStore]:
    workers = _core.WorkerPool([-1, -1], 20, list(nodes)) if nodes else _core.WorkerPool([-1, -1])
    ops = GpuOps(DEVICE, CpuOps(workers, _core.supported_tiers()[-1]))
    handoff = Handoff(HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K), DEVICE, 20.0)
    return ops, HybridStore(ops, place("uniform", 1, EXPERTS, 3), handoff, HIDDEN, live=True)


@pytest.mark.parametrize(
    ("fmt", "nodes", "held"), [("bf16", (), True), ("int4", (), False), ("int4", (0, 1), True)]
)
def test_exchanges_do_not_change_what_a_layer_computes(fmt: str, nodes: tuple[int, ...], held: bool) -> None:
    """On simulated memory nodes, too, where an expert lies in pieces; and in memory that CUDA does not know."""
    torch.manual_seed(0)
    gate, up = torch.randn(2, EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    ops, store = sides(nodes)
    layer = store.layer(0, EXPERTS, WIDTH, fmt)
    layer.load(fed(EXPERTS, lambda e: (gate[e], up[e], down[e])))
    static = ops.cpu.experts(EXPERTS, HIDDEN, WIDTH, fmt)
    for e in range(EXPERTS):
        static.load(e, gate[e], up[e], down[e])

    dma = copies()
    assert layer.sides is not None and store.tables is not None
    if held:
        hold_all([layer.sides.cpu], dma)
    exchange = LiveExchange([layer.sides], store.tables, dma, 1 << 30, between_answers=at_once, tail_seconds=60.0)
    where = list(range(3))  # the expert in each slot
    for step in range(8):
        x = torch.randn(TOKENS, HIDDEN).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
        weights = torch.rand(TOKENS, TOP_K)
        routing = Routing(ids.to(DEVICE), weights.to(DEVICE))
        got = layer.wait(layer.submit(x.to(DEVICE), routing)).float().cpu()
        expected = static.forward(x.float(), ids, weights)
        torch.testing.assert_close(got, expected, rtol=2.0**-6, atol=2.0**-6)
        assert (got - expected).norm() < 2 * 2.0**-8 * expected.norm()

        slot = step % 3
        coming = next(e for e in range(step, step + EXPERTS) if e % EXPERTS not in where) % EXPERTS
        wanted = Exchange(0, slot, where[slot], coming)
        exchange.add([wanted])
        assert not advance(exchange).done
        arrive(dma)
        assert advance(exchange).done == [wanted]
        where[slot] = coming
    assert layer.sides.cpu.loaded == EXPERTS - 3


def begins(work: _core.Meanwhile) -> None:
    work.next_of_step()


@needs_cuda
def test_memory_is_given_back_with_copies_under_way() -> None:
    """Registered memory must not be freed, nor staging memory used again, while DMA may write there."""
    _, store = sides()
    layer = store.layer(0, EXPERTS, WIDTH, "bf16")
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    layer.load(fed(EXPERTS, lambda _: tuple(torch.randn(shape) / 8 for shape in shapes)))
    assert layer.sides is not None and store.tables is not None
    for _ in range(2):  # what was given back can be registered again
        dma = CudaCopies(DEVICE)
        dma.hold(layer.sides.cpu, *layer.sides.cpu.own_memory())
        with pytest.raises(EngineError, match="does not register"):
            dma.hold(layer.sides.cpu, *layer.sides.cpu.own_memory())
        exchange = LiveExchange([layer.sides], store.tables, dma, 1 << 30, between_answers=begins)
        coming = int((layer.slot_of < 0).nonzero()[0])
        exchange.add([Exchange(0, 0, int((layer.slot_of == 0).nonzero()[0]), coming)])
        advance(exchange)
        del exchange
        dma.close()
        layer.sides.cpu.release(layer.sides.cpu.num_experts - 3)
    torch.cuda.synchronize()


def test_nothing_moves_where_no_layer_has_experts_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    """As with front-loading, and experts on the GPU that are whole layers."""
    ops, _ = sides()
    handoff, placement = (
        Handoff(HandoffSizes(1, 1, HIDDEN, 1), DEVICE, 20.0),
        place("front-loading", 2, EXPERTS, EXPERTS),
    )
    store = HybridStore(ops, placement, handoff, HIDDEN, live=True)
    for index in range(2):
        store.layer(index, EXPERTS, WIDTH, "bf16")
    made = Plan(
        dtype="bfloat16", expert_format="bf16", tier=ops.cpu.tier, cpus=(-1, -1), context_length=64, page_size=16,
        num_pages=4, max_running_requests=1, max_step_tokens=64, radix_cache=False, fuse_shared_experts=False,
        gpu=gpu_plan(EXPERTS, placement="front-loading", patience_seconds=20.0, live=True),
    )  # fmt: skip
    usage = ExpertUsage(2, EXPERTS, padded=True, gpu_experts=placement.gpu_experts, device=DEVICE)
    assert live_experts(made, GpuSide(ops, store, handoff, placement), usage) is None
    assert "experts stay where they are" in caplog.text


def test_a_replayed_layer_computes_what_the_trace_chose() -> None:
    """All experts of a synthetic layer are alike, so it is the CPU's share of the pairs that tells them apart."""
    _, store = sides()
    chosen = torch.tensor([[[7, 6, 5], [0, 1, 2]]], dtype=torch.int32, device=DEVICE)
    layer = SyntheticStore(store, store._handoff, chosen=chosen).layer(0, EXPERTS, WIDTH, "bf16")
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    layer.load(fed(EXPERTS, lambda _: tuple(torch.randn(shape) / 8 for shape in shapes)))
    router = Routing(torch.full((2, 3), 4, dtype=torch.int32, device=DEVICE), torch.rand(2, 3, device=DEVICE))
    ticket = layer.submit(torch.randn(2, HIDDEN).bfloat16().to(DEVICE), router)
    assert ticket.slots.tolist() == [[-1, -1, -1], [0, 1, 2]]
    chosen[0, 0] = torch.tensor([2, 3, 0], dtype=torch.int32)
    assert layer.submit(torch.randn(2, HIDDEN).bfloat16().to(DEVICE), router).slots.tolist()[0] == [2, -1, 0]


def test_one_layer_stands_for_many_placements() -> None:
    """As `kt bench experts` measures strategies in turn: tables say where experts are, all have the same bytes, and
    those that may move have one place only."""
    _, store = sides()
    chosen = torch.tensor([[[7, 6, 5], [0, 1, 2]]], dtype=torch.int32, device=DEVICE)
    layer = SyntheticStore(store, store._handoff, chosen=chosen, whole=True).layer(0, EXPERTS, WIDTH, "bf16")
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    weights = tuple(torch.randn(shape) / 8 for shape in shapes)
    layer.load(fed(EXPERTS, lambda _: weights))
    assert layer.sides is not None and store.tables is not None and layer.sides.cpu.loaded == EXPERTS
    both, dma = Sides([layer.sides], EXPERTS), copies()
    exchange = LiveExchange([layer.sides], store.tables, dma, 1 << 30, between_answers=at_once, tail_seconds=60.0)
    routing = Routing(
        torch.zeros(2, 3, dtype=torch.int32, device=DEVICE), torch.ones(2, 3, device=DEVICE) / 3
    )
    x = torch.randn(2, HIDDEN).bfloat16().to(DEVICE)
    fixed = torch.tensor([[-1, 0, -1, -1, -1, -1, -1, 1]], dtype=torch.int32)
    moving, results = torch.tensor([[0, 1, 2, -1, -1, -1, -1, -1]], dtype=torch.int32), []
    for turn in range(3):
        both.show(fixed, exclusive=False)
        ticket = layer.submit(x, routing)
        assert ticket.slots.tolist() == [[1, -1, -1], [-1, 0, -1]]
        results.append(layer.wait(ticket))
        assert layer.sides.cpu.loaded == EXPERTS
        both.show(moving, exclusive=True)
        assert layer.sides.cpu.loaded == EXPERTS - 3
        exchange.add([Exchange(0, 2, 2 if turn == 0 else 2 + turn, 3 + turn)])
        advance(exchange)
        arrive(dma)
        assert len(advance(exchange).done) == 1
        moving = both.shown()
        assert moving[0, 3 + turn] == 2 and layer.sides.cpu.loaded == EXPERTS - 3
        results.append(layer.wait(layer.submit(x, routing)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2.0**-6, atol=2.0**-6)


if AVAILABLE:

    class OneLayer(OneModel):
        """Of one layer, without attention."""

        def __init__(self, trace: torch.Tensor, made: dict[str, ExpertPlacement]) -> None:
            self._by_strategy, self._trace, self._contestants = made, trace, {}
            ops, _ = sides()
            handoff = Handoff(HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K), DEVICE, 20.0)
            store = HybridStore(ops, room_for(made), handoff, HIDDEN, live=True)
            self._chosen = torch.zeros(1, 1, TOP_K, dtype=torch.int32, device=DEVICE)
            self.layer = SyntheticStore(store, handoff, chosen=self._chosen, whole=True).layer(
                0, EXPERTS, WIDTH, "bf16"
            )
            shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
            weights = tuple(torch.randn(shape) / 8 for shape in shapes)
            self.layer.load(fed(EXPERTS, lambda _: weights))
            usage = ExpertUsage(1, EXPERTS, padded=True, device=DEVICE)
            plan = SimpleNamespace(gpu=SimpleNamespace(live=True, sizes=SimpleNamespace(exchange_bytes=0)))
            side = GpuSide(ops, store, handoff, room_for(made))
            self.live = self._follow(plan, side, usage)
            self._sides = Sides([self.layer.sides], EXPERTS)
            self.results, self.built = [], None

        def _step(self) -> None:
            routing = Routing(
                torch.zeros(1, TOP_K, dtype=torch.int32, device=DEVICE), torch.ones(1, TOP_K, device=DEVICE)
            )
            ticket = self.layer.submit(torch.ones(1, HIDDEN).bfloat16().to(DEVICE), routing)
            self.live.beside_step()
            self.results.append((self.layer.wait(ticket).float().cpu(), int((ticket.slots >= 0).sum())))
            self.live.after_step(lambda: True)


def test_strategies_are_measured_in_turn_on_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tables say, the sum is the same; and what is said to be hit is what was computed on the GPU."""
    tokens = 640  # moving begins once counting shows that it pays
    trace = generate(TraceShape(tokens, 1, EXPERTS, TOP_K), Zipf(request_tokens=480), 3)
    earlier = expert_counts(generate(TraceShape(48, 1, EXPERTS, TOP_K), Zipf(), 4), EXPERTS)
    made = {name: place(name, 1, EXPERTS, 3, earlier) for name in ("uniform", "frequency")}
    dma = copies()
    if isinstance(dma, FakeCopies):
        monkeypatch.setattr(gpu_side, "CudaCopies", lambda device: dma)
        dma.prompt = True
    monkeypatch.setattr(placement_turns, "TURN_TOKENS", 8)
    monkeypatch.setattr(placement_turns, "WARM_TOKENS", 2)
    reader = SimpleNamespace(mean_gbps=lambda seconds: 100.0)
    monkeypatch.setattr(placement_turns.bench_hybrid, "dram_reader", lambda built: reader)
    model = OneLayer(trace, {**made, "dynamic": made["uniform"]})
    with torch.inference_mode():
        found = model.run()
    model.results = model.results[placement_turns.WARM_TOKENS :]
    first = model.results[0][0]
    for result, _ in model.results:
        assert (result - first).norm() < 2 * 2.0**-8 * first.norm()
    assert [sum(turn.tokens for turn in each.turns) for each in found.values()] == [tokens] * 3
    said, computed = sum(each.usage.hits for each in found.values()), sum(hits for _, hits in model.results)
    # An expert that leaves is the CPU's while its slot is written; it counts as the GPU's until the step ends.
    assert abs(said - computed) <= found["dynamic"].usage.swaps
    for name, placement in made.items():
        assert found[name].usage.hits == int((expert_counts(trace, EXPERTS) * placement.gpu_experts).sum())
        assert found[name].usage.swaps == 0
    assert found["dynamic"].usage.swaps > 0 and found["dynamic"].usage.hits != found["uniform"].usage.hits


def test_a_strategy_that_is_switched_off_is_held_while_a_prompt_runs_as_one_that_serves() -> None:
    calls = list[str]()
    live = SimpleNamespace(pause=lambda: calls.append("pause"), resume=lambda: calls.append("resume"))
    start = StepStart(SimpleNamespace(find_rows=ignored, begin_step=ignored), None, True, Switched(live))
    assert start.begin_task(SimpleNamespace(input_ids=[]))
    start.end_task()
    assert calls == ["pause", "resume"]


def ignored(*_: object, **__: object) -> None: ...


def test_strategies_in_turn_have_experts_on_both_sides_of_every_layer() -> None:
    request = PlacementFlags(
        "qwen3-30b-a3b", "zipf", (0.5,), ("uniform", "front-loading", "dynamic"), "INT4", 2, 8, 1
    )
    seen = traffic(request, named_config(request.config, request.layers))
    found = placements(request, seen, 0.5)
    assert list(found) == ["uniform", "dynamic"]
    assert torch.equal(room_for(found).gpu_experts, found["uniform"].gpu_experts)
    assert placements(request, seen, 0.0) == placements(request, seen, 1.0) == {}


def test_strategies_are_measured_apart_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = PlacementFlags("qwen3-30b-a3b", "zipf", (0.5,), ("uniform", "dynamic"), "INT4", 2, 8, 1)
    seen = traffic(request, named_config(request.config, request.layers))
    small = SimpleNamespace(available_memory=1 << 28)
    with monkeypatch.context() as patched:
        patched.setattr(placement_turns.Machine, "detect", lambda: small)
        assert placement_turns.rows_in_turn(request, None, seen, 0.5) == {}
    assert "all experts take 0.6 GiB of CPU memory, and 0.2 may be used" in " ".join(
        capsys.readouterr().out.split()
    )

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no slots")

    monkeypatch.setattr(placement_turns, "OneModel", full)
    assert placement_turns.rows_in_turn(request, None, seen, 0.5) == {}
    assert "no room for the slots of all: no slots" in " ".join(capsys.readouterr().out.split())


def test_a_replayed_trace_counts_hits_where_experts_were() -> None:
    trace = generate(TraceShape(30, 2, EXPERTS, TOP_K), Zipf(), 1)
    first, second = (place(name, 2, EXPERTS, 6).gpu_experts for name in ("uniform", "random"))
    usage = TraceUsage(ExpertUsage(2, EXPERTS, device=DEVICE, padded=True, gpu_experts=first), trace, first)
    usage.tokens = 12
    assert torch.equal(torch.from_numpy(usage.ask().reads()).long(), expert_counts(trace[:12], EXPERTS))
    changed = (first != second).nonzero().tolist()
    usage.moved(lambda: [(layer, expert, bool(second[layer, expert])) for layer, expert in changed], 3)
    usage.tokens = 30
    assert torch.equal(torch.from_numpy(usage.ask().reads()).long(), expert_counts(trace, EXPERTS))
    usage.count()
    parts = (expert_counts(trace[:12], EXPERTS) * first, expert_counts(trace[12:], EXPERTS) * second)
    assert usage.hits == int(sum(part.sum() for part in parts)) and usage.swaps == 3


def test_experts_are_gone_with_the_last_who_uses_them() -> None:
    """At once: a collection of cycles may come much later, and tens of GiB are waited for."""
    _, store = sides()
    layer = store.layer(0, EXPERTS, WIDTH, "bf16")
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    layer.load(fed(EXPERTS, lambda _: tuple(torch.randn(shape) for shape in shapes)))
    assert layer.sides is not None
    left = weakref.ref(layer.sides.cpu)
    gc.disable()
    try:
        del layer, store
        assert left() is None
    finally:
        gc.enable()


def test_after_loading_nothing_of_the_gpu_s_experts_is_in_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, store = sides()
    made = []

    def noted(*sizes: object, **options: object) -> PackedExperts:
        layer = PackedExperts(*sizes, **options)
        made.append(weakref.ref(layer))
        return layer

    monkeypatch.setattr(gpu_ops, "PackedExperts", noted)
    layer = store.layer(0, EXPERTS, WIDTH, "bf16")
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    given = [tuple(torch.randn(shape) for shape in shapes) for _ in range(EXPERTS)]
    layer.load(fed(EXPERTS, lambda e: given[e]))
    assert len(made) == 1 and made[0]() is None
    assert layer.sides is not None and layer.sides.cpu.loaded == EXPERTS - 3
    whole = ops.cpu.experts(EXPERTS, HIDDEN, WIDTH, "bf16")
    whole.load_all(0, given)
    for e in range(EXPERTS):
        slot = layer.sides.gpu.slot_of_expert(e)
        if slot >= 0:
            assert torch.equal(layer.sides.gpu.slot(slot).cpu(), whole.packed(e))
