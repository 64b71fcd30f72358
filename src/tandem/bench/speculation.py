"""`kt bench decode --speculative`: decoding with draft tokens beside decoding without, in turn, on real prompts."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.bench.gaps.made_up import made_up_parts, write_folder
from tandem.bench.rows import kept_rows, machine_name, progress, stamp
from tandem.engine.engine import Engine
from tandem.engine.pace import PrefillPace
from tandem.engine.protocol import GenerateRequest, SamplingSettings, SpeculationStats
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.engine.start.loader import load_parts
from tandem.engine.start.parts import EngineParts
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS, SpeculationPlan

_CODE = "\n".join(  # of some thirty lines
    [inspect.getsource(PrefillPace.observe), inspect.getsource(PrefillPace.step_tokens)]
)
CONTEXT = 4096  # of made-up models
MODEL_S_OWN = "model"  # the experts that neighbouring tokens share are those of the model's own routing
TASKS = {
    "rewrite": f"Rewrite this code. Rename `rate` to `speed`.\n```python\n{_CODE}```",
    "prose": "Tell me a long story about a lighthouse keeper and the sea.",
}
BEGUN = {  # how an answer begins; without it the demo model talks about the code and leaves the subject
    "rewrite": "Here is the code with the new name:\n```python\n"
}


@dataclass(frozen=True, slots=True)
class SpeculationFlags:
    """The flags of a run. `tokens` of each answer are timed, `repeats` times each way; acceptances: of draft tokens
    from the known answer, instead of the algorithm's own."""

    model: str
    formats: tuple[str | None, ...]  # of experts; None: as they are stored
    batches: tuple[int, ...]
    tokens: int
    repeats: int
    threads: int | None
    tier: str
    algorithm: str
    most: int
    governed: bool
    acceptances: tuple[float, ...] = ()
    config: str | None = None  # a named architecture with made-up weights, instead of `model` ...
    layers: int | None = None  # ... and how many of its layers; None: all


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """One measurement. ratio: the median of the turns' own. acceptance: wanted, or the share of the draft tokens that
    were accepted; steps: most draft tokens of a sequence in a step."""

    bench: str
    config: str
    format: str
    task: str
    algorithm: str
    acceptance: float
    overlap: str
    steps: int
    governor: bool
    batch: int
    gpu_share: float
    tok_s: float
    plain_tok_s: float
    ratio: float
    widths: list[int]  # as `told.governed` says them, and the next two
    believed_ms: list[float]
    believed_chances: list[float]
    machine: str
    commit: str | None
    command: str
    date: str


def run(request: SpeculationFlags, out: Path | None) -> None:
    console, rows = Console(), list[SpeculationRow]()
    with kept_rows(out) as columns:
        for row in measure(request):
            rows.append(row)
            columns.append(asdict(row))
            text = f"{row.ratio:.2f} x; {governed_text(columns[-1])}"
            console.print(f"{row.task}, {row.format}, batch {row.batch}: {text}", highlight=False, soft_wrap=True)
        console.print(table(rows))


def measure(request: SpeculationFlags) -> Iterator[SpeculationRow]:
    for fmt in request.formats:
        progress(f"{request.config or request.model}, {fmt or 'as stored'}: weights")
        parts = _parts(request, fmt)
        for batch in request.batches:
            for task in TASKS:
                progress(f"{task}, batch {batch}: the answers without drafts")
                pair = _TimedAnswers(parts, task, batch, request)
                for acceptance in request.acceptances or (None,):
                    progress(f"{task}, batch {batch}: {request.repeats} turns")
                    yield _row(request, fmt or parts.plan.expert_format, task, batch, acceptance, pair)


def _parts(request: SpeculationFlags, fmt: str | None) -> EngineParts:
    if request.config is None:
        return load_parts(_config(request, request.model, fmt))
    with TemporaryDirectory(prefix="tandem-bench-") as folder:
        write_folder(Path(folder), request.config, request.layers)
        return made_up_parts(_config(request, folder, fmt))


def _config(request: SpeculationFlags, model: str, fmt: str | None) -> EngineConfig:
    return EngineConfig.from_keywords(
        model,
        device="cpu",
        kt_method=fmt,
        kt_cpuinfer=request.threads,
        kernel_tier=request.tier,
        max_running_requests=max(request.batches),
        speculative_algorithm=request.algorithm,
        context_length=CONTEXT if request.config else None,
    )


class _TimedAnswers:
    """The same answers with draft tokens and without, one after the other."""

    def __init__(self, parts: EngineParts, task: str, batch: int, request: SpeculationFlags) -> None:
        self._parts, self._request = parts, request
        self._plain = Engine.from_parts(replace(parts, plan=replace(parts.plan, speculation=None)))
        self._prompts = [_prompt(parts, task, i) for i in range(batch)]
        self._answers = {(str(i), 0): tokens for i, tokens in enumerate(self._timed(self._plain)[1])}

    def ratios(self, acceptance: float | None) -> tuple[list[tuple[float, float]], SpeculationStats]:
        """(tokens per second with draft tokens, without) of every repeat; and what the engine says of them."""
        engine = self._speculative_engine(acceptance)
        self._timed(engine)  # it learns what steps take
        turns = []
        for i in range(self._request.repeats):
            ways = (engine, self._plain) if i % 2 else (self._plain, engine)
            rates = {way: self._timed(way)[0] for way in ways}
            turns.append((rates[engine], rates[self._plain]))
        stats = engine.stats().speculation
        assert stats is not None
        return turns, stats

    def _speculative_engine(self, acceptance: float | None) -> Engine:
        request, parts = self._request, self._parts
        algorithm = "NGRAM" if parts.plan.speculation is None else parts.plan.speculation.algorithm
        speculation = SpeculationPlan(algorithm, request.most, request.governed)
        drafter = None
        if acceptance is not None:
            drafter = OracleDrafter(self._answers, acceptance, parts.model_config.vocab)
        plan = replace(parts.plan, speculation=speculation)
        return Engine.from_parts(replace(parts, plan=plan, drafter=drafter))

    def _timed(self, engine: Engine) -> tuple[float, list[list[int]]]:
        """Tokens per second from when all prompts are computed; and the answers."""
        params = SamplingSettings(temperature=0.0, ignore_eos=True, max_tokens=self._request.tokens)
        answers: list[list[int]] = [[] for _ in self._prompts]
        for i, prompt in enumerate(self._prompts):
            engine.add(GenerateRequest(id=str(i), prompt_ids=prompt, sampling=params))
        started, before = perf_counter(), 0
        while engine.has_work():
            for output in engine.step():
                answers[int(output.id)] += output.token_ids
            if not before and all(answers):
                started, before = perf_counter(), sum(map(len, answers))
        return (sum(map(len, answers)) - before) / (perf_counter() - started), answers


def _prompt(parts: EngineParts, task: str, number: int) -> list[int]:
    """Those of a batch begin differently."""
    message = TASKS[task] if number == 0 else f"Question {number}. {TASKS[task]}"
    tokenizer = parts.tokenizer
    assert tokenizer is not None
    beginning = BEGUN.get(task, "")
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{message}\n{beginning}")
    text = tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True)
    return tokenizer.encode(text + beginning, add_special_tokens=False)


def _row(
    request: SpeculationFlags, fmt: str, task: str, batch: int, acceptance: float | None, pair: _TimedAnswers
) -> SpeculationRow:
    turns, stats = pair.ratios(acceptance)
    machine: dict[str, Any] = stamp(machine_name(Machine.detect(), request.threads))
    measured = stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else 0.0
    return SpeculationRow(
        bench="speculation",
        config=request.config or Path(request.model).name,
        format=fmt.lower(),
        task=task,
        algorithm=_algorithm(request, acceptance),
        acceptance=round(measured if acceptance is None else acceptance, 3),
        overlap=MODEL_S_OWN,
        steps=request.most,
        governor=request.governed,
        batch=batch,
        gpu_share=0.0,
        tok_s=round(statistics.median(speculative for speculative, _ in turns), 2),
        plain_tok_s=round(statistics.median(plain for _, plain in turns), 2),
        ratio=round(statistics.median(speculative / plain for speculative, plain in turns), 3),
        **governed(stats),
        **machine,
    )


def _algorithm(request: SpeculationFlags, acceptance: float | None) -> str:
    """A draft layer does its work even where other draft tokens than its own count."""
    if acceptance is None:
        return request.algorithm
    algorithm = "DSPARK" if request.algorithm == "DSPARK" else "NEXTN"
    return f"{algorithm}, foretold" if request.algorithm in DRAFT_ALGORITHMS else "foretold"


def table(rows: list[SpeculationRow]) -> Table:
    ratios = Table(title="Decoding with draft tokens, beside decoding without, in turn")
    for name in ("task", "format", "algorithm", "governor"):
        ratios.add_column(name)
    for name in ("batch", "steps", "acceptance", "tokens/s", "plain", "ratio"):
        ratios.add_column(name, justify="right")
    for r in rows:
        figures = f"{r.acceptance:.2f}", f"{r.tok_s:.1f}", f"{r.plain_tok_s:.1f}", f"{r.ratio:.2f}"
        governor = "on" if r.governor else "off"
        ratios.add_row(r.task, r.format, r.algorithm, governor, str(r.batch), str(r.steps), *figures)
    return ratios


def governed(stats: SpeculationStats) -> dict[str, Any]:
    """widths: how often a sequence had 0, 1, … draft tokens in a step. believed_ms: of a step where each sequence has
    so many. believed_chances: that a draft token is accepted, by kind; a draft layer's first, second, …"""
    return {
        "widths": list(stats.widths),
        "believed_ms": [round(1e3 * seconds, 3) for seconds in stats.believed_seconds],
        "believed_chances": [round(chance, 3) for chance in stats.believed_chances],
    }


def governed_text(row: dict[str, Any]) -> str:
    """Text of such columns, for people."""
    chosen = ", ".join(f"{width}: {count}" for width, count in enumerate(row["widths"]) if count)
    text = f"widths chosen {chosen}"
    if not row["believed_ms"]:
        return text
    plain, *others = row["believed_ms"]
    slower = ", ".join(f"{each / plain:.2f}" for each in others)
    chances = ", ".join(f"{chance:.2f}" for chance in row["believed_chances"])
    return f"{text}; believed: a step {plain:.1f} ms, with drafts {slower} x; accepted {chances}"
