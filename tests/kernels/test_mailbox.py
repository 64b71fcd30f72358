"""The CPU's end of the hand-off, with a thread in the GPU's place that follows the same protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem import _core
from tandem.errors import KernelError
from tandem.experts.handoff import Handoff, HandoffSizes, HandoffTimes
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import Routing

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 48, 32, 6, 3
POSTED, LAYER, COUNT, DONE, FAILED, GAVE_UP = 0, 1, 2, 32, 64, 96
HINTED, HINT_LAYER, HINT_IDS = 128, 129, 130
PATIENCE = 20.0
GATE_UP_BYTES = 2 * WIDTH * 64 * 2  # bfloat16, rows padded to 64


Hint = tuple[int, int, list[int]]  # number of the post before it, layer, experts


class FakeGpu:
    """Posts and reads answers as the CUDA kernels do."""

    def __init__(self, workers: int = 2, late: bool = False) -> None:
        torch.manual_seed(0)
        *self.at, size = _core.mailbox_offsets(TOKENS, HIDDEN, TOP_K, late)
        room = np.zeros(size + 128, dtype=np.uint8)
        first = -room.ctypes.data % 128
        self.memory = torch.from_numpy(room[first : first + size])
        self.words = self.memory[:640].view(torch.int32)
        self.mailbox = _core.Mailbox(self.memory, TOKENS, HIDDEN, TOP_K, late)
        workspace = _core.Workspace(_core.WorkerPool([-1] * workers), "scalar")
        self.layers = [self._layer(workspace) for _ in range(2)]
        assert [self.mailbox.add(layer.core) for layer in self.layers] == [0, 1]

    def _layer(self, workspace: _core.Workspace) -> PackedExperts:
        layer = PackedExperts(workspace, EXPERTS, HIDDEN, WIDTH, "bf16")
        for expert in range(EXPERTS - 1):  # the last one is missing
            layer.load(
                expert, torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)
            )
        return layer

    def part(self, index: int, tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
        first, size = self.at[index], tokens * columns * dtype.itemsize
        return self.memory[first : first + size].view(dtype).view(tokens, columns)

    def post(self, number: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tokens = len(x)
        self.part(0, tokens, HIDDEN, torch.bfloat16).copy_(x)
        self.part(1, tokens, TOP_K, torch.int32).copy_(ids)
        self.part(2, tokens, TOP_K, torch.float32).copy_(weights)
        self.words[LAYER], self.words[COUNT] = layer, tokens
        self.words[POSTED] = number

    def hint(self, number: int, layer: int, ids: list[int]) -> None:
        first = self.at[4]
        self.memory[first : first + 4 * len(ids)].view(torch.int32).copy_(
            torch.tensor(ids, dtype=torch.int32)
        )
        self.words[HINT_LAYER], self.words[HINT_IDS] = layer, len(ids)
        self.words[HINTED] = number

    def play(self, *hints: Hint, seconds: float) -> tuple[int, int, int]:
        """Two posts, to layer 0 and layer 1, with these hints between them, each of which the CPU has some time to
        see. Returns what it says of them, and checks that both answers are right."""
        made, got = [batch(2), batch(2)], list[Tensor]()
        made[1][1].copy_(ASKED)

        def gpu() -> None:
            for i, (x, ids, weights) in enumerate(made):
                self.post(i + 1, i, x, ids, weights)
                got.append(self.answer(i + 1, len(x)))
                for hint in hints if i == 0 else ():
                    self.hint(*hint)
                    time.sleep(seconds)

        thread = threading.Thread(target=gpu)
        thread.start()
        self.mailbox.serve(2, PATIENCE)
        thread.join()
        for layer, answer, (x, ids, weights) in zip(self.layers, got, made, strict=True):
            assert torch.equal(answer, layer.forward(x, ids, weights, torch.empty(2, HIDDEN)))
        return self.mailbox.hinted, self.mailbox.hits, self.mailbox.bytes_ahead

    def answer(self, number: int, tokens: int) -> Tensor:
        until = time.monotonic() + PATIENCE
        while int(self.words[DONE]) != number:
            assert time.monotonic() < until
            time.sleep(1e-4)
        return self.part(3, tokens, HIDDEN, torch.float32).clone()


def says(right: Callable[[int, int, int], bool], *hints: Hint, workers: int = 2, forgotten: int | None = None) -> bool:
    """Whether the CPU's end says so of hints, hits and bytes, given time enough to see hints on a busy machine."""
    for seconds in (0.02, 0.2, 2.0):
        gpu = FakeGpu(workers)
        if forgotten is not None:
            gpu.layers[1].core.forget(forgotten)
        if right(*gpu.play(*hints, seconds=seconds)):
            return True
    return False


ASKED = torch.tensor([[0, 2, 3], [3, 0, -1]], dtype=torch.int32)


def batch(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:TOP_K] for _ in range(tokens)]).int()
    ids[0, 0] = -1  # lives elsewhere
    return torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOP_K)


def pieces(layers: int) -> _core.ExchangeTurn:
    """One for each layer: an exchange where nothing moves."""
    sides = _core.MovingLayers()
    for _ in range(layers):
        sides.add_none()
    exchanges = [(layer, 0, 0, 1) for layer in range(layers)]
    return _core.ExchangeTurn(sides, (0, 0), (1, 2, 3), (0, 0, 0), exchanges, [0] * layers)


def test_other_work_is_done_between_posts() -> None:
    """The GPU is late, so that there is time for some of it."""
    gpu, works, (x, ids, weights) = FakeGpu(), [pieces(3), pieces(1)], batch(2)
    for work in (works[0], *works):
        gpu.mailbox.meanwhile(work)
    gpu.post(1, 0, x, ids, weights)
    late = threading.Timer(0.2, gpu.post, [2, 0, x, ids, weights])
    late.start()
    gpu.mailbox.serve(2, PATIENCE)
    late.join()
    assert 1 <= len(works[0].troubles()) <= 3
    assert torch.equal(gpu.answer(2, 2), gpu.layers[0].forward(x, ids, weights, torch.empty(2, HIDDEN)))


def test_posts_do_not_wait_for_other_work() -> None:
    gpu, work, (x, ids, weights) = FakeGpu(), pieces(1000), batch(2)
    gpu.mailbox.meanwhile(work)
    gpu.post(1, 0, x, ids, weights)
    gpu.mailbox.serve(1, PATIENCE)
    assert not work.troubles()
    gpu.post(2, 0, x, ids, weights)
    gpu.mailbox.serve(1, PATIENCE)
    assert not work.troubles() and work.next()


def test_a_post_that_comes_at_once_finds_most_of_other_work_undone() -> None:
    """The best of ten: the thread that posts may have to wait for a CPU."""
    assert any(done_before_a_post() < 1000 for _ in range(10))


def done_before_a_post() -> int:
    gpu, work, (x, ids, weights) = FakeGpu(), pieces(100_000), batch(2)
    gpu.mailbox.meanwhile(work)
    gpu.post(1, 0, x, ids, weights)

    def play() -> None:
        gpu.answer(1, 2)
        gpu.post(2, 0, x, ids, weights)

    thread = threading.Thread(target=play)
    thread.start()
    gpu.mailbox.serve(2, PATIENCE)
    thread.join()
    return len(work.troubles()) if work.next() else 100_000


def test_posts_are_answered_in_turn() -> None:
    gpu = FakeGpu()
    batches = [batch(tokens) for tokens in (1, 4, 2)]
    got: list[Tensor] = []

    def play() -> None:
        for i, (x, ids, weights) in enumerate(batches):
            gpu.post(i + 1, i % 2, x, ids, weights)
            got.append(gpu.answer(i + 1, len(x)))

    thread = threading.Thread(target=play)
    thread.start()
    gpu.mailbox.serve(len(batches), PATIENCE)
    thread.join()
    for i, (x, ids, weights) in enumerate(batches):
        expected = gpu.layers[i % 2].forward(x, ids, weights, torch.empty(len(x), HIDDEN))
        assert torch.equal(got[i], expected)
    assert gpu.mailbox.posts == 3
    assert gpu.mailbox.experts_used == sum(len(set(ids[ids >= 0].tolist())) for _, ids, _ in batches)


def test_a_batch_that_lives_elsewhere_is_zero() -> None:
    gpu = FakeGpu()
    x, ids, weights = batch(2)
    gpu.part(3, 2, HIDDEN, torch.float32).fill_(7.0)
    gpu.post(1, 0, x, torch.full_like(ids, -1), weights)
    gpu.mailbox.serve(1, PATIENCE)
    assert gpu.answer(1, 2).eq(0).all()


def fails(gpu: FakeGpu, match: str, patience: float = PATIENCE) -> None:
    with pytest.raises((RuntimeError, KernelError), match=match):
        gpu.mailbox.serve(1, patience)
    assert int(gpu.words[FAILED]) == 1  # the GPU need not wait


def test_no_post_within_the_time_is_an_error() -> None:
    fails(FakeGpu(), "asked for no experts for 0.05", 0.05)


def test_a_gpu_that_gave_up_is_an_error() -> None:
    gpu = FakeGpu()
    gpu.words[GAVE_UP] = 1
    fails(gpu, "given up")


def test_what_a_layer_throws_arrives() -> None:
    gpu = FakeGpu()
    x, ids, weights = batch(1)
    gpu.post(1, 0, x, torch.full_like(ids, EXPERTS - 1), weights)
    fails(gpu, "routed to before it was loaded")


@pytest.mark.parametrize(("layer", "tokens"), [(2, 1), (-1, 1), (0, TOKENS + 1), (0, -1)])
def test_nonsense_is_refused(layer: int, tokens: int) -> None:
    gpu = FakeGpu()
    gpu.post(0, 0, *batch(1))
    gpu.words[LAYER], gpu.words[COUNT], gpu.words[POSTED] = layer, tokens, 1
    fails(gpu, "do not exist")


def test_after_a_reset_it_works_again() -> None:
    gpu = FakeGpu()
    fails(gpu, "no experts", 0.01)
    gpu.mailbox.reset()
    assert gpu.words.eq(0).all()
    gpu.post(1, 1, *batch(3))
    gpu.mailbox.serve(1, PATIENCE)
    assert int(gpu.words[DONE]) == 1


@pytest.mark.parametrize(
    ("ids", "hinted", "hits"),
    [
        ([3, 0, 2], 3, 3),
        ([1, 3, 4], 3, 1),
        ([4, 1], 2, 0),
        ([2, -1, 2, 2, 0, -1], 2, 2),  # repeated, or on the GPU
        ([EXPERTS - 1, EXPERTS, -7, 1 << 30, 3], 1, 1),  # not loaded, or of no layer
        ([], 0, 0),
    ],
)
def test_hinted_experts_are_fetched_before_the_post(ids: list[int], hinted: int, hits: int) -> None:
    wanted = (hinted, hits, hinted * GATE_UP_BYTES)
    assert says(lambda *said: said == wanted, (1, 1, ids), workers=1)


def test_workers_that_sleep_leave_their_share() -> None:
    def right(hinted: int, hits: int, nbytes: int) -> bool:
        return (hinted, hits) == (3, 3) and 0 < nbytes <= 3 * GATE_UP_BYTES

    assert says(right, (1, 1, [3, 0, 2]), workers=3)


@pytest.mark.parametrize(
    "hint",
    [
        (0, 1, [3]),  # of no post
        (2, 1, [3]),  # of the next one
        (77, 1, [3]),
        (1, 2, [3]),  # of no layer
        (1, -1, [3]),
        (1, 1, [3] * (4 * TOP_K + 1)),  # more than there is room for
    ],
    ids=["zero", "next", "far", "layer", "negative", "many"],
)
def test_other_hints_are_ignored(hint: tuple[int, int, list[int]]) -> None:
    assert FakeGpu().play(hint, seconds=0.02) == (0, 0, 0)


def test_a_hint_of_another_layer_hits_nothing() -> None:
    assert says(lambda *said: said == (2, 0, 2 * GATE_UP_BYTES), (1, 0, [0, 2]), workers=1)


def test_a_post_has_one_hint() -> None:
    assert says(lambda hinted, hits, _: (hinted, hits) == (1, 1), (1, 1, [3]), (1, 1, [2, 0, 4]))


def test_a_hint_that_comes_with_the_post_is_too_late() -> None:
    gpu, (x, ids, weights) = FakeGpu(), batch(1)
    gpu.post(1, 0, x, ids, weights)
    gpu.mailbox.serve(1, PATIENCE)
    gpu.hint(1, 1, [0, 1])
    gpu.post(2, 1, x, ids, weights)
    gpu.mailbox.serve(1, PATIENCE)
    assert (gpu.mailbox.hinted, gpu.mailbox.bytes_ahead) == (0, 0)


def test_experts_that_went_away_since_are_left_out() -> None:
    """A hint may be of before an exchange."""
    assert says(lambda hinted, hits, _: (hinted, hits) == (1, 1), (1, 1, [4, 3]), forgotten=4)


def test_wrong_memory_is_refused() -> None:
    size = _core.mailbox_offsets(TOKENS, HIDDEN, TOP_K)[-1]
    with pytest.raises(KernelError, match="shape"):
        _core.Mailbox(torch.zeros(size - 1, dtype=torch.uint8), TOKENS, HIDDEN, TOP_K)
    with pytest.raises(KernelError, match=">= 1"):
        _core.mailbox_offsets(0, HIDDEN, TOP_K)


def test_waiting_and_computing_are_timed_apart() -> None:
    gpu, (x, ids, weights) = FakeGpu(), batch(2)
    assert (gpu.mailbox.posts, gpu.mailbox.wait_seconds, gpu.mailbox.serve_seconds) == (0, 0.0, 0.0)

    def play() -> None:
        time.sleep(0.05)
        gpu.post(1, 0, x, ids, weights)

    thread = threading.Thread(target=play)
    thread.start()
    started = time.monotonic()
    gpu.mailbox.serve(1, PATIENCE)
    took = time.monotonic() - started
    thread.join()
    waited, served = gpu.mailbox.wait_seconds, gpu.mailbox.serve_seconds
    assert waited > 0 and served > 0 and waited + served <= took


def test_batches_outside_graphs_are_timed_too() -> None:
    gpu, (x, ids, weights) = FakeGpu(), batch(3)
    handoff = Handoff(HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K), torch.device("cpu"), PATIENCE)
    assert handoff.times() == HandoffTimes()
    number, slots = handoff.add(gpu.layers[1]), torch.full_like(ids, -1)
    for _ in range(2):
        handoff.post(number, x, Routing(ids, weights), slots)
        handoff.collect(3)
    times = handoff.times()
    assert times.posts == 2 and times.wait_seconds >= 0 and times.serve_seconds > 0


# -- experts that are late ---


def test_the_last_post_of_a_graph_has_no_late_experts() -> None:
    gpu, (x, ids, weights) = FakeGpu(late=True), batch(3)
    gpu.mailbox.defer(0, 1, TOP_K)
    for number in (1, 2):  # each begins with the first half
        gpu.post(number, 0, x, ids, weights)
        gpu.mailbox.serve(1, PATIENCE)
        assert torch.equal(
            gpu.answer(number, 3), gpu.layers[0].forward(x, ids, weights, torch.empty(3, HIDDEN))
        )


def test_what_is_late_is_forgotten_after_a_failure() -> None:
    gpu, (x, ids, weights) = FakeGpu(late=True), batch(3)
    gpu.mailbox.defer(0, 1, TOP_K)
    gpu.post(1, 0, x, ids, weights)

    def play() -> None:  # fewer tokens than are late
        gpu.answer(1, 3)
        gpu.words[LAYER], gpu.words[COUNT] = 1, 2
        gpu.words[POSTED] = 2

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(RuntimeError, match="late experts of 3 tokens wait, and the GPU asked for 2"):
        gpu.mailbox.serve(2, PATIENCE)
    thread.join()
    assert int(gpu.words[FAILED]) == 1
    gpu.mailbox.reset()
    gpu.post(1, 1, x, ids, weights)
    gpu.mailbox.serve(1, PATIENCE)
    assert torch.equal(gpu.answer(1, 3), gpu.layers[1].forward(x, ids, weights, torch.empty(3, HIDDEN)))


@pytest.mark.parametrize(
    ("late", "rule"), [(False, (0, 1, TOP_K)), (True, (2, 1, TOP_K)), (True, (0, -1, TOP_K)), (True, (0, 1, TOP_K + 1))]
)
def test_layers_that_cannot_defer_are_refused(late: bool, rule: tuple[int, int, int]) -> None:
    with pytest.raises(KernelError, match="cannot defer"):
        FakeGpu(late=late).mailbox.defer(*rule)
