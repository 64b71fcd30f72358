"""Pages and slots: nothing leaks, nothing is shared that should not be, snapshots give what recomputing gives.

`FoldingModel` compares every sequence's slot with its tokens before every step, so that a wrong, stale or shared slot
fails at once.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_folding import folded, folding_config, folding_engine
from fake_model import greedy_reference, request, run, token_ids
from tandem.engine.state.arrays import allocate
from tandem.engine.state.slots import SlotPool
from tandem.spec.state import Array, Fold, Pages, WindowRing, state_layout

PAGE = 4


def check_empty(engine) -> None:
    """After the last request: every slot is free or a snapshot, every page free or idle."""
    slots = engine._scheduler._store.slots
    assert slots.available == engine.plan.num_slots - 1
    assert engine._kv.available == engine._kv.num_pages
    assert not set(slots._free) & set(slots._snapshots.values())


def long_prompt(length: int, first: int = 2) -> list[int]:
    return [(first + 7 * i) % 60 + 2 for i in range(length)]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("step_tokens", [9, 16, 64])
def test_answers_are_those_of_the_tokens_alone(cached: bool, step_tokens: int) -> None:
    engine = folding_engine(radix_cache=cached, max_step_tokens=step_tokens)
    prompts = [long_prompt(n, n) for n in (1, 3, 4, 5, 17, 40)]
    outputs = run(engine, *(request(str(i), p, max_tokens=12) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        assert token_ids(outputs[str(i), 0]) == greedy_reference(prompt, 12)
    check_empty(engine)


def test_a_second_turn_takes_up_where_the_first_one_ended() -> None:
    """A snapshot at the answer's newest page border: fewer rows than two pages and the new tokens are computed."""
    engine = folding_engine(num_pages=128, max_step_tokens=64)
    prompt = long_prompt(50)
    answer = token_ids(run(engine, request("a", prompt, max_tokens=30))["a", 0])
    model = engine._runner._model
    before, second = model.rows_run, [*prompt, *answer, 9, 8, 7]
    outputs = run(engine, request("b", second, max_tokens=1))
    assert model.rows_run - before <= 3 + 2 * PAGE
    assert outputs["b", 0][0].cached_tokens >= len(second) - 3 - 2 * PAGE
    check_empty(engine)


def test_equal_prompts_share_all_but_the_last_page() -> None:
    engine = folding_engine(num_pages=128, max_step_tokens=64)
    prompt = long_prompt(41)
    run(engine, request("a", prompt, max_tokens=1))
    before = engine._runner._model.rows_run
    run(engine, request("b", prompt, max_tokens=1))
    assert engine._runner._model.rows_run - before == 1  # 40 of 41 tokens came from ten pages and a snapshot


def test_a_prompt_that_parts_from_a_known_one_leaves_a_snapshot_there() -> None:
    """Pages are known up to the parting, a snapshot is not; the second of its kind finds one."""
    engine = folding_engine(num_pages=256, max_step_tokens=256)
    shared = long_prompt(40)
    run(engine, request("a", [*shared, *long_prompt(20, 5)], max_tokens=1))
    rows = []
    for name, first in (("b", 11), ("c", 23)):
        before = engine._runner._model.rows_run
        run(engine, request(name, [*shared, *long_prompt(20, first)], max_tokens=1))
        rows.append(engine._runner._model.rows_run - before)
    assert rows[1] <= 20 + 1 < rows[0]


def test_preempted_sequences_go_on_with_the_same_answer() -> None:
    engine = folding_engine(num_pages=24, max_running_requests=4, max_step_tokens=32)
    prompts = [long_prompt(9, i) for i in range(4)]
    outputs = run(engine, *(request(str(i), p, max_tokens=40) for i, p in enumerate(prompts)))
    assert engine.stats().preemptions > 0
    for i, prompt in enumerate(prompts):
        assert token_ids(outputs[str(i), 0]) == greedy_reference(prompt, 40)
    check_empty(engine)


@pytest.mark.parametrize("cached", [True, False])
def test_the_answers_of_one_request(cached: bool) -> None:
    engine = folding_engine(radix_cache=cached)
    outputs = run(engine, request("a", long_prompt(13), n=3, temperature=1.0, seed=5, max_tokens=6))
    assert len(outputs) == 3
    check_empty(engine)


def test_snapshots_give_way_to_sequences() -> None:
    """As few slots as the running ones need: answers are right, and nothing waits for ever."""
    engine = folding_engine(num_slots=1 + 2 * 3, max_running_requests=3, num_pages=128)
    prompts = [long_prompt(9 + i, i) for i in range(9)]
    outputs = run(engine, *(request(str(i), p, max_tokens=5) for i, p in enumerate(prompts)))
    assert all(token_ids(outputs[str(i), 0]) == greedy_reference(p, 5) for i, p in enumerate(prompts))
    check_empty(engine)


Turn = tuple[int, int, int]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=14),
    st.integers(20, 60),
    st.integers(2, 5),
    st.sampled_from([8, 16, 50]),
)
def test_any_traffic(turns: list[Turn], pages: int, running: int, step_tokens: int) -> None:
    """Prompts that begin alike, abandoned in mid-answer now and then, in caches that are too small for all of them."""
    engine = folding_engine(num_pages=pages, max_running_requests=running, max_step_tokens=step_tokens)
    wanted, outputs = {}, dict[str, list[int]]()

    def step() -> None:
        for output in engine.step():
            outputs.setdefault(output.id, []).extend(output.token_ids)

    for i, (kind, length, answer) in enumerate(turns):
        prompt = [*long_prompt(8 + 4 * (kind % 3), 3), *long_prompt(length, kind)]
        if len(prompt) + answer >= pages * PAGE:
            continue
        engine.add(request(str(i), prompt, max_tokens=answer))
        wanted[str(i)] = greedy_reference(prompt, answer)
        if kind == 5:
            step()
            engine.abort(str(i))
            wanted.pop(str(i))
    for _ in range(5000):
        if not engine.has_work():
            break
        step()
    assert not engine.has_work()
    assert {name: outputs[name] for name in wanted} == wanted
    check_empty(engine)


# -- the parts ---


def test_the_layout_counts_what_is_allocated() -> None:
    states = [
        Pages((Array("k", (2, 3)), Array("v", (2, 3)))),
        Fold((Array("state", (5, 7), "float32"), Array("inputs", (11,)))),
        Pages((Array("entry", (8,)),), stride=4),
        WindowRing(Array("window", (16,)), 8),
    ]
    layout = state_layout(states, "bfloat16", 16, draft_tokens=3)
    made = allocate(layout, 10, slots=3)
    pages = [array for state, arrays in zip(states, made.arrays, strict=True) for array in arrays
             if isinstance(state, Pages)]  # fmt: skip
    assert sum(array.nbytes for array in pages) == 10 * layout.page_bytes
    assert [tuple(array.shape) for array in pages] == [(10, 16, 2, 3), (10, 16, 2, 3), (10, 4, 8)]
    assert made.slots.shape == (3, layout.slot_bytes) and layout.slot_bytes == 256 + 256 + 512
    assert tuple(made.arrays[3][0].shape) == (3, 8 + 3, 16)
    state, inputs = made.arrays[1]
    state[2].fill_(1.5)
    inputs[2].fill_(2.5)
    assert not made.slots[:2].any() and made.slots[2].any()


def test_a_slot_is_restored_byte_for_byte() -> None:
    made = allocate(folding_config().state_layout("float32", PAGE), 4, slots=5)
    pool = SlotPool(made.slots)
    first, second, third = (pool.take() for _ in range(3))
    made.slots[first].random_(0, 255)
    pool.copy(first, second, 12)
    pool.keep(7, second)
    assert pool.has(7) and pool.snapshots == 1
    assert pool.restore(7, third) == 12
    assert made.slots[third].equal(made.slots[first])
    pool.forget(7)
    assert not pool.has(7)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(second)


def test_the_fake_folds_apart() -> None:
    assert folded([1, 2]) != folded([2, 1]) != folded([1])
