"""Layers that see a window keep their window alone: same answers, nothing leaks, pages that went may hold anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import check_pages, greedy_reference, request, run
from fake_windows import WINDOW, check_windows, poison, scored, windowed_config, windowed_engine, windows_of
from tandem.engine.engine import Engine
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.loader import load_parts
from tandem.engine.state.arrays import allocate
from tandem.flags.engine_config import EngineConfig
from tandem.spec.state import KEY_BLOCK

PAGE = 4


def prompt_of(length: int, first: int = 2) -> list[int]:
    return [(first + 7 * i) % 60 + 2 for i in range(length)]


def step(engine: Engine) -> list:
    poison(engine)
    outputs = engine.step()
    check_windows(engine)
    check_pages(engine)
    return outputs


def answers(engine: Engine, *requests) -> dict[str, list[int]]:
    for each in requests:
        engine.add(each)
    found: dict[str, list[int]] = {each.id: [] for each in requests}
    for _ in range(5000):
        if not engine.has_work():
            return found
        for output in step(engine):
            found[output.id].extend(output.token_ids)
    raise AssertionError("the engine did not finish")


# -- with a made-up model ---


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("step_tokens", [9, 16, 64])
def test_answers_are_those_of_the_tokens_alone(cached: bool, step_tokens: int) -> None:
    engine = windowed_engine(radix_cache=cached, max_step_tokens=step_tokens, num_pages=400, max_running_requests=3)
    prompts = {str(n): prompt_of(n, n) for n in (1, 4, 5, 17, 90, 150)}
    found = answers(engine, *(request(name, each, max_tokens=80) for name, each in prompts.items()))
    assert found == {name: greedy_reference(each, 80) for name, each in prompts.items()}
    assert windows_of(engine).available == engine.plan.num_window_pages < engine.plan.num_pages


def test_a_long_sequence_holds_a_window_whatever_its_length() -> None:
    engine = windowed_engine(num_pages=64, max_running_requests=2)
    engine.add(request("a", prompt_of(150), max_tokens=90))
    held = []
    while engine.has_work():
        step(engine)
        held += [s.window_end - s.window_first for s in engine._scheduler.running]
    most = engine.model_config.state_layout("float32", PAGE).window_pages(1, engine.plan.max_step_tokens)
    assert max(held) <= most < 150 // PAGE


def test_a_second_turn_takes_up_the_first_ones_window() -> None:
    engine = windowed_engine(num_pages=256, max_running_requests=2)
    prompt = prompt_of(120)
    answer = answers(engine, request("a", prompt, max_tokens=70))["a"]
    second, before = [*prompt, *answer, 9, 8, 7], engine._runner._model.rows_run
    assert answers(engine, request("b", second, max_tokens=3))["b"] == greedy_reference(second, 3)
    assert engine._runner._model.rows_run - before <= 3 + 3 + 2 * PAGE


def test_a_prompt_that_begins_alike_takes_up_what_is_still_there() -> None:
    """Pages that fell out of a prompt's window stay findable until others need them; then it is computed again."""
    engine = windowed_engine(num_pages=256, max_running_requests=2)
    shared = prompt_of(100)
    answers(engine, request("a", [*shared, *prompt_of(90, 5)], max_tokens=1))
    before = engine._runner._model.rows_run
    other = [*shared, *prompt_of(20, 11)]
    assert answers(engine, request("b", other, max_tokens=1))["b"] == greedy_reference(other, 1)
    assert engine._runner._model.rows_run - before <= 20 + PAGE
    for name in range(6):
        answers(engine, request(f"c{name}", prompt_of(140, 13 + name), max_tokens=1))
    again = [*shared, *prompt_of(20, 17)]
    assert answers(engine, request("d", again, max_tokens=1))["d"] == greedy_reference(again, 1)


@pytest.mark.parametrize("cached", [True, False])
def test_the_answers_of_one_request_share_its_prompt(cached: bool) -> None:
    engine = windowed_engine(radix_cache=cached, num_pages=256, max_running_requests=4, max_step_tokens=32)
    outputs = run(engine, request("a", prompt_of(101), n=3, temperature=1.0, seed=5, max_tokens=6))
    assert len(outputs) == 3 and engine._runner._model.rows_run < 101 + 3 * (6 + PAGE + 1)
    check_windows(engine)


def test_preempted_sequences_go_on_with_the_same_answer() -> None:
    engine = windowed_engine(num_pages=66, max_running_requests=4, max_step_tokens=32)
    prompts = {str(i): prompt_of(58, 3 * i) for i in range(4)}
    found = answers(engine, *(request(name, each, max_tokens=100, ignore_eos=True) for name, each in prompts.items()))
    assert engine.stats().preemptions > 0
    wanted = {name: greedy_reference(each, 100) for name, each in prompts.items()}
    assert {name: found[name][: len(each)] for name, each in wanted.items()} == wanted


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_rejected_drafts_are_taken_back(acceptance: float) -> None:
    prompts = {str(i): prompt_of(20 + 40 * i, i) for i in range(3)}
    wanted = {name: greedy_reference(each, 100) for name, each in prompts.items()}
    drafter = OracleDrafter({(name, 0): each for name, each in wanted.items()}, acceptance, 64)
    engine = windowed_engine(drafter=drafter, num_pages=256, max_running_requests=3, max_step_tokens=32)
    assert answers(engine, *(request(name, each, max_tokens=100) for name, each in prompts.items())) == wanted


def test_scarce_windows_make_others_wait() -> None:
    """Fewer pages than the planner has: the youngest gives way, and everybody finishes."""
    engine = windowed_engine(num_pages=256, max_running_requests=4, max_step_tokens=64, windows=34)
    prompts = {str(i): prompt_of(60, i) for i in range(4)}
    found = answers(engine, *(request(name, each, max_tokens=60) for name, each in prompts.items()))
    assert found == {name: greedy_reference(each, 60) for name, each in prompts.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=10),
    st.integers(66, 200),
    st.integers(2, 5),
    st.sampled_from([8, 16, 50]),
    st.booleans(),
)
def test_any_traffic(turns: list, pages: int, running: int, step_tokens: int, speculative: bool) -> None:
    """Prompts that begin alike, some abandoned, in caches that are too small for all of them."""
    prompts, wanted = {}, {}
    for i, (kind, length, answer) in enumerate(turns):
        prompt = [*prompt_of(70 + 30 * (kind % 3), 3), *prompt_of(length, kind)]
        if len(prompt) + answer < min(256, pages * PAGE):
            prompts[str(i)] = prompt, answer, kind
            wanted[str(i)] = greedy_reference(prompt, answer)
    drafter = OracleDrafter({(name, 0): each for name, each in wanted.items()}, 0.6, 64) if speculative else None
    engine = windowed_engine(
        num_pages=pages, max_running_requests=running, max_step_tokens=step_tokens, drafter=drafter
    )
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    for name, (prompt, answer, kind) in prompts.items():
        engine.add(request(name, prompt, max_tokens=answer))
        if kind == 5:
            for _ in range(3):
                for output in step(engine):
                    outputs[output.id].extend(output.token_ids)
            engine.abort(name)
            wanted.pop(name)
    for _ in range(5000):
        if not engine.has_work():
            break
        for output in step(engine):
            outputs[output.id].extend(output.token_ids)
    assert not engine.has_work()
    assert {name: outputs[name] for name in wanted} == wanted
    assert windows_of(engine).available == engine.plan.num_window_pages


# -- the parts ---


def test_the_layout_counts_what_is_allocated() -> None:
    layout = windowed_config().state_layout("float32", PAGE)
    made = allocate(layout, 10, window_pages=6)
    assert [array.shape[0] for arrays in made.arrays for array in arrays] == [6, 6, 10, 10]
    assert sum(a.nbytes for arrays in made.arrays for a in arrays) == PAGE * (10 * 8 + 6 * layout.window_token_bytes)
    assert layout.window_begin(0) == layout.window_begin(KEY_BLOCK + WINDOW - 2) == 0
    assert layout.window_begin(KEY_BLOCK + WINDOW - 1) == KEY_BLOCK


# -- with real models ---

FAMILIES = ["gpt_oss", "mixtral-window", "qwen2_moe-window", "laguna", "gemma4_text", "mimo_v2_flash"]


@pytest.mark.parametrize("variant", FAMILIES)
def test_the_same_bits_with_pages_of_nan(tiny_models, variant: str) -> None:
    """Prompts longer than windows and than a step, decoded together, taken up again by a second turn. Which rows share
    a step depends on time, so they must not matter."""
    parts = load_parts(
        EngineConfig.from_keywords(
            str(tiny_models[variant]), device="cpu", kt_cpuinfer=2, max_total_tokens=1024, page_size=8,
            max_running_requests=2, chunked_prefill_size=48, enable_deterministic_inference=True,
        )
    )  # fmt: skip
    layout = parts.model_config.state_layout(parts.plan.dtype, parts.plan.page_size)
    count = layout.window_pages(2, parts.plan.max_step_tokens)
    assert layout.window > 0 and layout.window_begin(95) > 0 and count < parts.plan.num_pages
    assert parts.plan.num_window_pages == count
    engines = [Engine.from_parts(replace(parts, plan=replace(parts.plan, num_window_pages=n))) for n in (0, count)]
    first = [request(str(i), prompt_of(70 + 25 * i, i), max_tokens=30, logprobs=2) for i in range(2)]
    turns = [request("t", [*prompt_of(95, 1), *prompt_of(20, 9)], max_tokens=10, logprobs=2)]
    kept, sliding = ([scored(engine, some) for some in (first, turns)] for engine in engines)
    assert kept == sliding
    recorded = (engine._runner._model._recorded for engine in engines)
    assert [each is None for each in next(recorded).values()] == [each is None for each in next(recorded).values()]
    engines[1]._kv.flush()
    assert windows_of(engines[1]).available == count == len(windows_of(engines[1])._free)
