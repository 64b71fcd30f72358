"""`kt bench decode --explain` and `kt bench prefill --explain`: the path that each step takes. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from tandem.bench.architectures import named_config
from tandem.bench.stored import experts_of, stored_as
from tandem.engine.step.path import Choice, background_path_of, path_of, stages_path_of
from tandem.engine.step.planned import PlannedFacts, StepSizes
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.this_machine import this_machine
from tandem.machine.machine import Machine
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve

T = TypeVar("T")
Wish = list[T] | None
CONFIG, SHARES = "qwen3-30b-a3b", (0.0, 0.5, 1.0)
COLUMNS = "experts on the GPU", "step", "path", "rows of its graph", "because"


class StepQuestion(NamedTuple):
    """formats, shares: of experts, and on the GPU. decode: sequences of a decode step. prefill: tokens of a prompt's
    chunk."""

    config: str
    formats: tuple[str, ...]
    shares: tuple[float, ...]
    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    layers: int | None = None


def planned(question: StepQuestion, fmt: str, share: float, machine: Machine) -> Plan:
    """As the engine would plan it. Raises ConfigError where it does not fit."""
    model = named_config(question.config, question.layers)
    config = EngineConfig.from_keywords(
        question.config, kt_method=fmt, kt_gpu_experts_ratio=share if machine.gpus else None,
        max_running_requests=max(question.decode, default=1),
    )  # fmt: skip
    return resolve(config, model, machine, stored_as(model, "bf16", experts_of(fmt)))


def choices(question: StepQuestion, plan: Plan) -> Iterator[tuple[str, Choice[int, int]]]:
    """Each step in words, and its path."""
    facts = None if plan.gpu is None else PlannedFacts(plan.gpu)
    for count in question.decode:
        yield f"{count} decode", path_of(StepSizes(count, count), facts)
    shared = 0 if plan.gpu is None or not plan.gpu.sizes.prompt_sizes else plan.gpu.sizes.shared_tokens
    for tokens in question.prefill:
        sizes = StepSizes(min(tokens, plan.max_step_tokens))
        shrinks = bool(shared) and sizes.tokens > shared
        chunks = 1 if plan.gpu is None else plan.gpu.pipelined_chunks
        rows = min(tokens, chunks * plan.max_step_tokens)
        pipelined: Choice[int, int] | None = stages_path_of(rows, plan.max_step_tokens)
        yield f"prefill of {rows}", pipelined or path_of(sizes, facts, shrinks=shrinks)
        if facts is not None:
            background = StepSizes(min(sizes.tokens, shared or sizes.tokens))
            yield f"prefill of {background.tokens} beside decode", background_path_of(background, facts)


def decode(config: str | None, formats: Wish[str], shares: Wish[float], batches: Wish[int], layers: int | None) -> None:
    """Prints the paths of steps in which so many sequences decode."""
    sizes = tuple(batches or (1, 8))
    explain(StepQuestion(config or CONFIG, tuple(formats or ("BF16",)), tuple(shares or SHARES), sizes, (), layers))


def prefill(config: str, formats: Wish[str], shares: Wish[float], tokens: Wish[int], layers: int | None) -> None:
    """Prints the paths of prompts of so many tokens."""
    sizes = tuple(tokens or (512, 2048, 8192))
    explain(StepQuestion(config, tuple(formats or ("INT4",)), tuple(shares or SHARES), (), sizes, layers))


def explain(question: StepQuestion) -> None:
    """Prints a table a format."""
    machine = this_machine()
    for fmt in question.formats:
        table = Table(box=box.SIMPLE_HEAD, title=f"{question.config}, experts in {fmt}")
        for name in COLUMNS:
            table.add_column(name, justify="right" if name == COLUMNS[3] else "left")
        for share in question.shares if machine.gpus else (0.0,):
            share_text = f"{share:.0%}" if machine.gpus else "no GPU"
            try:
                plan = planned(question, fmt, share, machine)
            except ConfigError as error:  # of this share alone
                table.add_row(share_text, "any", "none", "", str(error))
                continue
            for step, choice in choices(question, plan):
                rows = choice.decode or choice.prefill
                table.add_row(share_text, step, choice.path.value, str(rows or ""), choice.why)
        Console().print(table)
