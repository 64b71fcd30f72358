"""A prompt that is alone has long chunks. Somebody who comes meanwhile waits for no more than a short one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fake_model import check_pages, greedy_reference, request, token_ids
from layered_engine import GPU, MOST, SHARED, engine_of, ran
from pausing_model import DEPTH, LONG
from sessions import Session, prompts
from tandem import _core
from tandem.engine.pace import MIN_TOKENS, PrefillPace
from tandem.engine.sequence import Chunk
from tandem.engine.step.prefill import in_layers
from tandem.engine.step.step import ShrinkingStep, Step, no_new_request
from tandem.kernels.cpu_ops import CpuOps
from tandem.models.batch import ForwardBatch


class Comes:
    """Somebody does when this is asked for the n-th time, and is still there later."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def rows_after(index: int, length: int = 64, depth: int = 48, shared: int = 8) -> int | None:
    """Of a chunk beside which somebody comes before layer `index`; None: it stays as it is."""
    step = ShrinkingStep(Step((Chunk(cast(Any, SimpleNamespace()), length, 1),), shared, lambda: True))
    return step.step.num_tokens if step.shrink(depth - index, depth) else None


def test_the_layers_that_are_left_take_no_longer_than_a_short_chunk() -> None:
    """By rows times layers. Rows double, as a library plans each number of them anew."""
    assert [rows_after(index) for index in (0, 23, 24, 35, 36, 41)] == [8, 8, 16, 16, 32, 32]
    assert rows_after(42) is None and rows_after(47) is None  # all of them are ready as soon
    assert rows_after(36, length=32) is None
    for index in range(48):
        rows = rows_after(index) or 64
        assert rows * (48 - index) <= 8 * 48


def test_a_chunk_becomes_shorter_once_and_chooses_no_token_then() -> None:
    asked = [False, True, True]
    whole = Step((Chunk(cast(Any, SimpleNamespace()), 64, 1),), 8, lambda: asked.pop(0))
    step = ShrinkingStep(whole)
    assert [step.shrink(left, 48) for left in (48, 47, 46)] == [False, True, False]
    (chunk,) = step.step.chunks
    assert (chunk.length, chunk.logits) == (8, 0) and asked == [True]
    assert whole.num_tokens == 64  # a step is a value


@pytest.mark.parametrize("n", [1, 3, DEPTH, 99])
def test_a_prompt_goes_on_where_it_was_cut(n: int) -> None:
    """Its answer and its pages are what they are without anybody."""
    engine, outputs = engine_of(), []
    engine.add(request("a", LONG))
    outputs += engine.step(Comes(n))
    first = ran(engine)[0][1]
    assert first == {1: 8, 3: 8, DEPTH: 32, 99: MOST}[n]
    assert engine._scheduler.running[0].computed_len == first
    while engine.has_work():
        outputs += engine.step()
    assert token_ids(outputs) == greedy_reference(LONG, 8)
    check_pages(engine)


def test_a_prompt_that_is_alone_has_long_chunks_and_short_ones_beside_another() -> None:
    engine = engine_of()
    engine.add(request("a", LONG))
    engine.step()
    assert ran(engine) == [(1, MOST)]
    other = engine_of()
    other.add(request("a", LONG))
    other.add(request("b", LONG[1:]))
    other.step()
    assert ran(other) == [(2, SHARED)]


def test_whoever_comes_has_a_token_after_one_short_chunk_more() -> None:
    engine = engine_of()
    engine.add(request("a", LONG))
    engine.step(lambda: True)
    engine.add(request("b", [2, 3, 4]))
    assert [output.id for output in engine.step(lambda: True)] == ["b"]
    assert ran(engine) == [(1, SHARED), (2, SHARED)]


@pytest.mark.parametrize("changes", [None, {"prompt_sizes": ()}, {"shared_tokens": 0}])
def test_elsewhere_nobody_is_asked(changes: dict[str, Any] | None) -> None:
    """Where layers cannot be computed again, or chunks are as long beside others."""
    engine = engine_of(None if changes is None else replace(GPU, sizes=replace(GPU.sizes, **changes)))
    engine.add(request("a", LONG))
    engine.step(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert ran(engine) == [(1, MOST)]


def test_a_pass_that_becomes_shorter_has_the_bits_of_short_chunks(tiny_models) -> None:
    """Of its layers that are left, and of the rest of the prompt, whatever the first layers had."""
    ops, (a, *_) = CpuOps(_core.WorkerPool([-1, -1]), "scalar"), prompts()
    found = []
    for n in (1, 2, None):
        session = Session(tiny_models["qwen3_moe"], ops=ops)
        if n is None:
            session.step([(0, a[:8])])
        else:
            batch = session.batch([(0, a[:23])])
            step = ShrinkingStep(Step((Chunk(cast(Any, SimpleNamespace()), 23, 1),), 8, Comes(n)))
            shorter: list[ForwardBatch] = []

            def cut(
                _: Step, session: Session = session, shorter: list[ForwardBatch] = shorter
            ) -> ForwardBatch:
                session.lengths[0] = 0
                shorter.append(session.batch([(0, a[:8])]))
                return shorter[0]

            with torch.inference_mode():
                in_layers(session.model, batch, session.states, step, cut)
            assert len(shorter) == 1 and step.step.num_tokens == 8
        found.append(session.step([(0, a[8:23])])[0])
    assert all(torch.equal(each, found[-1]) for each in found)


def test_whole_steps_belong_to_prompts_that_are_alone() -> None:
    pace = PrefillPace(8192, overlap_tokens=2048, shared=2048)
    assert pace.step_tokens(0) == 8192 and pace.step_tokens(0, exclusive=False) == 2048
    assert pace.step_tokens(3) == pace.step_tokens(3, exclusive=False) == 3 + 2048
    assert pace.step_tokens(3, pauses=False) == 3 + 4 * MIN_TOKENS
    pace.observe(40_000, 1.0)
    assert pace.step_tokens(3, pauses=False) == 3 + 2048
    assert PrefillPace(8192).step_tokens(0, exclusive=False) == 8192
    assert PrefillPace(8192, streams=True, whole_chunks=True, shared=2048).step_tokens(2, exclusive=False) == 8192


def test_nobody_comes_unless_somebody_says_so() -> None:
    assert not no_new_request()
