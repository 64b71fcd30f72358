"""An abort that finds the GPU dead says so, and not in CUDA's words."""

from __future__ import annotations

from typing import Any

import pytest

from fake_model import fake_engine, request
from tandem.engine.engine import Engine
from tandem.errors import EngineError


def running() -> Engine:
    engine = fake_engine()
    engine.add(request("a", [3, 4], max_tokens=9, ignore_eos=True))
    engine.step()
    return engine


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its state can not be given back."""
    engine: Any = running()

    def finish(sequence: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine._scheduler, "finish", finish)
    return engine


def test_a_dead_gpu_is_named(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_failure() -> None:
        raise EngineError("the GPU stopped working")

    monkeypatch.setattr(broken._runner, "after_failure", after_failure)
    with pytest.raises(EngineError, match="the GPU stopped"):
        broken.abort("a")


def test_another_error_stays_what_it_is(broken: Any) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        broken.abort("a")


def test_unknown_names_are_ignored() -> None:
    running().abort("nobody")
