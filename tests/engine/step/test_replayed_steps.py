"""Steps as a GPU's runner takes them, on every path, with graphs that a CPU runs again: answers, pages, and the order
of what is done."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fake_model import check_pages, fake_logits, greedy_reference, request, run, token_ids
from replayed_graphs import hold_last_piece, replayed_engine
from tandem.engine.engine import Engine
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.step.path import Path
from tandem.planner.choices.speculation import SpeculationPlan

PROMPTS = {
    "a": [2, 3, 4], "b": [5, 7, 11, 13] * 4, "c": [9] * 40, "d": [8, 6] * 6, "e": [21, 22, 23] * 20,
}  # fmt: skip
EVERYTHING = {
    "no graphs": {"sizes": (), "prompts": ()},
    "decode graphs": {"prompts": ()},
    "prefill graphs": {},
    "the CPU has a part": {"alone": False},
    "reserved multiprocessors": {"reserved_sms": 8},
    "experts are shared": {"ring": 1 << 20, "shares": True},
    "experts are streamed": {"ring": 1 << 20},
    "short chunks": {"shared_tokens": 16},
}


def paths_of(caplog: pytest.LogCaptureFixture) -> set[str]:
    records = [record for record in caplog.records if record.name == "tandem.engine.step.path"]
    return {record.message.split(": ", 1)[1].split(" (")[0] for record in records}


@pytest.mark.parametrize("kind", EVERYTHING, ids=str)
def test_answers_are_the_same_on_every_path(monkeypatch, caplog, kind: str) -> None:
    """Requests that come while others decode; the pages of each are its own."""
    engine, _ = replayed_engine(monkeypatch, num_pages=200, **EVERYTHING[kind])
    with caplog.at_level(logging.DEBUG, "tandem.engine.step.path"):
        got: dict[str, list[int]] = {name: [] for name in PROMPTS}
        waiting, turn = list(PROMPTS), 0
        while engine.has_work() or waiting:
            if turn % 4 == 0 and waiting:
                name = waiting.pop(0)
                engine.add(request(name, PROMPTS[name], max_tokens=20))
            for output in engine.step():
                assert output.error is None
                got[output.id] += output.token_ids
            check_pages(engine)
            turn += 1
    assert got == {name: greedy_reference(prompt, 20) for name, prompt in PROMPTS.items()}
    assert not engine._scheduler.in_flight
    wanted = {
        "no graphs": {Path.EAGER}, "decode graphs": {Path.DECODE_GRAPH, Path.BACKGROUND, Path.EAGER},
        "prefill graphs": {Path.DECODE_GRAPH, Path.BACKGROUND_GRAPH},
        "the CPU has a part": {Path.DECODE_GRAPH, Path.BACKGROUND},
        "reserved multiprocessors": {Path.DECODE_GRAPH, Path.BACKGROUND_GRAPH},
        "experts are shared": {Path.DECODE_GRAPH, Path.BACKGROUND_GRAPH}, "experts are streamed": {Path.DECODE_GRAPH},
        "short chunks": {Path.DECODE_GRAPH, Path.BACKGROUND_GRAPH},
    }  # fmt: skip
    assert {path.value for path in wanted[kind]} <= paths_of(caplog)


@pytest.mark.parametrize(("flags", "path"), [
    ({}, Path.PREFILL_GRAPH), ({"reserved_sms": 8}, Path.PREFILL_GRAPH), ({"prompts": ()}, Path.EAGER),
    ({"ring": 1 << 20, "shares": True, "prompts": (16, 32)}, Path.SHARED_PREFILL_GRAPH),
    ({"ring": 1 << 20, "prompts": (16, 32)}, Path.EAGER),
    ({"shared_tokens": 8}, Path.EAGER_SHRINKING),
])  # fmt: skip
def test_a_prompt_that_is_alone_takes_its_path(monkeypatch, caplog, flags: dict[str, Any], path: Path) -> None:
    engine, calls = replayed_engine(monkeypatch, **flags)
    with caplog.at_level(logging.DEBUG, "tandem.engine.step.path"):
        calls.clear()
        engine.add(request("b", PROMPTS["b"]))
        outputs = engine.step()
    assert paths_of(caplog) == {path.value}
    assert token_ids(outputs) == greedy_reference(PROMPTS["b"], 1)
    pieces = [f"piece {i}" for i in range(6)]
    order = {
        Path.PREFILL_GRAPH: ["aside after", "hold", "back", *[each for p in pieces for each in ("aside", p, "back")],
                             "release", "streams end"],
        Path.SHARED_PREFILL_GRAPH: [
            "aside after", "hold split", "back", *[each for p in pieces for each in ("aside", p, "back")], "release",
            "streams end"],
        Path.EAGER: ["aside after", "begin kernels of 16", "back", "check"],
        Path.EAGER_SHRINKING: ["aside after", "begin kernels of 16", "back", "check"],
    }  # fmt: skip
    assert calls == order[path]


@pytest.mark.parametrize("settling", [False, True])
def test_a_pass_waits_for_experts_that_have_changed_places(monkeypatch, settling: bool) -> None:
    """They did so in the order of steps, on another stream. What is computed kernel by kernel comes before the next
    ones: their stream waits for it."""
    engine, calls = replayed_engine(monkeypatch, num_pages=200)
    live = SimpleNamespace(
        settling=settling, beside_step=lambda: calls.append("beside"), after_step=lambda over: calls.append("moves")
    )
    engine._runner._live = live
    engine.add(request("a", PROMPTS["a"], max_tokens=20))
    engine.step()
    engine.add(request("c", PROMPTS["c"], max_tokens=20))
    calls.clear()
    engine.step()
    assert calls[calls.index("hold") - 1] == ("aside after" if settling else "aside")
    calls.clear()
    while engine.has_work():
        engine.step()
    assert "beside" in calls and "moves" in calls


def test_a_shorter_chunk_is_begun_anew(monkeypatch) -> None:
    engine, calls = replayed_engine(monkeypatch, shared_tokens=8)
    calls.clear()
    engine.add(request("c", PROMPTS["c"]))
    asked = [False, True]
    assert engine.step(lambda: asked.pop(0)) == []
    assert [each for each in calls if each.startswith("begin")] == ["begin kernels of 40", "begin kernels of 8"]
    assert engine._scheduler.running[0].computed_len == 8
    assert token_ids([o for _, outputs in run(engine).items() for o in outputs]) == greedy_reference(PROMPTS["c"], 8)


@pytest.mark.parametrize("acceptance", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("plain", [(), (1, 2, 4)], ids=["one kind", "plain ones"])
def test_drafts_change_no_answer(monkeypatch, acceptance: float, plain: tuple[int, ...]) -> None:
    """Their rows are a graph's, too. Steps without drafts, which follow none, have graphs of their own."""
    names = {"a": 30, "d": 30}
    answers = {(name, 0): greedy_without_end(PROMPTS[name], count) for name, count in names.items()}
    engine, calls = replayed_engine(
        monkeypatch, plain=plain, sizes=(1, 2, 4, 6, 8), num_pages=200, num_slots=8,
        speculation=SpeculationPlan("made up", 3, False), drafter=OracleDrafter(answers, acceptance, 64),
    )  # fmt: skip
    asks = [request(name, PROMPTS[name], max_tokens=count, ignore_eos=True) for name, count in names.items()]
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine, *asks).items()}
    assert got == {name: tokens for (name, _), tokens in answers.items()}
    replays = [call.split() for call in calls if call.startswith("replay")]
    assert any(int(call[1]) > 2 for call in replays), "no step had drafts"
    check_pages(engine)


def greedy_without_end(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def decoding(monkeypatch, **flags: Any) -> tuple[Engine, list[str]]:
    engine, calls = replayed_engine(monkeypatch, num_pages=200, **flags)
    engine.add(request("a", PROMPTS["a"], max_tokens=60, ignore_eos=True))
    engine.step()
    calls.clear()
    return engine, calls


STEP = ["posts begin", "begin graph of 1", "replay 1", "posts end"]


def test_a_decode_step_alone(monkeypatch) -> None:
    engine, calls = decoding(monkeypatch)
    engine.step()
    assert calls == [*STEP, "check"]


def test_a_prefill_goes_on_while_a_replayed_step_runs(monkeypatch) -> None:
    """It is held before the step begins; its pieces are given after the CPU has done its part of the step."""
    engine, calls = decoding(monkeypatch, reserved_sms=8)
    engine.add(request("b", PROMPTS["b"], max_tokens=4))
    engine.step()
    hold = ["aside sparing", "hold", "back"]
    assert calls[: len(hold) + len(STEP)] == [*hold, *STEP] and calls[-1] == "check"
    given = calls[len(hold) + len(STEP) : -1]
    assert given[:3] == ["aside sparing", "piece 0", "back"] and "release" not in given
    calls.clear()
    while "release" not in calls:
        engine.step()
    last = calls.index("release")
    assert calls[last - 3 : last + 2] == ["aside sparing", "piece 5", "back", "release", "streams end"]


def test_pieces_that_a_thread_gives_end_before_the_pass(monkeypatch) -> None:
    """Kernel by kernel, on the GPU alone: the launch thread, only while a step waits."""
    engine, calls = decoding(monkeypatch, prompts=())
    engine.add(request("b", PROMPTS["b"], max_tokens=4))
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}
    assert got["b"] == greedy_reference(PROMPTS["b"], 4)
    assert calls.count("hold") == calls.count("release") == 1


def test_where_the_cpu_has_a_part_slices_run_between_steps(monkeypatch) -> None:
    engine, calls = decoding(monkeypatch, alone=False)
    engine.add(request("b", PROMPTS["b"], max_tokens=4))
    engine.step()
    assert calls[:3] == ["aside", "hold", "back"] and calls[3:7] == STEP
    assert "aside" in calls[7:-1] and calls[-1] == "check"


def test_a_graph_that_the_cpu_would_have_a_part_in_is_not_replayed(monkeypatch, caplog) -> None:
    """Experts were streamed when it was captured; now some stay at home. The log says the path that is taken."""
    engine, calls = decoding(monkeypatch)
    start: Any = engine.gpu_runner._start
    start.alone = False
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "tandem.engine.step.path"):
        engine.add(request("b", PROMPTS["b"], max_tokens=4))
        got = {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}
    assert got["b"] == greedy_reference(PROMPTS["b"], 4)
    assert paths_of(caplog) == {Path.DECODE_GRAPH.value, Path.BACKGROUND.value}
    assert any("the CPU has a part" in record.message for record in caplog.records)
    assert not any(call.startswith("piece") for call in calls)


@pytest.mark.parametrize("flags", [{}, {"prompts": ()}, {"alone": False}, {"reserved_sms": 8}], ids=str)
def test_an_abort_ends_a_pass_and_another_can_begin(monkeypatch, flags: dict[str, Any]) -> None:
    engine, calls = decoding(monkeypatch, **flags)
    with monkeypatch.context() as held:
        hold_last_piece(held, engine)
        engine.add(request("b", PROMPTS["b"], max_tokens=4))
        engine.step()
        assert engine._scheduler.in_flight
        engine.abort("b")
    assert not engine._scheduler.in_flight and calls.count("release") == 1 and calls[-1] == "streams end"
    check_pages(engine)
    engine.add(request("c", PROMPTS["c"], max_tokens=4))
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}
    assert got["c"] == greedy_reference(PROMPTS["c"], 4) and not got["b"]


@pytest.mark.parametrize("flags", [{"prompts": ()}, {"alone": False}], ids=str)
def test_a_failing_layer_costs_its_prompt_alone(monkeypatch, flags: dict[str, Any]) -> None:
    engine, calls = decoding(monkeypatch, **flags)
    model: Any = engine.gpu_runner._model
    engine.add(request("b", PROMPTS["b"], max_tokens=4))
    model.fail_in, ended = 2, dict[str, str]()
    while "b" not in ended:
        ended |= {o.id: o.finish_reason for o in engine.step() if o.finish_reason}
    assert ended.pop("b") == "error" and calls.count("hold") == calls.count("release") == 1
    assert set(ended.values()) <= {"length"}  # all steps of the other, if the launch thread had to wait for a CPU
    model.fail_in = None
    engine.add(request("c", PROMPTS["c"], max_tokens=4))
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine).items()}
    assert got["c"] == greedy_reference(PROMPTS["c"], 4)
    check_pages(engine)


def test_a_prefill_that_cannot_begin_fails_its_prompt_alone(monkeypatch) -> None:
    engine, calls = decoding(monkeypatch)

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(engine.gpu_runner, "_pieces", out_of_memory)
    engine.add(request("b", PROMPTS["b"], max_tokens=4))
    ended = {o.id: o.finish_reason for _ in range(2) for o in engine.step() if o.finish_reason}
    assert ended == {"b": "error"} and calls.count("release") == 1
    check_pages(engine)


@pytest.mark.parametrize("when", ["make", "slice"])
def test_an_interrupted_step_lets_its_graph_end(monkeypatch, when: str) -> None:
    """Ctrl+C while masks are made, or in a slice of a prefill; steps afterwards are whole."""
    engine, calls = decoding(monkeypatch, prompts=(16,))
    engine.add(request("b", PROMPTS["b"], max_tokens=4))
    if when == "slice":
        engine.step()
    calls.clear()
    target = "make_masks" if when == "make" else "slice"
    owner: Any = __import__("tandem.engine.gpu_runner", fromlist=["_"]) if when == "make" else type(engine._overlap)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(owner, target, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert calls[-1] == "posts end" and "check" not in calls
    engine.abort("b")
    calls.clear()
    engine.step()
    assert calls == [*STEP, "check"]


def test_layers_of_a_prompt_may_be_given_until_the_gpu_has_ended_a_step(monkeypatch) -> None:
    """Without experts in CPU memory all of a step is that wait."""
    engine, _ = replayed_engine(monkeypatch, prompts=())
    runner, opened = engine._runner, list[bool]()
    wait = runner._end.wait
    monkeypatch.setattr(runner._end, "wait", lambda: [opened.append(runner._launcher._open.is_set()), wait()])
    engine.add(request("a", PROMPTS["a"], max_tokens=9))
    engine.step()
    opened.clear()
    engine.step()  # no prompt is under way
    assert opened == [False]
    with monkeypatch.context() as held:
        hold_last_piece(held, engine)
        engine.add(request("b", PROMPTS["b"], max_tokens=3))
        engine.step()
        assert engine._scheduler.in_flight
        opened.clear()
        engine.step()
        assert opened == [True] and not runner._launcher._open.is_set()
        engine.abort("b")
