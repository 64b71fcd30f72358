"""The CPU's end of the hand-off, with a thread in the GPU's place that follows the same protocol."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fake_copies import FakeCopies, FakeTables
from fake_layers import Layer
from tandem import _core
from tandem.errors import KernelError
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes, HandoffTimes
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import Routing

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 48, 32, 6, 3
POSTED, LAYER, COUNT, FLAGS, DONE, FAILED, GAVE_UP = 0, 1, 2, 3, 32, 64, 96
HINTED, HINT_LAYER, HINT_IDS = 128, 129, 130
PATIENCE = 20.0
GATE_UP_BYTES = 2 * WIDTH * 64 * 2  # bfloat16, rows padded to 64


Hint = tuple[int, int, list[int]]  # number of the post before it, layer, experts


class FakeGpu:
    """Posts and reads answers as the CUDA kernels do."""

    def __init__(self, workers: int = 2, late: bool = False, cpu: int = -1) -> None:
        torch.manual_seed(0)
        *self.at, size = _core.mailbox_offsets(TOKENS, HIDDEN, TOP_K, late)
        room = np.zeros(size + 128, dtype=np.uint8)
        first = -room.ctypes.data % 128
        self.memory = torch.from_numpy(room[first : first + size])
        self.words = self.memory[:640].view(torch.int32)
        self.late = late
        self.mailbox = _core.Mailbox(self.memory, TOKENS, HIDDEN, TOP_K, late)
        workspace = _core.Workspace(_core.WorkerPool([cpu, *[-1] * (workers - 1)]), "scalar")
        self.layers = [self._layer(workspace) for _ in range(2)]
        assert [self.mailbox.add(layer.core) for layer in self.layers] == [0, 1]
        self.thread = _core.PostThread(self.mailbox)

    def serve(self, posts: int, patience: float = PATIENCE) -> None:
        """A step's posts, some of which may have been posted before."""
        self.thread.begin(posts, patience)
        self.thread.finish()

    def _layer(self, workspace: _core.Workspace) -> PackedExperts:
        layer = PackedExperts(workspace, EXPERTS, HIDDEN, WIDTH, "bf16")
        for expert in range(EXPERTS - 1):  # the last one is missing
            layer.load(
                expert, torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)
            )
        return layer

    def part(self, index: int, tokens: int, columns: int, dtype: torch.dtype, half: int = 0) -> Tensor:
        first, size = self.at[index] + half * self.at[5], tokens * columns * dtype.itemsize
        return self.memory[first : first + size].view(dtype).view(tokens, columns)

    def post(self, number: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor, flags: int = 0) -> None:
        tokens, half = len(x), flags & _core.SECOND_HALF
        self.part(0, tokens, HIDDEN, torch.bfloat16, half).copy_(x)
        self.part(1, tokens, TOP_K, torch.int32, half).copy_(ids)
        self.part(2, tokens, TOP_K, torch.float32, half).copy_(weights)
        self.words[LAYER], self.words[COUNT], self.words[FLAGS] = layer, tokens, flags
        self.words[POSTED] = number

    def prefetch(self, number: int, layer: int, ids: list[int]) -> None:
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
                    self.prefetch(*hint)
                    time.sleep(seconds)

        thread = threading.Thread(target=gpu)
        thread.start()
        self.serve(2)
        thread.join()
        for layer, answer, (x, ids, weights) in zip(self.layers, got, made, strict=True):
            assert torch.equal(answer, layer.forward(x, ids, weights, torch.empty(2, HIDDEN)))
        return self.mailbox.hinted, self.mailbox.hits, self.mailbox.bytes_ahead

    def answer(self, number: int, tokens: int, half: int = 0) -> Tensor:
        until = time.monotonic() + PATIENCE
        while int(self.words[DONE]) != number:
            assert time.monotonic() < until
            time.sleep(1e-4)
        return self.part(3, tokens, HIDDEN, torch.float32, half).clone()

    def right(self, layer: int, made: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self.layers[layer].forward(*made, torch.empty(len(made[0]), HIDDEN))


def says(
    right: Callable[[int, int, int], bool], *hints: Hint, workers: int = 2, forgotten: int | None = None
) -> bool:
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


def moving(layers: int, copies: FakeCopies | None = None) -> tuple[_core.ExchangeTurn, list[Layer]]:
    """An exchange in each of so many layers beside a fake GPU, whose copies arrive when somebody asks."""
    sides, copies = [Layer(seed) for seed in range(layers)], copies or FakeCopies()
    copies.prompt = True
    copies.tables = FakeTables([side.gpu for side in sides])
    moves, exchanges = _core.MovingLayers(), []
    for index, side in enumerate(sides):
        moves.add(side.cpu.core, side.gpu.slot_of.numpy(), side.gpu.address(0), side.gpu.slots)
        exchanges.append(tuple(side.exchange(index, 0, 0)))
    room = torch.zeros(layers, sides[0].cpu.bytes_per_expert, dtype=torch.uint8)
    stages = [room[index].data_ptr() for index in range(layers)]
    turn = _core.ExchangeTurn(moves, copies.functions, (1, 2, 3), copies.tables.copied, exchanges, stages)
    KEPT.append((turn, copies, room, sides))
    return turn, sides


KEPT: list[object] = []  # what exchanges have addresses of


def play_late(gpu: FakeGpu, posts: int, seconds: float) -> threading.Thread:
    """All posts to layer 0, and some time between an answer and the next one."""
    made = batch(2)

    def play() -> None:
        for number in range(1, posts + 1):
            gpu.post(number, 0, *made)
            assert torch.equal(gpu.answer(number, 2), gpu.right(0, made))
            time.sleep(seconds)

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def play_until(gpu: FakeGpu, ended: Callable[[], bool]) -> threading.Thread:
    """Posts to layer 0 one after the other. A place is changed right behind an answer or not at all, so nobody knows
    how many posts it takes."""
    made, until = batch(2), time.monotonic() + PATIENCE

    def play() -> None:
        numbers = itertools.count(1)
        try:
            while not ended() and time.monotonic() < until:
                gpu.post(number := next(numbers), 0, *made)
                gpu.answer(number, 2)
                time.sleep(0.001)
        finally:
            gpu.thread.stop()

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def test_an_exchange_is_made_while_posts_are_answered() -> None:
    """Its copies by the thread that waits, its places by the one that answers."""
    gpu = FakeGpu()
    turn, sides = moving(2)
    before = [side.gpu.table.clone() for side in sides]

    def shown(side: Layer, table: Tensor) -> bool:
        return not side.gpu.table.equal(table) and int((side.gpu.table >= 0).sum()) == int((table >= 0).sum())

    gpu.thread.begin(_core.UNTIL_STOPPED, PATIENCE)
    gpu.mailbox.meanwhile(turn)
    thread = play_until(gpu, lambda: all(map(shown, sides, before)))
    gpu.thread.finish()
    thread.join()
    assert turn.run(0.0) and not turn.troubles() and turn.bytes_given == 4 * sides[0].cpu.bytes_per_expert
    for side in sides:
        side.check()


def test_no_copy_is_made_before_the_step_s_first_post() -> None:
    """The GPU may not have ended the step before, whose tables an exchange changes."""
    gpu = FakeGpu()
    turn, _ = moving(1)
    gpu.thread.begin(1, PATIENCE)
    gpu.mailbox.meanwhile(turn)
    timer = threading.Timer(0.2, lambda: (given.append(turn.bytes_given), gpu.post(1, 0, *batch(2))))
    given: list[int] = []
    timer.start()
    gpu.thread.finish()
    timer.join()
    assert given == [0]


def test_who_answers_does_no_piece_that_calls_the_driver() -> None:
    turn, _ = moving(1)
    assert not turn.next() and turn.bytes_given == 0
    while turn.next_of_step():
        pass
    assert turn.bytes_given > 0
    assert turn.next() and not turn.next()  # its place, and nothing else
    assert turn.next_of_step()


def test_work_that_is_not_done_belongs_to_its_caller_again() -> None:
    gpu = FakeGpu()
    turn, sides = moving(1)
    gpu.thread.begin(1, PATIENCE)
    gpu.mailbox.meanwhile(turn)
    thread = play_late(gpu, 1, 0.0)
    gpu.thread.finish()
    thread.join()
    assert sys.getrefcount(turn) == 3  # here, in KEPT, and the call's own
    assert turn.run(PATIENCE)
    sides[0].check()


class SlowCopies(FakeCopies):
    """The driver returns when they are done, as those of memory that is not registered: some time after `answered`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.answered = threading.Event(), threading.Event()

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.begun.set()
        assert self.answered.wait(PATIENCE)
        time.sleep(0.2)
        return super()._copy(target, source, nbytes, stream)


def test_a_step_that_waits_for_its_own_work_says_how_long() -> None:
    """The last post comes when a piece has begun, which takes longer than the answer."""
    gpu, copies, made = FakeGpu(), SlowCopies(), batch(2)
    turn, _ = moving(1, copies)

    def play() -> None:
        gpu.post(1, 0, *made)
        gpu.answer(1, 2)
        assert copies.begun.wait(PATIENCE)
        gpu.post(2, 0, *made)
        gpu.answer(2, 2)
        copies.answered.set()

    gpu.thread.begin(2, PATIENCE)
    gpu.mailbox.meanwhile(turn)
    thread = threading.Thread(target=play)
    thread.start()
    gpu.thread.finish()
    thread.join()
    assert turn.seconds >= 0.4 and 0 < turn.late_seconds < turn.seconds

def decision(layers: int) -> _core.UseDecision:
    """Work of so many pieces for the thread that answers."""
    kinds = np.float32, np.int32, np.int8, np.int8, np.int64
    work = _core.UseDecision(*(np.zeros((layers, 4), kind) for kind in kinds))
    work.begin(np.zeros((layers, 4), np.int32), 1.0, 0.0, 0.0, 0.0, 0.0)
    return work


def test_posts_do_not_wait_for_other_work() -> None:
    """The best of ten: the thread that posts may have to wait for a CPU."""
    assert any(done_before_a_post() < 100_000 for _ in range(10))


def done_before_a_post() -> int:
    gpu, work, made = FakeGpu(), decision(100_000), batch(2)
    gpu.post(1, 0, *made)

    def play() -> None:
        gpu.answer(1, 2)
        gpu.post(2, 0, *made)

    thread = threading.Thread(target=play)
    thread.start()
    gpu.thread.begin(2, PATIENCE)
    gpu.mailbox.meanwhile(work)
    gpu.thread.finish()
    thread.join()
    left = 0
    while work.next():
        left += 1
    return 100_000 - left


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
    gpu.serve(len(batches))
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
    gpu.serve(1)
    assert gpu.answer(1, 2).eq(0).all()


def fails(gpu: FakeGpu, match: str, patience: float = PATIENCE) -> None:
    with pytest.raises((RuntimeError, KernelError), match=match):
        gpu.serve(1, patience)
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
    gpu.serve(1)
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
    gpu.serve(1)
    gpu.prefetch(1, 1, [0, 1])
    gpu.post(2, 1, x, ids, weights)
    gpu.serve(1)
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
    gpu.serve(1)
    took = time.monotonic() - started
    thread.join()
    waited, served = gpu.mailbox.wait_seconds, gpu.mailbox.serve_seconds
    assert waited > 0 and served > 0 and waited + served <= took


# -- who waits, and for what ---


def test_posts_are_answered_while_the_step_stands_elsewhere() -> None:
    """In a call of the driver that returns when the graph has ended, say."""
    gpu, made = FakeGpu(), batch(2)
    gpu.thread.begin(3, PATIENCE)
    thread = play_late(gpu, 3, 0.0)
    thread.join()  # nobody is in `finish`
    gpu.thread.finish()
    assert gpu.mailbox.posts == 3 and torch.equal(gpu.part(3, 2, HIDDEN, torch.float32), gpu.answer(3, 2))
    assert made is not None


def test_posts_need_no_lock_of_python_s() -> None:
    """A post that is there is answered while a call that holds the lock goes on."""
    gpu, made = FakeGpu(), batch(2)
    sleep = ctypes.PyDLL(None).usleep  # holds the lock
    gpu.thread.begin(1, PATIENCE)
    gpu.post(1, 1, *made)
    for _ in range(int(PATIENCE / 0.01)):
        sleep(10_000)
        if int(gpu.words[DONE]) == 1:
            break
    assert int(gpu.words[DONE]) == 1
    gpu.thread.finish()


def test_a_post_says_where_it_lies_and_whether_it_is_the_last() -> None:
    gpu, made = FakeGpu(late=True), [batch(3), batch(3), batch(3)]
    gpu.mailbox.defer(0, 1, TOP_K)
    flags = [_core.SECOND_HALF, 0, _core.SECOND_HALF | _core.LAST_POST]
    got = list[Tensor]()

    def play() -> None:
        for number, (each, flag) in enumerate(zip(made, flags, strict=True), 1):
            gpu.post(number, 0, *each, flag)
            got.append(gpu.answer(number, 3, flag & _core.SECOND_HALF))

    gpu.thread.begin(_core.UNTIL_STOPPED, PATIENCE)
    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    gpu.thread.stop()
    gpu.thread.finish()
    torch.testing.assert_close(sum(got), sum(gpu.right(0, each) for each in made))
    assert not torch.equal(got[0], gpu.right(0, made[0])) and gpu.mailbox.posts == 3


def test_posts_of_nobody_knows_how_many_are_answered_until_stopped() -> None:
    gpu = FakeGpu()
    gpu.thread.begin(_core.UNTIL_STOPPED, 1e-3)  # nothing comes for longer, which is no error
    time.sleep(0.05)
    play_late(gpu, 5, 1e-3).join()
    gpu.thread.stop()
    gpu.thread.finish()
    assert gpu.mailbox.posts == 5


def test_what_is_posted_when_it_is_stopped_is_answered() -> None:
    gpu, made = FakeGpu(), batch(2)
    gpu.post(1, 0, *made)
    gpu.thread.begin(_core.UNTIL_STOPPED, PATIENCE)
    gpu.thread.stop()
    gpu.thread.finish()
    assert gpu.mailbox.posts in (0, 1)
    if gpu.mailbox.posts:
        assert torch.equal(gpu.answer(1, 2), gpu.right(0, made))
    else:  # it was stopped before it looked, and it can be begun again
        gpu.serve(1)


def test_a_step_is_given_up_by_another_thread() -> None:
    gpu = FakeGpu()
    gpu.thread.begin(1, PATIENCE)
    timer = threading.Timer(0.05, gpu.thread.cancel)
    timer.start()
    with pytest.raises(RuntimeError, match="the step was given up"):
        gpu.thread.finish()
    timer.join()
    assert int(gpu.words[FAILED]) == 1
    gpu.mailbox.reset()
    gpu.post(1, 0, *batch(2))
    gpu.serve(1)


def test_a_mailbox_stays_as_it_is_while_posts_are_answered() -> None:
    gpu = FakeGpu()
    gpu.thread.begin(1, PATIENCE)
    for change in (
        gpu.mailbox.reset,
        lambda: gpu.mailbox.add(gpu.layers[0].core),
        lambda: gpu.thread.begin(1, 1.0),
    ):
        with pytest.raises((RuntimeError, KernelError), match="answered"):
            change()
    gpu.post(1, 0, *batch(2))
    gpu.thread.finish()
    gpu.thread.finish()  # nothing was begun
    gpu.mailbox.reset()


def test_a_fork_does_not_wait_for_its_parent_s_posts() -> None:
    gpu = FakeGpu()
    gpu.thread.begin(1, PATIENCE)
    child = os.fork()
    if child == 0:
        try:
            gpu.thread.finish()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gpu.post(1, 0, *batch(2))
    gpu.thread.finish()


def test_an_ended_thread_answers_nothing() -> None:
    gpu = FakeGpu()
    gpu.thread.begin(1, PATIENCE)
    gpu.thread.end()
    with pytest.raises(RuntimeError, match="given up"):
        gpu.thread.finish()
    with pytest.raises(RuntimeError, match="has ended"):
        gpu.thread.begin(1, PATIENCE)
    gpu.thread.end()


def test_a_fork_answers_nothing_and_its_parent_goes_on() -> None:
    gpu = FakeGpu()
    gpu.thread.begin(1, PATIENCE)
    child = os.fork()
    if child == 0:
        try:
            gpu.thread.begin(1, PATIENCE)
        except RuntimeError as error:
            gpu.thread.end()
            os._exit(0 if "not in its fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gpu.post(1, 0, *batch(2))
    gpu.thread.finish()


@pytest.mark.parametrize("posts", [1, _core.UNTIL_STOPPED])
def test_an_interpreter_ends_with_a_post_open(posts: int) -> None:
    """Neither waits for the post, nor looks at memory that is gone."""
    script = f"import test_mailbox; gpu = test_mailbox.FakeGpu(); gpu.thread.begin({posts}, 600.0)"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, timeout=120)
    assert ended.returncode == 0


def test_a_cpu_that_may_not_be_used_is_refused() -> None:
    with pytest.raises((ValueError, KernelError), match="CPU 99999"):
        FakeGpu(cpu=99999)


def test_posts_are_answered_on_the_cpu_of_worker_0() -> None:
    cpu, threads = max(os.sched_getaffinity(0)), Path("/proc/self/task")
    gpu = FakeGpu(cpu=cpu)
    answering = [each.name for each in threads.iterdir() if name_of(each) == "tandem-posts"]
    assert {cpu} in [os.sched_getaffinity(int(each)) for each in answering]
    gpu.thread.end()


def name_of(task: Path) -> str:
    """The thread's name; empty where it has ended meanwhile."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "comm").read_text().strip()
    return ""


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


# -- deferred experts ---


def test_the_last_post_of_a_graph_has_no_deferred_experts() -> None:
    gpu, (x, ids, weights) = FakeGpu(late=True), batch(3)
    gpu.mailbox.defer(0, 1, TOP_K)
    for number in (1, 2):  # each begins with the first half
        gpu.post(number, 0, x, ids, weights)
        gpu.serve(1)
        assert torch.equal(
            gpu.answer(number, 3), gpu.layers[0].forward(x, ids, weights, torch.empty(3, HIDDEN))
        )


def test_what_is_late_is_forgotten_after_a_failure() -> None:
    gpu, (x, ids, weights) = FakeGpu(late=True), batch(3)
    gpu.mailbox.defer(0, 1, TOP_K)
    gpu.post(1, 0, x, ids, weights)

    def play() -> None:  # fewer tokens than are deferred
        gpu.answer(1, 3)
        gpu.words[LAYER], gpu.words[COUNT], gpu.words[FLAGS] = 1, 2, _core.SECOND_HALF
        gpu.words[POSTED] = 2

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(RuntimeError, match="deferred experts of 3 tokens wait, and the GPU asked for 2"):
        gpu.serve(2)
    thread.join()
    assert int(gpu.words[FAILED]) == 1
    gpu.mailbox.reset()
    gpu.post(1, 1, x, ids, weights)
    gpu.serve(1)
    assert torch.equal(gpu.answer(1, 3), gpu.layers[1].forward(x, ids, weights, torch.empty(3, HIDDEN)))


@pytest.mark.parametrize(
    ("late", "rule"),
    [(False, (0, 1, TOP_K)), (True, (2, 1, TOP_K)), (True, (0, -1, TOP_K)), (True, (0, 1, TOP_K + 1))],
)
def test_layers_that_cannot_defer_are_refused(late: bool, rule: tuple[int, int, int]) -> None:
    with pytest.raises(KernelError, match="cannot defer"):
        FakeGpu(late=late).mailbox.defer(*rule)
