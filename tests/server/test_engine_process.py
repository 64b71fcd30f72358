"""`server.engine_process` without a process: what it does around the engine it builds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_model import VOCAB, FakeModel, fake_config, fake_engine, fake_plan
from tandem.config import EngineConfig
from tandem.errors import EngineError
from tandem.server.engine_process import load_engine, warm_up


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """The CPUs of this thread, given back afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def load_with_cpus(monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...]) -> None:
    engine = SimpleNamespace(plan=fake_plan(cpus=cpus), model_config=fake_config())
    monkeypatch.setattr("tandem.checkpoint.resolve_model", Path)
    monkeypatch.setattr("tandem.engine.start.loader.load_parts", lambda *_: None)
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
