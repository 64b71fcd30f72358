"""What an answer's first token took: its time in the queue, and its prompt's."""

from __future__ import annotations

import pytest

from fake_model import fake_engine, request
from tandem.engine import answer, sequence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    for module in (answer, sequence):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def test_the_queue_and_the_prompt_are_told_once_with_the_first_token(clock) -> None:
    """The second runs when the first has ended; a prompt of 40 tokens takes three steps of 16."""
    engine = fake_engine(max_running_requests=1)
    engine.add(request("a", [3, 4], max_tokens=3, ignore_eos=True))
    engine.add(request("b", [5] * 40, max_tokens=2, ignore_eos=True))
    took = {}
    while engine.has_work():
        clock[0] += 1.0
        for output in engine.step():
            if output.completion_tokens == 1:
                took[output.id] = output.first_token
            else:
                assert output.first_token is None
    assert (took["a"].queue, took["a"].prefill) == (1.0, 0.0)
    assert (took["b"].queue, took["b"].prefill) == (4.0, 2.0)
