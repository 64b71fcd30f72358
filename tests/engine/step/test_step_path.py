"""Each path of a step, and why it is taken; and a step as a value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from plans import gpu_plan
from tandem.bench import explain_steps
from tandem.bench.explain_steps import StepQuestion, choices
from tandem.cli.bench import bench
from tandem.engine.sequence import Chunk
from tandem.engine.step.path import Path, background_path_of, path_of
from tandem.engine.step.planned import PlannedFacts, StepSizes
from tandem.engine.step.step import Step
from tandem.errors import ConfigError
from tandem.planner.gpu_plan import GpuPlan, StagePlan

ON_GPU = gpu_plan(10, (1, 2, 8), prompt_sizes=(128, 256), shared_tokens=256)
STAGED = replace(ON_GPU, stages=(StagePlan("x", "", 0, 1), StagePlan("x", "", 1, 2)), pipelined_chunks=4)
STREAMED = gpu_plan(10, (1, 2, 8), prompt_sizes=(256,), shared_tokens=256, ring_bytes=1 << 20)


@pytest.mark.parametrize("gpu, step, path, rows", [
    (ON_GPU, StepSizes(1, 1), Path.DECODE_GRAPH, 1),
    (ON_GPU, StepSizes(3, 3), Path.DECODE_GRAPH, 8),
    (ON_GPU, StepSizes(9, 9), Path.EAGER, None),  # more than the largest graph
    (replace(ON_GPU, graph_sizes=()), StepSizes(1, 1), Path.EAGER, None),  # --disable-cuda-graph
    (ON_GPU, StepSizes(100), Path.PREFILL_GRAPH, 128),
    (ON_GPU, StepSizes(63), Path.EAGER, None),  # a graph more than half of which would be copies
    (ON_GPU, StepSizes(257), Path.EAGER, None),
    (ON_GPU, StepSizes(128, 9), Path.EAGER, None),  # more prompts than a graph has places
    (STREAMED, StepSizes(200), Path.SHARED_PREFILL_GRAPH, 256),
    (STREAMED, StepSizes(3000), Path.EAGER, None),
])  # fmt: skip
def test_a_step_takes_the_first_path_that_fits(gpu: GpuPlan, step: StepSizes, path: Path, rows: int | None) -> None:
    choice = path_of(step, PlannedFacts(gpu))
    assert (choice.path, choice.decode or choice.prefill) == (path, rows) and choice.why


def test_paths_that_no_graph_decides() -> None:
    assert path_of(StepSizes(1, 1), None).path is Path.CPU
    assert path_of(StepSizes(128), PlannedFacts(ON_GPU), shrinks=True).path is Path.EAGER_SHRINKING
    assert background_path_of(StepSizes(200), PlannedFacts(STREAMED)).path is Path.BACKGROUND_GRAPH
    assert background_path_of(StepSizes(300), PlannedFacts(STREAMED)).path is Path.BACKGROUND


def test_several_chunks_of_a_prompt_are_pipelined_where_stages_can() -> None:
    """As many as the plan says; without stages a prompt is a chunk."""
    question = StepQuestion("c", ("BF16",), (1.0,), prefill=(100, 2048, 2049, 9000))
    for plan, rows in ((STAGED, [100, 2048, 2049, 8192]), (ON_GPU, [100, 2048, 2048, 2048])):
        made = cast(Any, SimpleNamespace(gpu=plan, max_step_tokens=2048))
        steps = [(step, choice.path) for step, choice in choices(question, made) if "beside" not in step]
        assert [step for step, _ in steps] == [f"prefill of {count}" for count in rows]
        assert [path is Path.PIPELINED for _, path in steps] == [count > 2048 for count in rows]


def test_every_path_has_a_question_that_names_it() -> None:
    plans = [None, ON_GPU, STREAMED, STAGED]
    question = StepQuestion("c", ("BF16",), (0.5,), decode=(1, 9), prefill=(100, 200, 8192, 16384))
    seen = set[Path]()
    for gpu in plans:
        plan = cast(Any, SimpleNamespace(gpu=gpu, max_step_tokens=8192))
        seen |= {choice.path for _, choice in choices(question, plan)}
    assert seen >= set(Path) - {Path.BACKGROUND}


def test_the_benches_print_the_paths() -> None:
    for command in (["decode", "--batch", "3"], ["prefill", "--tokens", "512"]):
        result = CliRunner().invoke(bench, [*command, "--explain", "--config", "olmoe-1b-7b"], env={"COLUMNS": "160"})
        assert result.exit_code == 0 and "olmoe-1b-7b" in result.output, result.output
        assert "cpu" in result.output or "graph" in result.output or "eager" in result.output


def test_a_share_that_does_not_fit_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*_: object) -> object:
        raise ConfigError("the model does not fit")

    monkeypatch.setattr(explain_steps, "planned", planned)
    result = CliRunner().invoke(bench, ["decode", "--explain"], env={"COLUMNS": "160"})
    assert result.exit_code == 0 and "the model does not fit" in result.output, result.output


def test_a_step_does_not_change() -> None:
    chunk = Chunk(cast(Any, SimpleNamespace(pending_len=64, prefills=True)), 64, 1)
    step = Step((chunk,), shared_tokens=8)
    with pytest.raises(FrozenInstanceError):
        step.chunks = ()  # type: ignore[misc]
    shrunk = step.shrunk(8)
    assert (shrunk.num_tokens, shrunk.shrinks, shrunk.chunks[0].logits) == (8, False, 0)
    assert step.shrinks and step.num_tokens == 64 and step.has_prefill and not step.has_drafts
