"""`kt bench serve`: a server under load, ours or any other with OpenAI's API, as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem.bench.ceilings import measure_read_gbps
from tandem.bench.load_client import LoadClient, LoadError, LoadShape, SentRequest, ServedExperts
from tandem.bench.own_server import own_server
from tandem.bench.rows import kept_rows, stamp
from tandem.engine.start.model_files import prepare
from tandem.engine.start.planning import planned
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import on_one_gpu
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import planned_pool
from tandem.machine.machine import Machine
from tandem.planner.forecast.bound import bytes_per_step

WARM_UP = LoadShape(requests=2, input_len=32, output_len=4, concurrency=2, seed=-1)
_ERRORS_SHOWN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFlags:
    """The flags of a run. url None: `model` is served with `flags` for the time of the measurement."""

    model: str
    url: str | None
    loads: tuple[LoadShape, ...]
    api_key: str | None
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRow:
    """One load. Rates count successful requests over the time from the first one sent to the last token. Times are in
    milliseconds: to the first token, per further token of an answer, between pieces as they came, of a request.
    bound_tok_s: of decoding alone with so many sequences: weights read per step ÷ DRAM bandwidth, measured before the
    server started; 0: not known (another server, a GPU, a rate). flags: of a server of our own. gpu_share, placement,
    live: as `ServedExperts`, when the load ended."""

    bench: str
    config: str
    server: str
    flags: str
    gpu_share: float | None
    placement: str | None
    live: bool | None
    concurrency: int | None
    rate: float | None
    requests: int
    failed: int
    input_len: int
    output_len: int
    spread: float
    shared_prefix: int
    seconds: float
    requests_s: float
    tok_s: float
    bound_tok_s: float
    share: float
    prompt_tok_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    gap_ms_p99: float
    total_ms_p50: float
    machine: str
    commit: str | None
    command: str
    date: str


def run(request: LoadFlags, out: Path | None) -> None:
    console, rows = Console(), []
    with kept_rows(out) as columns:
        for row, answers in measure(request):
            rows.append(row)
            columns.append(dataclasses.asdict(row))
            _show_errors(console, answers)
        console.print(table(rows))


def measure(request: LoadFlags) -> Iterator[tuple[LoadRow, list[SentRequest]]]:
    """Raises LoadError when there is no server, or no request of a load succeeds."""
    if request.url is not None:
        yield from _rows(request, request.url, lambda _batch: 0.0)
        return
    bound = decode_bound(request)
    with ExitStack() as stack:
        with Console(stderr=True).status(f"starting kt serve {request.model} …"):
            address = stack.enter_context(own_server(request.model, request.flags))
        yield from _rows(request, address, bound)


def decode_bound(request: LoadFlags) -> Callable[[int], float]:
    """Tokens per second that no decoding of so many sequences at once can exceed on this machine; 0: not known."""
    config = on_one_gpu(EngineConfig.from_args([request.model, *request.flags]))
    prepare(config)
    target = planned(config, this_machine())
    plan, model, stored = target.plan, target.model, target.stored
    if plan.gpu is not None:
        return lambda _batch: 0.0
    gbps = measure_read_gbps(planned_pool(plan), plan.tier)
    return lambda batch: (
        batch * gbps * 1e9 / bytes_per_step(model, plan.dtype, plan.expert_format, batch, stored)
    )


def _rows(request: LoadFlags, url: str, bound: Callable[[int], float]) -> Iterator[tuple[LoadRow, list[SentRequest]]]:
    client = LoadClient(url, request.api_key)
    name = client.model_name()
    _succeeded(client.run(name, WARM_UP, lambda _n: None)[0])
    for load in request.loads:
        answers, seconds = _under(client, name, load)
        most = bound(load.concurrency) if load.concurrency else 0.0
        experts = client.served_experts(name)
        yield _row(request, name, load, _succeeded(answers), seconds, most, experts), answers


def _under(client: LoadClient, name: str, load: LoadShape) -> tuple[list[SentRequest], float]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(_load_text(load), total=load.requests)
        return client.run(name, load, lambda done: progress.update(task, completed=done))


def _succeeded(answers: list[SentRequest]) -> list[SentRequest]:
    answered = [answer for answer in answers if answer.error is None]
    if not answered:
        raise LoadError(f"every request failed, the first with {answers[0].error}")
    return answered


def _row(
    request: LoadFlags,
    name: str,
    load: LoadShape,
    answers: list[SentRequest],
    seconds: float,
    bound: float,
    experts: ServedExperts,
) -> LoadRow:
    machine, tok_s = Machine.detect(), sum(a.tokens for a in answers) / seconds
    per_token = [t for a in answers if (t := a.seconds_per_token) is not None]
    first, total = [a.first_token_seconds for a in answers], [a.ended - a.sent for a in answers]
    return LoadRow(
        bench="serve",
        config=name,
        server="tandem" if request.url is None else request.url,
        flags=" ".join(request.flags),
        gpu_share=experts.gpu_share,
        placement=experts.placement,
        live=experts.live,
        concurrency=load.concurrency,
        rate=load.rate,
        requests=load.requests,
        failed=load.requests - len(answers),
        input_len=_mean([a.prompt_tokens for a in answers]) if load.texts else load.input_len,
        output_len=_mean([a.tokens for a in answers]) if load.texts else load.output_len,
        spread=load.spread,
        shared_prefix=load.shared_prefix,
        seconds=round(seconds, 6),
        requests_s=round(len(answers) / seconds, 3),
        tok_s=round(tok_s, 2),
        bound_tok_s=round(bound, 2),
        share=round(tok_s / bound, 4) if bound else 0.0,
        prompt_tok_s=round(sum(a.prompt_tokens for a in answers) / seconds, 2),
        ttft_ms_p50=_milliseconds(first, 50),
        ttft_ms_p99=_milliseconds(first, 99),
        tpot_ms_p50=_milliseconds(per_token, 50),
        tpot_ms_p99=_milliseconds(per_token, 99),
        gap_ms_p99=_milliseconds([gap for a in answers for gap in a.gaps], 99),
        total_ms_p50=_milliseconds(total, 50),
        **stamp(f"{machine.cpu_model}, {machine.max_threads} threads; the client runs on it too"),
    )


def _mean(counts: list[int]) -> int:
    return round(sum(counts) / len(counts))


def _milliseconds(seconds: list[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(seconds, percentile)), 2) if seconds else 0.0


def _load_text(load: LoadShape) -> str:
    return f"{load.concurrency} at once" if load.rate is None else f"{load.rate:g} per second"


def _show_errors(console: Console, answers: list[SentRequest]) -> None:
    errors = [answer.error for answer in answers if answer.error is not None]
    for text in errors[:_ERRORS_SHOWN]:
        console.print(f"failed: {text}", style="red", markup=False)
    if len(errors) > _ERRORS_SHOWN:
        console.print(f"… and {len(errors) - _ERRORS_SHOWN} more", style="red")


def table(rows: list[LoadRow]) -> Table:
    first = rows[0]
    lengths = f"{first.input_len} tokens in, {first.output_len} out"
    caption = "tokens per second out and in; bound: share of what decoding alone could do; times: median (p99) in ms"
    experts = ServedExperts(first.gpu_share, first.placement, first.live).text()
    title = "; ".join(filter(None, (f"{first.config}: {first.requests} requests of {lengths}", experts)))
    loads = Table(title=title, caption=caption)
    loads.add_column("load")
    for name in ("out/s", "bound", "in/s", "first token", "per token", "gap p99", "failed"):
        loads.add_column(name, justify="right")
    for row in rows:
        load = f"x {row.concurrency}" if row.rate is None else f"{row.rate:g}/s"
        loads.add_row(
            load, f"{row.tok_s:.1f}", f"{row.share:.0%}" if row.bound_tok_s else "", f"{row.prompt_tok_s:.0f}",
            f"{row.ttft_ms_p50:.0f} ({row.ttft_ms_p99:.0f})", f"{row.tpot_ms_p50:.1f} ({row.tpot_ms_p99:.1f})",
            f"{row.gap_ms_p99:.1f}", str(row.failed),
        )  # fmt: skip
    return loads
