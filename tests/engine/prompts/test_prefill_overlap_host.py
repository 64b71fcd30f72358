"""Prompts between steps: a pass that stops gives the same bits, those who decode go on, and nobody's pages are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fake_model import FakeModel, check_pages, fake_engine, greedy_reference, request, run, token_ids
from pausing_model import DEPTH, LONG, FakePass, PausingFake
from sessions import Session, prompts
from tandem import _core
from tandem.engine.engine import Engine
from tandem.engine.pace import MIN_TOKENS, SHARED_STEP_SECONDS, SLICE_OF_STEP, PrefillPace
from tandem.engine.runners import pace_of
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Chunk
from tandem.engine.step.overlap import PrefillOverlap
from tandem.engine.step.prefill import PIECES_AHEAD, PausingModel, PrefillTask, host_task
from tandem.kernels.cpu_ops import CpuOps
from tiny import VARIANTS


def engine_of(model: FakeModel, **plan) -> Engine:
    """A piece between two steps, whatever they take."""
    engine = fake_engine(model, **{"max_step_tokens": 64} | plan)
    engine._scheduler.pace.slice_seconds = lambda: 0.0
    return engine


def decoding(engine: Engine, tokens: int = 60) -> None:
    engine.add(request("a", [2, 3, 4], max_tokens=tokens, ignore_eos=True))
    engine.step()
    assert engine._scheduler.running[0].answer_len == 1


def test_models_of_ours_can_pause(tiny_models) -> None:
    assert isinstance(Session(tiny_models["qwen3_moe"]).model, PausingModel)
    assert not isinstance(FakeModel(), PausingModel)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pass_that_steps_overtake_gives_the_same_bits(tiny_models, variant) -> None:
    """Two steps of another sequence between any two pieces; afterwards a step of the first one's, from its pages."""
    ops = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    a, b, _ = prompts()
    found = []
    for overtaken in (False, True):
        session = Session(tiny_models[variant], ops=ops, counted=True)
        session.step([(1, b[:3])])
        paused = host_task(session.model, session.states, session.batch([(0, a[:23])]), session.usage)
        others = iter((b * 99)[3 : 3 + 2 * (session.model.depth + 1)])
        rows = []
        while paused.pieces_left():
            paused.piece()
            if overtaken and session.lengths[1] + 2 < 4 * len(session.states):
                rows += [session.step([(1, [next(others)])]) for _ in range(2)]
        assert not overtaken or rows
        logits = torch.from_numpy(paused.logits().fetched(slice(0, 23)).copy())
        found.append((logits, session.step([(0, a[23:24])])[0]))
    (plain, after), (logits, later) = found
    assert torch.equal(plain, logits) and torch.equal(after, later)
    whole = Session(tiny_models[variant], ops=ops)
    assert torch.equal(whole.step([(0, a[:23])])[0], plain)


def test_a_pass_counts_apart_from_the_steps_that_overtake_it(tiny_models) -> None:
    """As if one had run after the other."""
    ops, (a, b, _) = CpuOps(_core.WorkerPool([-1]), "scalar"), prompts()
    plain = Session(tiny_models["qwen3_moe"], ops=ops, counted=True)
    plain.usage.begin(1)
    plain.step([(1, b[:1])])
    plain.usage.begin(9)
    plain.step([(0, a[:9])])
    session = Session(tiny_models["qwen3_moe"], ops=ops, counted=True)
    paused = host_task(session.model, session.states, session.batch([(0, a[:9])]), session.usage)
    paused.piece()
    session.usage.begin(1)
    session.step([(1, b[:1])])
    while paused.pieces_left():
        paused.piece()
    paused.logits()
    assert all(
        torch.equal(one, other) for one, other in zip(session.usage.read(), plain.usage.read(), strict=True)
    )


def test_whoever_decodes_goes_on_beside_a_prompt() -> None:
    """One piece a step: each step of the prompt's chunks gives the other sequence a token."""
    model = PausingFake()
    engine = engine_of(model)
    decoding(engine)
    engine.add(request("b", LONG, max_tokens=4))
    steps, got = 0, {"a": [], "b": []}
    while engine.has_work():
        outputs = engine.step()
        if not got["b"] and engine._scheduler.in_flight:
            assert [o.id for o in outputs] == ["a"]
            steps += 1
        for output in outputs:
            got[output.id] += output.token_ids
        check_pages(engine)
    assert steps >= 2 * DEPTH and model.layers_run[: DEPTH + 1] == [*range(DEPTH), 0]
    assert got["b"] == greedy_reference(LONG, 4)
    assert got["a"] == greedy_without_end([2, 3, 4], 60)[1:]


def greedy_without_end(prompt: list[int], count: int) -> list[int]:
    from fake_model import fake_logits

    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def test_a_pass_ends_at_once_when_nobody_decodes() -> None:
    model = PausingFake()
    engine = engine_of(model)
    decoding(engine, tokens=3)
    engine.add(request("b", LONG[:50], max_tokens=2))
    engine.step()
    assert engine._scheduler.in_flight
    outputs = engine.step()
    assert [o.finish_reason for o in outputs if o.id == "a"] == ["length"]
    assert [o.id for o in engine.step()] == ["b"] and not engine._scheduler.in_flight


def begun(engine: Engine, *names: str) -> None:
    """Passes of these prompts are under way."""
    for i, name in enumerate(names):
        engine.add(request(name, [20 + i, *LONG[:20]], max_tokens=3))
    engine.step()
    assert [c.sequence.request_id for c in engine._scheduler.in_flight] == list(names)


def finished(engine: Engine) -> dict[str, list[int]]:
    return {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}


def test_an_abort_in_mid_pass_frees_the_pages_and_others_begin_again() -> None:
    engine = engine_of(PausingFake())
    decoding(engine)
    begun(engine, "b", "c")
    engine.abort("b")
    assert not engine._scheduler.in_flight
    check_pages(engine)
    answers = finished(engine)
    assert answers["c"] == greedy_reference([21, *LONG[:20]], 3) and not answers["b"]
    check_pages(engine)


def test_an_abort_of_another_leaves_the_pass_alone() -> None:
    engine = engine_of(PausingFake())
    decoding(engine)
    begun(engine, "b")
    engine.abort("a")
    assert [c.sequence.request_id for c in engine._scheduler.in_flight] == ["b"]
    assert finished(engine)["b"] == greedy_reference([20, *LONG[:20]], 3)


def test_a_layer_that_fails_costs_its_own_prompts_alone() -> None:
    model = PausingFake()
    engine = engine_of(model)
    decoding(engine)
    begun(engine, "b", "c")
    model.fail_in = 1
    outputs = engine.step()
    assert sorted((o.id, o.finish_reason) for o in outputs) == [("a", None), ("b", "error"), ("c", "error")]
    assert "a layer failed" in next(o.error for o in outputs if o.id == "b")
    model.fail_in = None
    assert len(finished(engine)["a"]) == 60 - 3
    check_pages(engine)


def test_a_sequence_that_loses_its_pages_in_mid_pass_begins_again() -> None:
    """The one that decodes is older, and takes the last page."""
    engine = engine_of(PausingFake(), num_pages=14)
    decoding(engine, tokens=44)
    begun(engine, "b")
    held = 0
    while engine.has_work() and not engine._scheduler.preemptions:
        held += bool(engine._scheduler.in_flight)
        engine._scheduler.pace.slice_seconds = lambda: 0.0
        if engine._scheduler.in_flight and held > 1:  # nothing goes on but the decoding
            engine._overlap._task.go_on = lambda *_: False
        engine.step()
    assert engine._scheduler.preemptions == 1 and not engine._scheduler.in_flight
    check_pages(engine)
    assert finished(engine)["b"] == greedy_reference([20, *LONG[:20]], 3)


class FakePieces:
    """Of a device that finishes a piece when it is asked often enough."""

    ahead = PIECES_AHEAD

    def __init__(self, count: int) -> None:
        self.count = count

    def give(self, index: int) -> None: ...

    def result(self) -> tuple[str, str]:
        return "logits", "best"


class FakePlace:
    overlaps = True

    def __init__(self, behind: Iterator[int]) -> None:
        self.in_flight = cast(Any, SimpleNamespace(count=lambda: next(behind), mark=lambda: None))

    def entered(self) -> Any:
        return nullcontext()

    def leave(self) -> None: ...

    def logits(self, logits: Any, best: Any) -> Any:
        return logits


def fake_task(pieces: int, behind: Iterator[int]) -> PrefillTask:
    return PrefillTask(cast(Any, FakePieces(pieces)), FakePlace(behind))


class FakeRunner:
    def __init__(self, paused: Any, beside: bool = True) -> None:
        self.paused, self.beside, self.asked = paused, beside, list[list[Chunk]]()

    def pause(self, chunks: list[Chunk]) -> Any:
        self.asked.append(chunks)
        return self.paused

    def runs_beside(self, chunks: list[Chunk]) -> bool:
        return self.beside

    def step_ended(self) -> bool:
        return True


def chunks_of(engine: Engine) -> list[Chunk]:
    """One that decodes and two prompts."""
    decoding(engine)
    for name in "bc":
        engine.add(request(name, [*LONG[:20], ord(name) % 60]))
    return engine._scheduler.next()


def aside_of(scheduler: Scheduler, runner: FakeRunner, together: bool = True) -> PrefillOverlap:
    scheduler.pace.slice_seconds = lambda: 1.0
    return PrefillOverlap(scheduler, runner, together)


def test_a_device_is_kept_busy_and_not_further() -> None:
    engine = engine_of(FakeModel())
    chunks = chunks_of(engine)
    behind = iter([0, 1, 2, PIECES_AHEAD, 2, PIECES_AHEAD, 2, 3, 0])
    paused = fake_task(6, behind)
    aside = aside_of(engine._scheduler, FakeRunner(paused))
    assert [c.sequence.request_id for c in aside.take(chunks)] == ["a"]
    assert aside.slice(False) is None and paused.pieces_left() == 3
    assert aside.slice(False) is None and paused.pieces_left() == 2
    output = aside.slice(False)
    assert output is not None and output.logits == "logits" and paused.pieces_left() == 0
    assert not engine._scheduler.in_flight


def test_what_is_changed_in_place_is_one_sequences() -> None:
    engine = engine_of(FakeModel())
    chunks = chunks_of(engine)
    runner = FakeRunner(fake_task(1, iter([0])))
    aside = aside_of(engine._scheduler, runner, together=False)
    assert [c.sequence.request_id for c in aside.take(chunks)] == ["a"]
    assert [c.sequence.request_id for c in engine._scheduler.in_flight] == ["b"]


@pytest.mark.parametrize("runner", [FakeRunner(None), FakeRunner(fake_task(1, iter([])), beside=False)])
def test_where_nothing_can_pause_a_step_takes_all(runner: FakeRunner) -> None:
    engine = engine_of(FakeModel())
    chunks = chunks_of(engine)
    assert aside_of(engine._scheduler, runner).take(chunks) == chunks and not engine._scheduler.in_flight


def test_a_chunk_has_as_many_tokens_as_a_slice_takes() -> None:
    pace = PrefillPace(10_000, pieces=20)
    assert pace.slice_seconds() == SHARED_STEP_SECONDS  # nobody knows yet how long others wait anyway
    pace.decoded(0.02)
    assert pace.step_tokens(1) == 1 + 4 * MIN_TOKENS
    pace.observe(500, 1.0)
    assert pace.slice_seconds() == pytest.approx(SLICE_OF_STEP * 0.02)
    assert pace.step_tokens(3) == 3 + int(500 * 20 * SLICE_OF_STEP * 0.02)
    assert pace.step_tokens(3, pauses=False) == 3 + int(500 * SHARED_STEP_SECONDS)
    assert pace.step_tokens(0) == 10_000
    for _ in range(60):
        pace.decoded(0.001)
    assert pace.step_tokens(1) == 1 + MIN_TOKENS


def test_chunks_have_a_graphs_rows_only_where_a_device_computes_them_alone() -> None:
    """Experts that were to be streamed, and cannot be, are computed by the CPU: whoever decodes would wait for whole
    layers."""
    for ring, tokens in ((0, 1 + 2048), (1 << 30, 1 + 4 * MIN_TOKENS)):
        plan = SimpleNamespace(
            max_step_tokens=4096,
            gpu=SimpleNamespace(
                streams_experts=ring > 0, pipelined_chunks=1,
                sizes=SimpleNamespace(prompt_sizes=(512, 2048), shared_tokens=0),
            ),
        )
        parts = SimpleNamespace(plan=plan, stream_seconds=None, model=None, handoff=object(), group=None)
        assert pace_of(cast(Any, parts)).step_tokens(1) == tokens


def test_steps_beside_slices_say_how_long_decoding_takes() -> None:
    """While prompts wait there are no others: many more sequences may decode by then, and their steps take longer."""
    pace = PrefillPace(10_000, pieces=20)
    pace.decoded(0.02, overlapped=True)
    assert pace.slice_seconds() == pytest.approx(SLICE_OF_STEP * 0.02)
    for _ in range(60):
        pace.decoded(0.1, overlapped=True)
    assert pace.slice_seconds() > 0.9 * SLICE_OF_STEP * 0.1
    pace.decoded(0.02)
    assert pace.slice_seconds() < 0.8 * SLICE_OF_STEP * 0.1


def test_only_steps_with_prompts_say_how_fast_prompts_are() -> None:
    """Many sequences that decode slowly are no slow prompt."""
    engine, told = engine_of(FakeModel()), list[int]()
    engine._scheduler.pace.observe = lambda *asked: told.append(asked[0])
    decoding(engine)
    assert len(told) == 1  # the prompt's step
    while engine.has_work():
        engine.step()
    assert len(told) == 1


def test_a_pass_that_cannot_begin_fails_its_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PausingFake()
    engine = engine_of(model)
    decoding(engine, 8)
    engine.add(request("b", LONG, max_tokens=4))

    def begin(batch) -> FakePass:
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "begin", begin)
    ended = {}
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                ended[output.id] = output.finish_reason
    assert ended == {"a": "length", "b": "error"}
    check_pages(engine)


def test_beside_decoding_a_single_pass_is_taken_in_turns() -> None:
    """Where two prompts cannot share a pass, the oldest and the shortest alternate."""
    engine = engine_of(PausingFake(), num_pages=400)
    engine.add(request("a", [2, 3, 4], max_tokens=60, ignore_eos=True))
    engine.step()
    for name, length in (("long", 240), ("short", 40)):
        engine.add(request(name, (LONG * 3)[:length], max_tokens=1))
    runner = FakeRunner(fake_task(1, iter([0] * 99)))
    aside = aside_of(engine._scheduler, runner, together=False)
    for _ in range(4):
        chunks = engine._scheduler.next()
        aside.take(chunks)
        aside.slice(True)
    names = [[chunk.sequence.request_id for chunk in chunks] for chunks in runner.asked]
    assert names == [["long"], ["short"], ["long"], ["short"]]
