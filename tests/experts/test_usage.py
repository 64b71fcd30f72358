"""Which experts were chosen: counted where the choice is made, in every implementation, and read without disturbing."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from torch import Tensor

from gpu import DEVICE, needs_triton
from sessions import Session
from tandem import _core
from tandem.engine import expert_statistics
from tandem.engine.expert_statistics import ExpertMeter
from tandem.errors import KernelError
from tandem.experts.handoff_counts import HandoffTimes, PrefetchCounts
from tandem.experts.live.live_experts import LiveTimes
from tandem.experts.usage import expert_usage as usage_module
from tandem.experts.usage.expert_usage import Copy, ExpertUsage
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertCounts, Ops
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.router.shape import Router

ROUTERS = [
    Router(num_experts=60, top_k=4, normalize=False),
    Router(num_experts=64, top_k=6, score="sigmoid", num_groups=8, top_groups=3, scale=2.5),
    Router(num_experts=512, top_k=10),
    Router(num_experts=3, top_k=3),
]


def tally_of(router: Router, rows: int, counted: int | None = None) -> ExpertCounts:
    kind, where = (torch.int64, "cpu") if counted is None else (torch.int32, DEVICE)
    counts = [torch.zeros(router.num_experts, dtype=kind, device=where) for _ in range(2)]
    chosen = torch.full((rows, router.top_k), -1, dtype=torch.int32, device=where)
    real = None if counted is None else torch.tensor([counted], dtype=torch.int32, device=where)
    return ExpertCounts(counts[0], counts[1], chosen, real)


def check(tally: ExpertCounts, ids: Tensor, router: Router, counted: int) -> None:
    """Against a count written out. ids: what the same call returned, shared experts behind the routed ones."""
    expected = torch.zeros(router.num_experts, dtype=torch.int64)
    for row in ids[:counted, : router.top_k].tolist():
        for expert in row:
            expected[expert] += 1
    assert torch.equal(tally.tokens.cpu().long(), expected)
    assert torch.equal(tally.used.cpu().long(), (expected > 0).long())
    assert torch.equal(tally.chosen[: len(ids)].cpu(), ids[:, : router.top_k].cpu())


@pytest.fixture(params=["torch", *_core.supported_tiers()])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    return CpuOps(_core.WorkerPool([-1, -1]), request.param)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: str(r.num_experts))
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("rows", [1, 300])
def test_route_counts_the_routed_experts(ops: Ops, router: Router, shared: int, rows: int) -> None:
    logits = torch.randn(rows, router.num_experts, generator=torch.Generator().manual_seed(rows))
    tally = tally_of(router, rows + 5)
    routing = ops.bound(router)(logits, None, shared, tally)
    plain = ops.bound(router)(logits, None, shared)
    assert torch.equal(routing.ids, plain.ids) and torch.equal(routing.weights, plain.weights)
    check(tally, routing.ids, router, rows)
    assert tally.chosen[rows:].eq(-1).all()


@needs_triton
@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: str(r.num_experts))
@pytest.mark.parametrize("shared", [0, 2])
def test_route_on_a_gpu_leaves_out_padded_rows(router: Router, shared: int) -> None:
    from tandem.kernels.gpu.ops import GpuOps

    gpu = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    logits = torch.randn(9, router.num_experts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for counted in (9, 4, 0):
        tally = tally_of(router, 9, counted)
        routing = gpu.bound(router)(logits, None, shared, tally)
        assert torch.equal(routing.ids, gpu.bound(router)(logits, None, shared).ids)
        check(tally, routing.ids, router, counted)


@needs_triton
def test_a_gpu_refuses_counts_that_its_kernel_does_not_write() -> None:
    from tandem.kernels.gpu.ops import GpuOps

    gpu = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    with pytest.raises(KernelError, match="int32"):
        gpu.bound(ROUTERS[0])(torch.zeros(1, 60, device=DEVICE), tally=tally_of(ROUTERS[0], 1))


def test_the_core_refuses_arrays_of_other_shapes() -> None:
    ops, router = CpuOps(_core.WorkerPool([-1]), "scalar"), ROUTERS[0]
    good, logits = tally_of(router, 4), torch.zeros(4, 60)
    for bad in (
        good._replace(tokens=torch.zeros(59, dtype=torch.int64)),
        good._replace(used=torch.zeros(60, dtype=torch.int32)),
        good._replace(chosen=torch.zeros(3, 4, dtype=torch.int32)),
    ):
        with pytest.raises(KernelError):
            ops.bound(router)(logits, tally=bad)


class Chosen(TorchOps):
    """Notes what every layer chose."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []

    def bound(self, shape, *weights):
        route = super().bound(shape, *weights)
        if not isinstance(shape, Router):
            return route

        def noted(*given, **named):
            routing = route(*given, **named)
            self.ids.append(routing.ids[:, : shape.top_k])
            return routing

        return noted


VARIANTS = ["glm4_moe", "qwen3_moe-gpu", "mixtral"]  # shared experts that are fused; a dense layer; neither


def usage_of(session: Session, steps: list[list[tuple[int, list[int]]]]) -> ExpertUsage:
    usage = session.usage
    for step in steps:
        usage.begin(sum(len(tokens) for _, tokens in step))
        session.step(step)
    return usage


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_steps_count_as_the_others(tiny_models, variant: str) -> None:
    """A prefill, then decode steps, which the core does again without Python from the second one on."""
    steps = [[(s, list(range(5 + s, 9 + 3 * s)))] for s in range(3)]
    steps += [[(s, [11 * i + s]) for s in range(3)] for i in range(4)]
    noted = Chosen()
    oracle = Session(tiny_models[variant], ops=noted, counted=True)
    expected = usage_of(oracle, steps).read()
    session = Session(
        tiny_models[variant],
        ops=CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]),
        counted=True,
    )
    totals = usage_of(session, steps).read()
    assert None not in session.model._recorded.values() and session.model._recorded
    layers, experts = totals.tokens.shape
    tokens, reads = (torch.zeros(layers, experts, dtype=torch.int64) for _ in range(2))
    for i, ids in enumerate(noted.ids):
        here = torch.bincount(ids.flatten().long(), minlength=experts)
        tokens[i % layers] += here
        reads[i % layers] += here > 0
    assert torch.equal(expected.tokens, tokens) and torch.equal(expected.reads, reads)
    assert torch.equal(totals.tokens, tokens) and torch.equal(totals.reads, reads)
    assert tokens.sum(1).eq(sum(len(t) for step in steps for _, t in step) * noted.ids[0].shape[1]).all()


def fake_step(usage: ExpertUsage, ids: Tensor, counted: int) -> None:
    """As a CUDA graph does it: all rows are routed, the first `counted` are real."""
    router = Router(num_experts=usage.shape[1], top_k=ids.shape[2])
    usage.begin(torch.tensor([counted], dtype=torch.int32))
    for layer in range(usage.shape[0]):
        logits = torch.full((ids.shape[1], usage.shape[1]), -9.0).scatter_(1, ids[layer], 9.0)
        TorchOps().bound(router)(logits, tally=usage.tally(layer))


def test_totals_of_a_padded_batch_by_side() -> None:
    ids = torch.tensor([[[0, 1], [0, 2], [3, 4]], [[4, 3], [4, 3], [0, 1]]])  # 2 layers, 3 rows, of 5 experts
    on_gpu = torch.tensor([[True, False, False, False, False], [False, False, False, True, True]])
    usage = ExpertUsage(2, 5, padded=True, gpu_experts=on_gpu, chosen=(3, 2))
    usage.weigh(0, 100), usage.weigh(1, 7)
    fake_step(usage, ids, 2)
    fake_step(usage, ids, 1)
    totals = usage.read()
    assert totals.tokens.tolist() == [[3, 2, 1, 0, 0], [0, 0, 0, 3, 3]]
    assert totals.reads.tolist() == [[2, 2, 1, 0, 0], [0, 0, 0, 2, 2]]
    assert [t.tolist() for t in usage.sides()] == [[3, 6], [3, 0], [200, 28], [300, 0]]
    assert usage.chosen(2).tolist() == [[[0, 1], [3, 4]], [[0, 2], [3, 4]]]
    before = usage.sides()
    assert before.hit_rate == 9 / 12
    everywhere = [(layer, e, not on_gpu[layer, e]) for layer in range(2) for e in range(5)]
    usage.moved(lambda: everywhere, swaps=3)
    fake_step(usage, ids, 2)
    assert [t.tolist() for t in usage.sides()] == [t.tolist() for t in before]  # by the last reading
    usage.read()
    assert [t.tolist() for t in usage.sides()] == [[5, 6], [5, 4], [400, 28], [400, 14]]
    new = usage.sides().since(before)
    assert [t.tolist() for t in new] == [[2, 0], [2, 4], [200, 0], [100, 14]] and new.hit_rate == 2 / 8
    assert usage.swaps == 3


def test_counts_of_32_bits_may_overflow() -> None:
    usage = ExpertUsage(1, 2, padded=True)
    tally = usage.tally(0)
    for already in (2**30, 2**30, 2**30, 2**30, 2**30):  # 5 * 2^30 does not fit
        usage.begin(1)
        tally.tokens.add_(torch.tensor([already, 1], dtype=torch.int32))
        tokens = usage.read().tokens
    assert tokens.tolist() == [[5 * 2**30, 5]]


@pytest.mark.parametrize("read_every", [1, 7, 1000])
def test_each_use_counts_where_it_was_computed_whenever_counts_are_read(
    read_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts move after every step; nobody waits for counts. Against a count of every step on its own."""
    monkeypatch.setattr(usage_module, "MOST_MOVED", 20)
    layers, experts, rows, made = 3, 8, 4, torch.Generator().manual_seed(read_every)
    on_gpu = torch.rand(layers, experts, generator=made) < 0.5
    usage, kept = ExpertUsage(layers, experts, padded=True, gpu_experts=on_gpu), on_gpu
    for layer in range(layers):
        usage.weigh(layer, 10 + layer)
    there, everywhere = torch.zeros(2, layers, dtype=torch.int64), torch.zeros(2, layers, dtype=torch.int64)
    for step in range(60):
        ids = torch.rand(layers, rows, experts, generator=made).topk(2).indices
        fake_step(usage, ids, rows)
        used = torch.zeros(layers, experts, dtype=torch.int64)
        used.scatter_add_(1, ids.flatten(1), torch.ones_like(ids.flatten(1)))
        new = torch.stack((used, (used > 0).long()))
        everywhere += new.sum(2)
        there += (new * on_gpu).sum(2)
        if step % read_every == 0:
            usage.read()
        flip = torch.rand(layers, experts, generator=made) < 0.2
        on_gpu = on_gpu ^ flip
        usage.moved(partial(list, [(l, e, bool(on_gpu[l, e])) for l, e in flip.nonzero().tolist()]), 1)
        assert torch.equal(usage.gpu_experts, on_gpu)
    usage.read()
    nbytes = 10 + torch.arange(layers)
    expected = (there[0], everywhere[0] - there[0], there[1] * nbytes, (everywhere[1] - there[1]) * nbytes)
    assert [t.tolist() for t in usage.sides()] == [t.tolist() for t in expected]
    assert usage.swaps == 60 and not torch.equal(kept, on_gpu)


@pytest.mark.parametrize(
    "copy", [None, lambda source, target, nbytes: ctypes.memmove(target, source, nbytes)]
)
def test_counts_that_are_asked_for_are_of_that_time(copy: Copy | None) -> None:
    usage = ExpertUsage(1, 3, padded=True)
    usage.copy = copy
    before = usage.ask()
    fake_step(usage, torch.tensor([[[0, 1], [0, 2]]]), 2)
    now = usage.ask()
    fake_step(usage, torch.tensor([[[0, 1], [0, 2]]]), 2)
    assert before.tokens().tolist() == [[0, 0, 0]] and now.tokens().tolist() == [[2, 1, 1]]


def test_moves_count_as_of_their_step_however_many_counts_are_asked_for_later() -> None:
    ids, later = torch.tensor([[[0], [0]]]), 2 * usage_module.KEPT
    usage = ExpertUsage(1, 2, padded=True, gpu_experts=torch.tensor([[True, False]]))
    fake_step(usage, ids, 2)
    usage.moved(lambda: [(0, 0, False), (0, 1, True)], 1, usage.ask())
    for _ in range(later):
        fake_step(usage, ids, 2)
        usage.ask()
    usage.read()
    assert [t.tolist() for t in usage.sides()[:2]] == [[2], [2 * later]]


class FakeLive:
    def times(self) -> LiveTimes:
        return LiveTimes(9, 3, 60, 0.5, 0.125, 0.25, 0.0, {"begin": 0.5})


class FakeHandoff:
    def times(self) -> HandoffTimes:
        return HandoffTimes(7, 0.5, 0.25)

    def hints(self) -> PrefetchCounts:
        return PrefetchCounts(5, 4, 300)


def test_counts_on_a_gpu_are_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, readings = [100.0], []
    monkeypatch.setattr(expert_statistics, "monotonic", lambda: clock[0])
    on_gpu = torch.tensor([[True, False]])
    usage = ExpertUsage(1, 2, padded=True, gpu_experts=on_gpu)
    usage.weigh(0, 10)
    meter = ExpertMeter(usage, (4,), FakeHandoff(), FakeLive())
    for clock[0], idle in ((100.0, False), (100.5, False), (100.99, True), (101.5, False), (102.5, False)):
        fake_step(usage, torch.tensor([[[0], [0], [1], [0]]]), 4)
        readings.append(meter.stats(idle))
    assert [r.gpu_tokens for r in readings] == [[3], [3], [9], [9], [15]]
    assert [r.cpu_tokens for r in readings] == [[1], [1], [3], [3], [5]]
    last = readings[-1]
    assert (last.layers, last.gpu_bytes, last.cpu_bytes, last.hit_rate) == ([4], [50], [50], 0.75)
    assert (last.handoff_posts, last.handoff_wait_seconds, last.handoff_serve_seconds) == (7, 0.5, 0.25)
    assert (last.swap_seconds, last.swap_wait_seconds) == (0.75, 0.125)
    assert (last.hinted, last.hint_hits, last.hint_bytes) == (5, 4, 300)
    usage.moved(lambda: [(0, 0, False), (0, 1, True)], swaps=1)
    assert meter.stats(True).swaps == 1


@pytest.mark.parametrize("rows", [[2], [1, 2], [1, 2, 3], [0, 3], [0, 2, 3]])
def test_rows_are_taken_back_wherever_they_are(rows: list[int]) -> None:
    """Neighbours, and others; each was counted once."""
    ids = torch.tensor([[[0, 1], [0, 2], [3, 4], [1, 0]], [[4, 3], [4, 3], [0, 1], [2, 4]]])
    usage = ExpertUsage(2, 5, padded=True, chosen=(4, 2))
    fake_step(usage, ids, 4)
    usage.take_back(rows)
    kept = [row for row in range(4) if row not in rows]
    wanted = [[int((ids[layer, kept] == expert).sum()) for expert in range(5)] for layer in range(2)]
    assert usage.read().tokens.tolist() == wanted
