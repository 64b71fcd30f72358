"""`kt bench decode`: tokens per second of decoding, beside the memory-bandwidth bound and other engines."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from tandem.bench.ceilings import measure_read_gbps
from tandem.bench.known_quality import MeasuredExperts, quality_line
from tandem.bench.peers import check_installed, llama_cpp_rate, transformers_rate
from tandem.bench.rows import kept_rows, machine_name, of_bench, stamp
from tandem.checkpoint import demo_dir, open_checkpoint, resolve_model
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.start.loader import load_parts, model_directory
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.workers import planned_pool
from tandem.machine.machine import Machine
from tandem.planner.forecast.bound import bytes_per_step
from tandem.planner.plan import Plan
from tandem.spec.model_config import STORED
from tandem.spec.stored import StoredFormats

PROMPT_TOKENS = 32
WARM_STEPS = 4  # before each timed run


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeFlags:
    """The flags of a run. `steps` decode steps are timed `repeats` times per batch size."""

    model: str
    formats: tuple[str | None, ...]  # of experts; None: as they are stored
    batches: tuple[int, ...]
    steps: int
    repeats: int
    transformers: bool
    llama_cpp: bool
    threads: int | None
    tier: str = "auto"  # kernel tier
    deterministic: bool = False
    int8_activations: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRow:
    """One measurement. `bound_tok_s`: the weights a step reads ÷ DRAM bandwidth, measured in turn; 0: not known."""

    bench: str
    config: str
    format: str
    batch: int
    tok_s: float
    bound_tok_s: float
    share: float
    dram_gbps: float
    machine: str
    commit: str | None
    command: str
    date: str


def run(request: DecodeFlags, out: Path | None) -> None:
    if request.transformers:
        check_installed("transformers", "--transformers")
    if request.llama_cpp:
        check_installed("llama_cpp", "--llama-cpp")
    console, rows = Console(), []
    with kept_rows(out) as columns, Console(stderr=True).status("loading …") as status:
        for row in measure(request, lambda what: status.update(f"{what} …")):
            rows.append(row)
            column = dataclasses.asdict(row)
            columns.append(of_bench("decode", column) if out is not None and out.is_dir() else column)
            status.stop()  # its line is rewritten in place
            console.print(_line(row), highlight=False)
            status.start()
        status.stop()
        console.print(table(rows))
        for line in _quality(request):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _quality(request: DecodeFlags) -> Iterator[str]:
    """A line for each format that was measured."""
    is_demo, stored = resolve_model(request.model) == demo_dir(), _stored(request).experts
    for fmt in request.formats:
        as_stored = fmt is None or fmt.upper() in stored.methods
        shares = stored.shares if as_stored else ((fmt or "", 1.0),)
        line = quality_line(request.model, is_demo, MeasuredExperts(shares, request.int8_activations, as_stored))
        if line is not None:
            yield line


def measure(request: DecodeFlags, tell: Callable[[str], None] = lambda _: None) -> Iterator[DecodeRow]:
    """tell: hears what is done next, which takes seconds."""
    for fmt in request.formats:
        yield from _own_rows(request, fmt, tell)
    directory = model_directory(request.model)
    threads = request.threads or Machine.detect().max_threads
    if request.transformers:
        for batch in request.batches:
            tell(f"Transformers, batch {batch}")
            rate = transformers_rate(directory, batch, PROMPT_TOKENS, threads)
            yield _row(request, "transformers generate", "bf16", batch, rate)
    if request.llama_cpp:
        tell("llama.cpp")
        rate = llama_cpp_rate(PROMPT_TOKENS, request.steps, threads)
        yield _row(request, "llama.cpp, dense base", "Q4_1", 1, rate)


def _own_rows(request: DecodeFlags, fmt: str | None, tell: Callable[[str], None]) -> Iterator[DecodeRow]:
    config = EngineConfig.from_keywords(
        request.model,
        kt_method=fmt,
        kt_cpuinfer=request.threads,
        kt_int8_activations=request.int8_activations,
        kernel_tier=request.tier,
        enable_deterministic_inference=request.deterministic,
        disable_dynamic_expert_update=True,  # batches and repeats are of one placement
        max_running_requests=max(request.batches),
    )
    tell(f"loading {request.model}" + (f" with {fmt} experts" if fmt else ""))
    parts, stored = load_parts(config), _stored(request)
    plan, model = parts.plan, parts.model_config
    experts = stored.experts.name if plan.expert_format == STORED else plan.expert_format
    for batch in request.batches:
        tell(f"measuring {fmt or experts}, batch {batch}")
        rate, gbps = decode_rate(Engine.from_parts(parts), model.vocab, batch, request)
        bound = batch * gbps * 1e9 / bytes_per_step(model, plan.dtype, plan.expert_format, batch, stored)
        yield _row(request, _mode(request), experts, batch, rate, bound, gbps)


def _mode(request: DecodeFlags) -> str:
    """Name of a row's engine."""
    modes = {"deterministic": request.deterministic, "int8 activations": request.int8_activations}
    return ", ".join(["tandem", *(name for name, on in modes.items() if on)])


def _stored(request: DecodeFlags) -> StoredFormats:
    """Formats of the model's files."""
    return open_checkpoint(model_directory(request.model)).formats()


def _read_gbps(plan: Plan) -> float:
    """On a pool of its own: the engine's spins between steps, not between benchmarks."""
    return measure_read_gbps(planned_pool(plan), plan.tier)


def decode_rate(engine: Engine, vocab: int, batch: int, request: DecodeFlags) -> tuple[float, float]:
    """(median tokens/s of `batch` sequences, prompts already computed; median GB/s of reading DRAM). The two are
    measured in turn, so that both see the same machine when others share it."""
    steps, repeats = request.steps, request.repeats
    prompts = [
        [(7919 * (i * PROMPT_TOKENS + j) + 13) % vocab for j in range(PROMPT_TOKENS)] for i in range(batch)
    ]
    params = SamplingSettings(
        temperature=0.0, ignore_eos=True
    )  # no limit: all must go on until the last window ends
    for i, prompt in enumerate(prompts):
        engine.add(GenerateRequest(id=str(i), prompt_ids=prompt, sampling=params))
    while sum(len(output.token_ids) for output in engine.step()) < batch:  # prompts are still being computed
        if not engine.has_work():
            raise ConfigError(f"{batch} sequences never ran together: give a smaller --batch")
    rates, gbps = [], []
    for _ in range(repeats):
        gbps.append(_read_gbps(engine.plan))
        rates.append(_timed_rate(engine, steps))
    engine.abort("")
    engine.step()
    return statistics.median(rates), statistics.median(gbps)


def _timed_rate(engine: Engine, steps: int) -> float:
    for _ in range(WARM_STEPS):
        engine.step()
    started, tokens = perf_counter(), 0
    for _ in range(steps):
        tokens += len(engine.step())
    return tokens / (perf_counter() - started)


def _row(
    request: DecodeFlags, bench: str, fmt: str, batch: int, rate: float, bound: float = 0.0, gbps: float = 0.0
) -> DecodeRow:
    return DecodeRow(
        bench=bench,
        config=Path(request.model).name,
        format=fmt,
        batch=batch,
        tok_s=round(rate, 2),
        bound_tok_s=round(bound, 2),
        share=round(rate / bound, 4) if bound else 0.0,
        dram_gbps=round(gbps, 1),
        **stamp(machine_name(Machine.detect(), request.threads)),
    )


def _line(row: DecodeRow) -> str:
    return f"{row.bench}, {row.format}, batch {row.batch}: {row.tok_s:.1f} tokens/s"


def table(rows: list[DecodeRow]) -> Table:
    title = "Decoding; bound = weights read per token ÷ DRAM bandwidth measured in this run"
    rates = Table(title=title)
    for name in ("bench", "format"):
        rates.add_column(name)
    for name in ("batch", "tokens/s", "bound", "share", "DRAM GB/s"):
        rates.add_column(name, justify="right")
    for row in rows:
        cells = (
            (f"{row.bound_tok_s:.1f}", f"{row.share:.0%}", f"{row.dram_gbps:.1f}")
            if row.bound_tok_s
            else ("",) * 3
        )
        rates.add_row(row.bench, row.format, str(row.batch), f"{row.tok_s:.1f}", *cells)
    return rates
