"""Posts of a running graph are answered whatever the driver does: a thread that loads code, or gives memory back, keeps
a lock of the driver until the GPU has ended what it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_copies import advance
from gpu import AVAILABLE, DEVICE, fed, needs_cuda, needs_triton
from tandem import _core
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import BestRows, StepEnd
from tandem.engine.sampling.masks import bits_of, new_mask
from tandem.errors import EngineError
from tandem.experts.live.copies import CudaCopies, hold_all
from tandem.experts.live.exchange import LiveExchange
from tandem.experts.live.virtual import Exchange
from tandem.experts.placement import place
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing

if AVAILABLE:
    from tandem.experts.handoff import Handoff
    from tandem.experts.handoff_counts import HandoffSizes
    from tandem.experts.hybrid_store import HybridStore
    from tandem.kernels.gpu import best, nvrtc
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton, needs_cuda]
EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS, VOCAB = 8, 64, 48, 3, 8, 100
POSTS, SPIN_SECONDS, PATIENCE = 500, 2.0, 20.0


class Step:
    """A graph of many posts to one layer, some of whose experts are on the GPU, and the best token of a row."""

    def __init__(self, posts: int = POSTS, rows: Tensor | None = None) -> None:
        torch.manual_seed(0)
        self.ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))
        self.handoff = Handoff(HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K), DEVICE, PATIENCE)
        self.store = HybridStore(self.ops, place("uniform", 1, EXPERTS, 3), self.handoff, HIDDEN, live=True)
        self.layer: Any = self.store.layer(0, EXPERTS, WIDTH, "bf16")
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        self.weights = [[torch.randn(shape) / 8 for shape in shapes] for _ in range(EXPERTS)]
        self.layer.load(fed(EXPERTS, lambda e: tuple(self.weights[e])))
        self.x = torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
        self.routing = Routing(ids.to(DEVICE), torch.rand(TOKENS, TOP_K, device=DEVICE))
        self.masks, self.fetched = GraphMasks(1, DEVICE), BestRows(1, DEVICE)
        self.logits = torch.randn(1, VOCAB, device=DEVICE)
        self.stream = torch.cuda.Stream()
        self.end = StepEnd(DEVICE)
        self._rows = rows
        with torch.cuda.stream(self.stream):
            self._computed()
            self.fetched.fetch(self.logits, self.masks)
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with (
            self.handoff.recording(rows) as posted,
            torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"),
        ):
            self.outputs = [self._computed() for _ in range(posts)]
            self.best = self.fetched.fetch(self.logits, self.masks)
        self.posts = len(posted)

    def _computed(self) -> Tensor:
        out: Tensor = self.layer.wait(self.layer.submit(self.x, self.routing))
        return out

    def expected(self) -> Tensor:
        whole = self.ops.cpu.experts(EXPERTS, HIDDEN, WIDTH, "bf16")
        for expert, matrices in enumerate(self.weights):
            whole.load(expert, *matrices)
        return whole.forward(self.x.float().cpu(), self.routing.ids.cpu(), self.routing.weights.cpu())

    def run(
        self, beside: Callable[[], None] = lambda: None, make: Callable[[], None] = lambda: None
    ) -> float:
        """Seconds until the last post was answered. beside: called once the graph runs. make: makes its masks."""
        answered, before = list[float](), self.handoff.used()[0]

        def look() -> None:
            while self.handoff.used()[0] < before + self.posts and perf_counter() < started + PATIENCE:
                sleep(1e-3)
            answered.append(perf_counter() - started)

        watch = threading.Thread(target=look)
        with torch.cuda.stream(self.stream):
            started = perf_counter()
            self.handoff.begin(self.posts)
            self.graph.replay()
            watch.start()
            beside()
            self.masks.make(make)
            self.end.mark()  # waits for the driver's lock, where somebody has it
            self.handoff.finish()
            watch.join()
            self.end.wait()
            self.handoff.check()
            self.masks.check()
        return answered[0]


class Blocker:
    """A kernel of two seconds on a stream of its own, and a thread whose calls wait for it with the driver's lock."""

    def __init__(self) -> None:
        self._memory = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
        source = 'extern "C" __global__ void nothing() {}'
        from cuda.core import Device, Program, ProgramOptions

        program = Program(source, "c++", options=ProgramOptions(arch=f"sm_{Device().arch}"))
        self._module = program.compile("cubin")
        self._stream = torch.cuda.Stream()
        self._threads: list[threading.Thread] = []
        self.seconds = 0.0

    def __call__(self) -> None:
        clock = torch.cuda.get_device_properties(DEVICE).clock_rate * 1e3  # kHz
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(SPIN_SECONDS * clock))
        self._threads = [threading.Thread(target=self._load)]
        for thread in self._threads:
            thread.start()
        sleep(0.1)

    def _load(self) -> None:
        started = perf_counter()
        del self._memory
        torch.cuda.empty_cache()
        kernel = self._module.get_kernel("nothing")
        nvrtc.launch(kernel, 1, 1, torch.cuda.Stream().cuda_stream)
        self.seconds = perf_counter() - started

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("what", ["plain", "schema", "moves"])
def test_a_running_graph_is_answered_while_the_driver_waits(what: str) -> None:
    step = Step()
    alone = sorted(step.run() for _ in range(5))[2]
    mask, made, blocker = new_mask(-(-VOCAB // 32)), list[float](), Blocker()

    def make() -> None:
        mask[:] = bits_of({7}, VOCAB)
        made.append(perf_counter())

    exchange = exchange_of(step) if what == "moves" else None
    step.masks.send([mask] if what == "schema" else [])

    def beside() -> None:
        blocker()
        if exchange is not None:
            exchange.begin()

    blocked = step.run(beside, make)
    blocker.join()
    print(
        f"{what}: {POSTS} posts in {blocked * 1e3:.1f} ms beside the blocker, {alone * 1e3:.1f} ms without;"
        f" its thread waited {blocker.seconds:.2f} s"
    )
    assert blocker.seconds > 0.5 * SPIN_SECONDS, "nothing was blocked: this test shows nothing"
    assert blocked < alone + 0.5 * SPIN_SECONDS
    torch.testing.assert_close(step.outputs[-1].float().cpu(), step.expected(), rtol=2.0**-6, atol=2.0**-5)
    if what == "schema":
        assert made and step.best[0, 0] == 7
    if exchange is not None:
        for _ in range(10):
            settled = advance(exchange)
            torch.cuda.synchronize()
            if settled.done:
                break
        assert settled.done


def exchange_of(step: Step) -> LiveExchange:
    """Of an expert that leaves slot 0, ready to begin."""
    dma = CudaCopies(DEVICE)
    assert step.layer.sides is not None and step.store.tables is not None
    hold_all([step.layer.sides.cpu], dma)
    exchange = LiveExchange(
        [step.layer.sides],
        step.store.tables,
        dma,
        1 << 30,
        between_answers=step.handoff.between_answers,
        tail_seconds=60.0,
    )
    coming = int((step.layer.slot_of < 0).nonzero()[0])
    exchange.add([Exchange(0, 0, int((step.layer.slot_of == 0).nonzero()[0]), coming)])
    exchange.prepare()
    return exchange


@pytest.mark.parametrize("real", [1, 5, TOKENS])
def test_rows_that_fill_a_graph_up_are_not_posted_and_equal_the_last(real: int) -> None:
    rows = torch.tensor([real], dtype=torch.int32, device=DEVICE)
    step = Step(3, rows)
    step.x[real:] = step.x[real - 1]
    step.routing.ids[real:] = step.routing.ids[real - 1]
    step.routing.weights[real:] = step.routing.weights[real - 1]
    step.run()
    out, expected = step.outputs[-1].float().cpu(), step.expected()
    torch.testing.assert_close(out, expected, rtol=2.0**-6, atol=2.0**-5)
    assert torch.equal(out[real:], out[real - 1 : real].expand(TOKENS - real, -1))
    mailbox = step.handoff._mailbox
    assert mailbox is not None and int(mailbox._words[2]) == real


def test_masks_that_come_too_late_fail_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph goes on without them: nobody may take what it chose."""
    monkeypatch.setattr(best, "MOST_POLLS", 1 << 10)
    step, mask = Step(1), new_mask(-(-VOCAB // 32))
    step.masks.send([mask])
    with pytest.raises(EngineError, match="too late"):
        step.run(make=lambda: sleep(0.5))
    step.run()
    assert np.isfinite(step.best.numpy()[0, 1]) or not mask.any()
