"""`server.engine_process` without a process: what it does around the engine it builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from fake_model import VOCAB, FakeModel, fake_config, fake_engine, fake_plan
from idle_engine import PLAN, IdleEngine
from quiet_clock import PATIENCE
from tandem.engine.protocol import (
    EngineStats,
    ExpertTraffic,
    GenerateRequest,
    LookAtExperts,
    SamplingSettings,
)
from tandem.errors import EngineError
from tandem.flags.engine_config import EngineConfig
from tandem.server import engine_process
from tandem.server.engine_process import EngineLoop, LoadedEngine, load_engine, run_engine, warm_up
from tandem.server.messages import AbortRequest, FromEngine, StartEngine, StartFailed, StepOutputs, StopEngine


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """The CPUs of this thread, given back afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def load_with_cpus(monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...]) -> None:
    engine = SimpleNamespace(plan=fake_plan(cpus=cpus), model_config=fake_config())
    monkeypatch.setattr("tandem.checkpoint.resolve_model", Path)
    parts = SimpleNamespace(plan=engine.plan, handoff=None)
    monkeypatch.setattr("tandem.engine.start.loader.load_parts", lambda *_: parts)
    monkeypatch.setattr("tandem.engine.engine.Engine.from_parts", lambda _: engine)
    load_engine(EngineConfig(model="m", skip_server_warmup=True))


def test_the_main_thread_runs_where_worker_0_belongs(monkeypatch, allowed) -> None:
    load_with_cpus(monkeypatch, (max(allowed), -1))
    assert os.sched_getaffinity(0) == {max(allowed)}


def test_without_pinning_it_runs_anywhere(monkeypatch, allowed) -> None:
    load_with_cpus(monkeypatch, (-1, -1))
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize(
    ("wrong", "why"),
    [("fail_on", "RuntimeError: the fake model was told to fail"), ("nan_on", "NaN or infinite")],
)
def test_a_first_step_that_fails_ends_the_start(wrong: str, why: str) -> None:
    model = FakeModel()
    setattr(model, wrong, {VOCAB // 2})
    with pytest.raises(EngineError, match=f"the first step failed: .*{why}"):
        warm_up(fake_engine(model), VOCAB)


def test_a_first_step_that_works_leaves_nothing_behind() -> None:
    engine = fake_engine()
    warm_up(engine, VOCAB)
    assert not engine.has_work() and engine.stats().pages_cached == 0


class Wire:
    """A socket on which these messages have arrived."""

    def __init__(self, *messages) -> None:
        self._messages = list[bytes]()
        self.arrive(*messages)

    def arrive(self, *messages) -> None:
        self._messages += [msgspec.msgpack.encode(each) for each in messages]

    def poll(self, _: int) -> bool:
        return bool(self._messages)

    def recv(self, flags: int = 0) -> bytes:
        if not self._messages:
            raise zmq.Again
        return self._messages.pop(0)

    def send(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_closed_whatever_ends_it(monkeypatch, fails) -> None:
    """What it has started beside itself ends with it."""
    engine, closed = IdleEngine(), []
    engine.close = lambda: closed.append(1)
    if fails:
        engine.has_work = lambda: 1 / 0
    loaded = LoadedEngine(engine, PLAN, "m", "m", 8)
    monkeypatch.setattr(engine_process, "find_loader", lambda name: lambda config: loaded)
    wire = Wire(StartEngine(config=EngineConfig(model="m"), loader="a:b"), StopEngine())
    try:
        assert run_engine(wire) == 0 and not fails
    except ZeroDivisionError:
        assert fails
    assert closed == [1]


@pytest.mark.parametrize(
    ("error", "said", "traced"),
    [
        (MemoryError(), "memory ran out while the model was loaded: free some", False),
        (RuntimeError(), "^RuntimeError$", True),
        (MemoryError("57 MiB"), r"memory ran out while the model was loaded \(57 MiB\): free some", False),
        (EngineError("no"), "^no$", False),
        (ValueError("a bug"), "ValueError: a bug", True),
    ],
)
def test_why_it_could_not_start_is_one_line_and_a_trace_is_of_bugs_alone(
    monkeypatch, capsys, error, said, traced
) -> None:
    def fail(config):
        raise error

    sent = []
    monkeypatch.setattr(engine_process, "find_loader", lambda name: fail)
    wire = Wire(StartEngine(config=EngineConfig(model="m"), loader="a:b"))
    wire.send = sent.append
    assert run_engine(wire) == 1
    assert re.search(said, msgspec.msgpack.decode(sent[0], type=StartFailed).message)
    assert ("Traceback" in capsys.readouterr().err) == traced


def test_who_comes_while_a_step_runs_is_handled_after_it() -> None:
    """A step hears of requests and aborts alone. Messages keep their order; an engine without work does not sleep."""
    engine, told = IdleEngine(), []
    requests = [GenerateRequest(id=name, prompt_ids=[5], sampling=SamplingSettings()) for name in "ab"]
    wire, sent, step = Wire(requests[0]), [], engine.step

    def stepped(comes) -> list:
        wire.arrive(LookAtExperts())
        told.append(comes())
        wire.arrive(requests[1], StopEngine())
        told.append(comes() and comes())
        engine.step = step
        return step(comes)

    engine.step, wire.send = stepped, sent.append
    loop = EngineLoop(engine, wire)
    loop.turn()
    assert told == [False, True] and loop.has_work() and not engine.has_work()
    wire.poll = lambda _: 1 / 0
    loop.run()
    said = [msgspec.msgpack.decode(each, type=FromEngine) for each in sent]
    kinds = [type(each) for each in said]
    answers = [output.id for each in said if isinstance(each, StepOutputs) for output in each.outputs]
    assert answers == ["a", "b"] and kinds.index(ExpertTraffic) > kinds.index(StepOutputs)


def test_who_has_an_answer_finds_it_counted() -> None:
    """Statistics leave before the last outputs of an engine that becomes idle, and of each step where they are due."""
    wire, sent = Wire(GenerateRequest(id="a", prompt_ids=[5], sampling=SamplingSettings())), list[bytes]()
    wire.send = sent.append
    EngineLoop(IdleEngine(), wire).turn()
    stats, outputs = (msgspec.msgpack.decode(each, type=FromEngine) for each in sent)
    assert isinstance(outputs, StepOutputs) and outputs.outputs[0].finish_reason is not None
    assert isinstance(stats, EngineStats) and not stats.running


def test_a_step_hears_of_an_abort() -> None:
    """So a long prompt that nobody waits for ends soon."""
    engine, wire, told = IdleEngine(), Wire(), list[bool]()

    def stepped(comes) -> list:
        told.append(comes())
        wire.arrive(AbortRequest(id="a"))
        told.append(comes())
        return []

    engine.step, wire.send = stepped, lambda _: None
    wire.arrive(GenerateRequest(id="a", prompt_ids=[5], sampling=SamplingSettings()))
    EngineLoop(engine, wire).turn()
    assert told == [False, True]


def test_a_lost_rank_is_a_line_of_the_log_and_no_trace() -> None:
    """Its trace would hide what the server says of it. What else goes wrong keeps its trace."""
    code = (
        "import logging; from tandem.errors import EngineError, RankLost; "
        "from tandem.server.terminal import tell_lost_ranks; tell_lost_ranks(); log = logging.getLogger('tandem')\n"
        "for error in (RankLost('another rank has ended'), EngineError('the GPU stopped working')):\n"
        "    try: raise error\n"
        "    except Exception: log.exception('a step of %d failed', 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    said, rest = done.stderr.split("\n", 1)
    assert said == "a step of 2 failed: another rank has ended"
    assert rest.startswith("a step of 2 failed\nTraceback") and rest.count("Traceback") == 1


@pytest.mark.parametrize("level, lines", [("debug", 3), ("info", 2), ("error", 0)])
def test_an_engine_logs_as_much_as_its_server(level: str, lines: int) -> None:
    """With a time in front. A lost rank stays a line; other packages say no more than before."""
    code = (
        "import logging; from tandem.errors import RankLost; "
        f"from tandem.server.terminal import log_to_terminal; log_to_terminal('{level}')\n"
        "log = logging.getLogger('tandem.engine.gpu_runner'); log.debug('8 rows: decode graph')\n"
        "log.info('captured CUDA graphs'); logging.getLogger('torch').info('no')\n"
        "try: raise RankLost('another rank has ended')\n"
        "except Exception: log.warning('a step failed', exc_info=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    got = done.stderr.splitlines()
    assert len(got) == lines and all(line.startswith("20") for line in got)
    assert not lines or got[-1].endswith("WARNING a step failed: another rank has ended")
