"""`server.engine_process` without a process: what it does around the engine it builds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_model import fake_config, fake_plan
from tandem.config import EngineConfig
from tandem.server.engine_process import load_engine


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """The CPUs of this thread, given back afterwards."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def load_with_cpus(monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...]) -> None:
    engine = SimpleNamespace(plan=fake_plan(cpus=cpus), model_config=fake_config())
    monkeypatch.setattr("tandem.checkpoint.resolve_model", Path)
    monkeypatch.setattr("tandem.engine.loader.load_parts", lambda *_: None)
    monkeypatch.setattr("tandem.engine.engine.Engine.from_parts", lambda _: engine)
    load_engine(EngineConfig(model="m", skip_server_warmup=True))


def test_the_main_thread_runs_where_worker_0_belongs(monkeypatch, allowed) -> None:
    load_with_cpus(monkeypatch, (max(allowed), -1))
    assert os.sched_getaffinity(0) == {max(allowed)}


def test_without_pinning_it_runs_anywhere(monkeypatch, allowed) -> None:
    load_with_cpus(monkeypatch, (-1, -1))
    assert os.sched_getaffinity(0) == allowed
