"""Prompts beside steps on a device: the host goes on with a pass while a step runs, and the next one follows."""

from __future__ import annotations

from typing import Any

import pytest

from fake_model import check_pages, fake_engine, greedy_reference, request, run, token_ids
from pausing_model import DEPTH, LONG, PausingFake
from tandem.engine.cpu_runner import CpuRunner
from tandem.engine.engine import Engine
from tandem.engine.sequence import Chunk
from tandem.engine.step.prefill import HostPlace, LayerPieces, PrefillTask
from tandem.engine.step.step import Running, Step, StepOutput


class OverlappingPlace(HostPlace):
    overlaps = True


class Device:
    """A runner whose steps are under way while `meanwhile` is called."""

    def __init__(self, inner: CpuRunner) -> None:
        self._inner, self.running, self.called_in_step = inner, False, 0

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        self.running = True
        output = self._inner.start(step).result()

        def finish() -> StepOutput:
            self.running = False
            return output

        return Running(finish)

    def pause(self, chunks: list[Chunk]) -> PrefillTask:
        made = self._inner
        pieces = LayerPieces(made._model, made._states, made._paused.fill(chunks), None)
        return PrefillTask(pieces, OverlappingPlace())

    def runs_beside(self, chunks: list[Chunk]) -> bool:
        return all(chunk.length == 1 for chunk in chunks)

    def step_ended(self) -> bool:
        return not self.running

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def engine_of(model: PausingFake, **plan: Any) -> Engine:
    """One piece in a step; "a" decodes."""
    engine = fake_engine(model, **{"max_step_tokens": 64} | plan)
    engine._scheduler.pace.slice_seconds = lambda: 0.0
    engine._runner = engine._overlap._executor = Device(engine._runner)
    engine.add(request("a", [2, 3, 4], max_tokens=60, ignore_eos=True))
    engine.step()
    return engine


def finished(engine: Engine) -> dict[str, list[int]]:
    return {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}


def test_chunks_follow_each_other_while_steps_run() -> None:
    """Once the first has begun, no step runs without a pass until the prompt's first token."""
    model = PausingFake()
    engine = engine_of(model)
    engine.add(request("b", LONG, max_tokens=4))
    got: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_work():
        outputs = engine.step()
        assert [o.id for o in outputs if o.id == "a"] == ["a"] or len(got["a"]) == 59
        for output in outputs:
            got[output.id] += output.token_ids
        assert got["b"] or engine._scheduler.in_flight
        check_pages(engine)
    assert model.layers_run[: 2 * DEPTH] == [*range(DEPTH)] * 2
    assert got["b"] == greedy_reference(LONG, 4) and len(got["a"]) == 59


def test_a_prompt_that_comes_meanwhile_begins_in_the_same_step() -> None:
    """Its request was taken before the step in which the pass before it ends."""
    engine = engine_of(PausingFake())
    engine.add(request("b", LONG[:20], max_tokens=1))
    engine.step()
    engine.add(request("c", LONG[:24], max_tokens=1))
    ended: list[str] = []
    while not ended:
        ended = [o.id for o in engine.step() if o.finish_reason]
    assert ended == ["b"] and [c.sequence.request_id for c in engine._scheduler.in_flight] == ["c"]
    assert finished(engine)["c"] == greedy_reference(LONG[:24], 1)


def test_a_failing_layer_costs_the_step_nothing() -> None:
    model = PausingFake()
    engine = engine_of(model)
    engine.add(request("b", LONG[:20], max_tokens=4))
    model.fail_in = 1
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [o.finish_reason for o in outputs if o.id == "b"] == ["error"]
    assert sum(len(o.token_ids) for o in outputs if o.id == "a") == 3
    check_pages(engine)
    model.fail_in = None
    assert finished(engine)["a"]
    check_pages(engine)


def test_a_failing_step_costs_the_pass_nothing() -> None:
    model = PausingFake()
    engine = engine_of(model)
    engine.add(request("b", LONG[:20], max_tokens=4))
    engine.step()
    model.fail_on = {2}
    assert [o.finish_reason for o in engine.step()] == ["error"]
    assert finished(engine)["b"] == greedy_reference(LONG[:20], 4)
    check_pages(engine)


def test_an_abort_frees_the_pages_of_a_pass() -> None:
    engine = engine_of(PausingFake())
    engine.add(request("b", LONG, max_tokens=4))
    engine.step()
    engine.abort("b")
    assert not engine._scheduler.in_flight
    check_pages(engine)
    assert not finished(engine)["b"]


@pytest.mark.parametrize("pages", [28, 34])
def test_a_pass_that_begins_in_a_step_takes_nobodys_pages(pages: int) -> None:
    """Few pages: prompts wait, or lose theirs to the one that decodes, which is older."""
    engine = engine_of(PausingFake(), num_pages=pages)
    for name in "bcd":
        engine.add(request(name, [ord(name) - 60, *LONG[:30]], max_tokens=3))
    answers = finished(engine)
    assert len(answers["a"]) == 59
    for name in "bcd":
        assert answers[name] == greedy_reference([ord(name) - 60, *LONG[:30]], 3)
    check_pages(engine)


def test_prompts_are_found_chunk_by_chunk() -> None:
    """Another prompt that begins alike takes up what is computed of the first, long before it ends."""
    engine = engine_of(PausingFake())
    engine.add(request("b", LONG, max_tokens=1))
    while not (engine._scheduler.in_flight and engine._scheduler.in_flight[0].sequence.computed_len):
        engine.step()
    done = engine._scheduler.in_flight[0].sequence.computed_len
    assert engine._kv._tree is not None
    assert len(engine._kv._tree.match(LONG, len(LONG))) == done // engine._kv.page_size
