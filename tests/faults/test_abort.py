"""An abort that finds the GPU dead says so, and not in CUDA's words; one that finds no text ends the answer."""

from __future__ import annotations

from typing import Any

import pytest

from fake_model import FakeModel, FakeTokenizer, check_pages, fake_config, fake_engine, fake_plan, request
from tandem.engine.engine import Engine
from tandem.engine.start.parts import EngineParts
from tandem.errors import EngineError, RequestError


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


class NeverWhole(FakeTokenizer):
    """Whose texts end in part of a character, and which cannot be read once `broken`."""

    broken = False

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.broken:
            raise RequestError("the model's tokenizer cannot write these tokens")
        return super().decode(ids, skip_special_tokens) + "\ufffd"


def test_an_answer_whose_text_cannot_be_had_is_aborted_all_the_same() -> None:
    tokenizer = NeverWhole()
    engine = Engine.from_parts(EngineParts(fake_plan(), fake_config(), FakeModel(), tokenizer))
    engine.add(request("a", [3, 4, 5], max_tokens=20, ignore_eos=True))
    engine.add(request("b", [4, 5, 6], max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    tokenizer.broken = True
    engine.abort("a")
    tokenizer.broken = False
    assert {o.id: o.finish_reason for o in engine.step()} == {"a": "abort", "b": None}
    check_pages(engine)
