"""`tandem.LLM` called by several threads: each gets its own answers, and requests of all run in the same steps."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
import torch

from fake_model import FakeModel, check_pages, fake_engine, greedy_reference
from quiet_clock import PATIENCE
from tandem import LLM, SamplingParams
from tandem.engine.offline.turns import Turns
from tandem.errors import BusyError, EngineError, RequestError

THREADS = 8


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


class GatedModel(FakeModel):
    """Counts threads that are in it at once, and rows of its widest batch; its first batch waits for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.threads, self.most_threads, self.most_rows = 0, 0, 0
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def forward(self, batch, kv):
        self.threads += 1
        self.most_threads = max(self.most_threads, self.threads)
        self.most_rows = max(self.most_rows, len(batch.logits_rows))
        self.begun.set()
        assert self.gate.wait(PATIENCE)
        try:
            return super().forward(batch, kv)
        finally:
            self.threads -= 1


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns after a microsecond: what they must not share is soon broken."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], object]) -> list:
    with ThreadPoolExecutor(THREADS) as pool:
        return [each.result(PATIENCE) for each in [pool.submit(work, i) for i in range(THREADS)]]


def test_threads_get_their_own_answers(hasty_threads) -> None:
    model = GatedModel()
    llm = LLM.from_engine(fake_engine(model))

    def work(i: int) -> None:
        for length in range(1, 12):
            prompts = [[2 + i, 3, length], [2 + i, 4]]
            whole = llm.generate(prompts, greedy(length), progress=False)
            assert [one.token_ids for one in whole] == [greedy_reference(p, length) for p in prompts]
            pieces = llm.generate(prompts[0], greedy(length), stream=True)
            assert [token for piece in pieces for token in piece.token_ids] == whole[0].token_ids
            dropped = llm.generate(prompts[1], greedy(40), stream=True)
            next(dropped)
            del dropped
            with pytest.raises(RequestError):
                llm.generate([[2], []], greedy(1), progress=False)

    in_threads(work)
    llm.generate([2, 3], greedy(1), progress=False)  # ends what was dropped
    assert model.most_threads == 1 and not llm.engine.has_work() and llm.engine.stats().running == 0


def test_requests_of_all_threads_run_in_the_same_steps() -> None:
    model = GatedModel()
    llm = LLM.from_engine(fake_engine(model))
    model.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(llm.generate, [[2, 3]], greedy(20), progress=False)
        assert model.begun.wait(PATIENCE)
        second = pool.submit(llm.generate, [[4, 5]], greedy(20), progress=False)
        while not llm._calls._turns._adding:  # it waits for the step, and needs this one to end
            time.sleep(0.001)
        model.gate.set()
        assert first.result(PATIENCE)[0].token_ids == greedy_reference([2, 3], 20)
        assert second.result(PATIENCE)[0].token_ids == greedy_reference([4, 5], 20)
    assert model.most_rows == 2


def test_a_thread_whose_outputs_have_come_does_not_wait_for_a_turn() -> None:
    turns, came, asked = Turns(), threading.Event(), threading.Event()

    def wanted() -> bool:
        asked.set()
        return came.is_set()

    def other() -> bool:
        with turns.stepping(unless=wanted) as mine:
            return mine

    with ThreadPoolExecutor(1) as pool:
        with turns.adding():
            result = pool.submit(other)
            assert asked.wait(PATIENCE)
            came.set()
        assert result.result(PATIENCE) is False
    with turns.stepping(unless=lambda: False) as mine:
        assert mine


def test_a_turn_is_given_back_after_an_error() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="lost"), turns.adding():
        raise ValueError("lost")
    with turns.stepping(unless=lambda: False) as mine:
        assert mine


def test_a_model_on_the_cpu_asks_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: pytest.fail("this makes a context on a GPU"))
    with Turns().adding():
        pass


def test_threads_get_their_answers_while_a_call_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ended = LLM.from_engine(fake_engine()), threading.Event()
    add = llm.engine.add

    def busy_until_the_other_has_ended(request) -> None:
        if request.prompt_ids == [4, 5] and not ended.is_set():
            raise BusyError("wait")
        add(request)

    monkeypatch.setattr(llm.engine, "add", busy_until_the_other_has_ended)
    with ThreadPoolExecutor(1) as pool:
        first = llm.generate([2, 3], greedy(20), stream=True)
        second = pool.submit(llm.generate, [4, 5], greedy(3), progress=False)
        assert [t for piece in first for t in piece.token_ids] == greedy_reference([2, 3], 20)
        ended.set()
        assert second.result(PATIENCE)[0].token_ids == greedy_reference([4, 5], 3)


def test_a_call_in_the_midst_of_its_own_step_is_refused() -> None:
    llm = LLM.from_engine(fake_engine(model := GatedModel()))
    forward = model.forward
    model.forward = lambda *_: llm.generate([4], greedy(1), progress=False)
    with pytest.raises(EngineError, match="in the midst of its own step"):
        llm.generate([2, 3], greedy(2), progress=False)
    model.forward = forward
    assert llm.generate([2, 3], greedy(6), progress=False)[0].token_ids == greedy_reference([2, 3], 6)


# --- Ctrl+C


def test_who_let_an_adder_go_first_goes_on_where_that_one_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, mine, waits = Turns(), threading.Event(), threading.Event()
    wait, changed = turns._changed.wait, turns._changed

    def interrupted(timeout: float | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            waits.set()
            wait(timeout)
            return
        changed.release()
        assert waits.wait(PATIENCE)
        changed.acquire()
        signal.raise_signal(signal.SIGINT)

    def other() -> None:
        with turns.adding():
            mine.set()
            while not turns._adding:
                time.sleep(0.001)
        with turns.stepping(unless=lambda: False):
            pass

    monkeypatch.setattr(changed, "wait", interrupted)
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert mine.wait(PATIENCE)
    with pytest.raises(KeyboardInterrupt), turns.adding():
        pass
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_an_interrupt_at_any_use_of_a_lock_leaves_others_their_turn(nothing_collected) -> None:
    llm = LLM.from_engine(fake_engine())
    for at in itertools.count(1):
        left = at

        def interrupted(frame: FrameType, _event: str, _argument: object) -> None:
            nonlocal left
            if frame.f_code.co_filename == threading.__file__:
                left -= 1
                if left == 0:
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(interrupted)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                llm.generate([2, 3], greedy(2), progress=False)
        finally:
            sys.setprofile(None)
        other = threading.Thread(target=llm.generate, args=([4], greedy(1)), kwargs={"progress": False}, daemon=True)
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive()
        if left > 0:
            break
    assert at > 20


def test_an_interrupt_ends_a_call_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_engine(fake_engine())
    asked = itertools.count()

    def busy(_request) -> None:
        times = next(asked)
        assert times < 100, "it was not interrupted"
        if times == 1:
            signal.raise_signal(signal.SIGINT)
        raise BusyError("wait")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(llm.engine, "add", busy)
        llm.generate([2, 3], greedy(6), progress=False)
    assert llm.generate([2, 3], greedy(6), progress=False)[0].token_ids == greedy_reference([2, 3], 6)


class Interrupted:
    """A profile function: raises SIGINT at the `at`-th call of a function of the engine, or of what belongs to it. Not
    where Python closes a generator: it ignores what is raised there."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and "/tandem/engine/" in code.co_filename and code.co_name != "<genexpr>":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """Garbage of other tests is not closed in this one's calls: Python ignores an interrupt there."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_interrupt_at_any_call_leaves_the_engine_usable(nothing_collected) -> None:
    model = GatedModel()
    llm = LLM.from_engine(fake_engine(model))
    prompts, expected = [[2, 3], [4, 5, 6]], [greedy_reference(p, 5) for p in ([2, 3], [4, 5, 6])]
    interrupts = 0
    for at in itertools.count(1):
        profile = Interrupted(at)
        sys.setprofile(profile)
        try:
            llm.generate(prompts, greedy(5), progress=False)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            sys.setprofile(None)
        assert [one.token_ids for one in llm.generate(prompts, greedy(5), progress=False)] == expected
        check_pages(llm.engine)
        if profile.left > 0:
            break
    assert interrupts == at - 1 > 100


def test_an_interrupt_ends_the_requests_and_the_next_call_works() -> None:
    llm = LLM.from_engine(fake_engine(model := GatedModel()))
    forward = model.forward

    def interrupted(batch, kv):
        signal.raise_signal(signal.SIGINT)
        return forward(batch, kv)

    model.forward = interrupted
    for stream in (False, True):
        with pytest.raises(KeyboardInterrupt):
            list(llm.generate([[2, 3], [4]], greedy(9), stream=stream))
    model.forward = forward
    assert llm.generate([2, 3], greedy(6))[0].token_ids == greedy_reference([2, 3], 6)
    assert not llm.engine.has_work() and llm.engine.stats().running == 0
