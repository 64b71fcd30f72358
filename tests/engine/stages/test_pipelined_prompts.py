"""Prompts of several chunks over stages: each stage has another chunk, and the answers are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fake_model import check_pages, request, run, token_ids
from sessions import prompts
from staged_engines import PROMPTS, staged, whole
from staged_sessions import StagedSession, logits_of, without_gpu
from tandem import _core
from tandem.engine.engine import Engine
from tandem.engine.pace import MIN_TOKENS, PrefillPace
from tandem.engine.sequence import Chunk, Sequence
from tandem.engine.stages.pipeline import Pipeline
from tandem.kernels.reference import TorchOps
from tandem.models.staged import StagedModel

CHUNK = 8


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each chunk that was pipelined."""
    rows, give = list[int](), Pipeline.give

    def noted(self: Pipeline, batch: Any) -> Any:
        rows.append(len(batch.input_ids))
        return give(self, batch)

    monkeypatch.setattr(Pipeline, "give", noted)
    return rows


def pipelined(path: Any, pool: Any, chunks: int = 8, **changes: int) -> Engine:
    return staged(path, pool, (1, 2, 3, 4), pipelined_chunks=chunks, max_step_tokens=CHUNK, **changes)


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_answers_are_those_of_the_whole_model(monkeypatch, tiny_models, given: list[int], variant: str) -> None:
    """One prompt after the other, so each is alone; then again, with prefixes that are found."""
    path, pool = tiny_models[variant], _core.WorkerPool([-1, -1])
    asks = [request(name, prompt, max_tokens=6, ignore_eos=True) for name, prompt in PROMPTS.items()]
    expected = [token_ids(*run(whole(path, pool), ask).values()) for ask in asks]
    without_gpu(monkeypatch, [])
    engine = pipelined(path, pool)
    for _ in range(2):
        assert [token_ids(*run(engine, ask).values()) for ask in asks] == expected
        check_pages(engine)
    assert CHUNK in given and engine.stats().cached_tokens > 0


def test_the_next_chunk_begins_before_this_one_has_ended(monkeypatch, tiny_models) -> None:
    """The host gives chunk after chunk to all stages. It waits for one as many chunks behind as there are stages."""
    without_gpu(monkeypatch, [])
    engine = pipelined(tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1]))
    calls, run_stage = list[Any](), StagedModel.run_stage

    def noted(self: StagedModel, p: Any, states: Any) -> None:
        calls.append(("stage", p.stage, int(p.batch.positions[0]) // CHUNK))
        run_stage(self, p, states)

    monkeypatch.setattr(StagedModel, "run_stage", noted)
    under_way = engine.gpu_runner.pipeline._under_way
    monkeypatch.setattr(under_way, "wait_for_room", lambda most: calls.append(("fewer than", most)))
    monkeypatch.setattr(under_way, "mark", lambda: calls.append("end"))
    run(engine, request("a", list(range(5, 5 + 3 * CHUNK)), max_tokens=1))
    assert calls == [
        each for i in range(3) for each in (("stage", 0, i), ("stage", 1, i), "end", ("fewer than", 3))
    ]  # fmt: skip


def test_a_request_that_comes_ends_the_step_behind_the_chunk(monkeypatch, tiny_models, given: list[int]) -> None:
    """What was not begun is cut anew, beside the newcomer."""
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    asks = [request(name, PROMPTS[name], max_tokens=6, ignore_eos=True) for name in ("a", "b")]
    expected = {name: token_ids(outputs) for (name, _), outputs in run(whole(path, pool), *asks).items()}
    without_gpu(monkeypatch, [])
    engine = pipelined(path, pool)
    engine.add(asks[0])
    assert not engine.step(lambda: len(given) == 2) and given == [CHUNK, CHUNK]
    assert engine._scheduler.running[0].computed_len == 2 * CHUNK
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine, asks[1]).items()}
    assert got == expected
    assert given == [CHUNK, CHUNK]  # two prompts share steps of one chunk
    check_pages(engine)


def test_an_abort_between_steps_gives_the_pages_back(monkeypatch, tiny_models, given: list[int]) -> None:
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    without_gpu(monkeypatch, [])
    engine = pipelined(path, pool, chunks=2)
    ask = request("a", PROMPTS["a"], max_tokens=6, ignore_eos=True)
    engine.add(ask)
    engine.step()
    assert given == [CHUNK, CHUNK]
    engine.abort("a")
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    check_pages(engine)
    assert token_ids(*run(engine, ask).values()) == token_ids(*run(whole(path, pool), ask).values())


def test_a_failing_chunk_costs_its_prompt_alone(monkeypatch, tiny_models, given: list[int]) -> None:
    """The chunks before it are forgotten, too."""
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    ask = request("a", PROMPTS["a"], max_tokens=6, ignore_eos=True)
    expected = token_ids(*run(whole(path, pool), ask).values())
    without_gpu(monkeypatch, [])
    engine, run_stage = pipelined(path, pool), StagedModel.run_stage

    def failing(self: StagedModel, p: Any, states: Any) -> None:
        if p.stage and int(p.batch.positions[0]) == 2 * CHUNK:
            raise RuntimeError("CUDA out of memory")
        run_stage(self, p, states)

    with monkeypatch.context() as broken:
        broken.setattr(StagedModel, "run_stage", failing)
        outputs = run(engine, ask)
    assert outputs["a", 0][-1].finish_reason == "error"
    assert engine.stats().pages_cached == 0
    assert token_ids(*run(engine, ask).values()) == expected
    check_pages(engine)


def test_scored_prompts_are_not_pipelined(monkeypatch, tiny_models, given: list[int]) -> None:
    """Each chunk has as many rows of logits as it has tokens."""
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    ask = request("a", PROMPTS["a"], max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    (expected,) = run(whole(path, pool), ask).values()
    without_gpu(monkeypatch, [])
    (got,) = run(pipelined(path, pool), ask).values()
    assert token_ids(got) == token_ids(expected) and not given
    logprobs = [[token.logprob for token in each[0].prompt_logprobs[1:]] for each in (got, expected)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


@pytest.mark.parametrize("length, logits, most, parts", [
    (20, 1, 8, [(8, 0, 0), (8, 0, 8), (4, 1, 16)]),
    (16, 0, 8, [(8, 0, 0), (8, 0, 8)]),
    (10, 5, 8, [(8, 3, 0), (2, 2, 8)]),
    (3, 1, 8, [(3, 1, 0)]),
])  # fmt: skip
def test_a_chunk_is_cut_with_its_logits(length: int, logits: int, most: int, parts: list[tuple[int, int, int]]) -> None:
    sequence = Sequence("a", 0, list(range(40)), request("a", [1]).sampling, arrival=0, max_len=50, page_size=8, seed=0)
    sequence.computed_len = 4
    cut = Chunk(sequence, length, logits).cut(most)
    assert [(each.length, each.logits, each.offset) for each in cut] == parts
    assert [token for each in cut for token in each.tokens] == sequence.tokens[4 : 4 + length]
    assert [each.first for each in cut] == [4 + offset for *_, offset in parts]


def test_only_a_prompt_that_is_alone_is_pipelined() -> None:
    pace = PrefillPace(2048, shared=512, pipelined=8)
    tokens: Callable[..., int] = pace.step_tokens
    assert tokens(0, pipelines=True) == 8 * 2048
    assert tokens(0) == 2048  # choices are recorded
    assert tokens(0, exclusive=False, pipelines=True) == 512
    assert tokens(3, pipelines=True) == 3 + 4 * MIN_TOKENS
    pace.observe(8 * 2048, 0.1)  # of pipelined chunks
    assert tokens(3, pipelines=True) == 3 + 4 * MIN_TOKENS


@pytest.mark.parametrize("pages", [8, 30])
def test_windows_have_as_many_chunks_as_pages(monkeypatch, tiny_models, given: list[int], pages: int) -> None:
    """Layers with a window keep a page for each row of the step that runs; with few of them a step has fewer chunks."""
    path, pool = tiny_models["gpt_oss"], _core.WorkerPool([-1, -1])
    asks = [request(name, PROMPTS[name], max_tokens=6, ignore_eos=True) for name in ("a", "c")]
    expected = [token_ids(*run(whole(path, pool), ask).values()) for ask in asks]
    without_gpu(monkeypatch, [])
    engine = pipelined(path, pool, num_window_pages=pages)
    assert [token_ids(*run(engine, ask).values()) for ask in asks] == expected
    assert CHUNK in given
    check_pages(engine)


@pytest.mark.parametrize("stages", [2, 3])
def test_each_stage_counts_the_rows_of_every_chunk(monkeypatch, tiny_models, stages: int) -> None:
    """As steps of one chunk each do, and the logits have the same bits."""
    without_gpu(monkeypatch, [])
    tokens = prompts()[0][:23]
    parts = [tokens[first : first + CHUNK] for first in range(0, len(tokens), CHUNK)]
    path, ops = tiny_models["glm4_moe"], [TorchOps() for _ in range(stages)]
    sessions = [StagedSession(path, stages, ops, counted=True) for _ in range(2)]
    turns, pipelined = ([session.batch([(0, part)]) for part in parts] for session in sessions)
    one_by_one, together = (session.runner(()) for session in sessions)
    expected = torch.cat([logits_of(one_by_one, batch) for batch in turns])
    assert torch.equal(together.prompt_logits(pipelined).logits, expected)
    counts = [session.usage.read() for session in sessions]
    assert torch.equal(counts[1].tokens, counts[0].tokens) and torch.equal(counts[1].reads, counts[0].reads)
    assert counts[1].tokens.sum(1).eq(len(tokens) * sessions[0].config.moe.router.top_k).all()
