"""The first of several ranks on GPUs, without a GPU: what it tells the others, when, and what ends it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fake_model import greedy_reference, request, run, token_ids
from replayed_graphs import replayed_engine
from tandem.engine.pace import PrefillPace
from tandem.engine.step.path import Path
from tandem.errors import EngineError, RankLost

LONG = [9] * 60


class NotedLeader:
    """Keeps what it is to tell."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool, int | None]] = []
        self.events: list[str] = []

    def step(
        self, chunks: Any, warms: bool = False, streams: bool = False, committed: int | None = None, task: str = ""
    ) -> None:
        self.events.append(task or "step")
        if task in ("", "begins"):
            self.steps.append((sum(chunk.length for chunk in chunks), warms, committed))

    def close(self) -> None: ...


class FailingGroup:
    """Of GPUs; another rank is missing once it is told so."""

    def __init__(self) -> None:
        self.missing, self.patience = False, list[float]()

    def be_patient(self, seconds: float) -> None:
        self.patience.append(seconds)

    def check(self) -> None:
        if self.missing:
            raise RankLost("rank 1 did not answer a sum of rank 0 in time")


def test_every_step_is_told_with_what_the_last_one_settled(monkeypatch) -> None:
    leader, group = NotedLeader(), FailingGroup()
    engine, _ = replayed_engine(monkeypatch, prompts=(), leader=leader, group=group)
    assert group.patience == [60.0]  # all graphs are captured
    engine.add(request("a", [2, 3, 4], max_tokens=3))
    assert token_ids(run(engine)["a", 0]) == greedy_reference([2, 3, 4], 3)
    assert leader.steps == [(3, False, None), (1, False, 3), (1, False, 1)]


def test_a_prompt_takes_turns_with_steps_and_no_step_shrinks(monkeypatch, caplog) -> None:
    """On one stream, and told piece by piece: sums of all ranks have one order."""
    monkeypatch.setattr(PrefillPace, "slice_seconds", lambda *_: 0.0)
    leader = NotedLeader()
    engine, _ = replayed_engine(monkeypatch, prompts=(), shared_tokens=8, leader=leader, group=FailingGroup())
    with caplog.at_level(logging.DEBUG, "tandem.engine.step.path"):
        engine.add(request("a", [2, 3, 4], max_tokens=9))
        engine.step()
        engine.add(request("b", LONG, max_tokens=2))
        answers = run(engine)
    assert token_ids(answers["b", 0]) == greedy_reference(LONG, 2)
    text = " ".join(record.message for record in caplog.records if record.name == "tandem.engine.step.path")
    assert not any(path.value in text for path in (Path.BACKGROUND_GRAPH, Path.EAGER_SHRINKING))
    assert "step piece step piece" in " ".join(leader.events) and engine._runner._streams.steps is None
    assert 0 < leader.events.count("begins") == leader.events.count("ends")
    assert sum(rows for rows, _, _ in leader.steps) == 3 + 8 + len(LONG) + 1


def test_a_missing_rank_ends_the_engine(monkeypatch) -> None:
    """Its answers may be wrong, and the ranks would not meet again."""
    group = FailingGroup()
    engine, _ = replayed_engine(monkeypatch, prompts=(), leader=NotedLeader(), group=group)
    engine.add(request("a", [2, 3, 4], max_tokens=3))
    engine.step()
    group.missing = True
    with pytest.raises(EngineError, match="would not meet again") as failed:
        engine.step()
    assert isinstance(failed.value.__context__, RankLost)
