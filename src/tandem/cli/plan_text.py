"""A `Report` as text: the answer first, then what it takes, what was chosen, how fast, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cli.serve import VALUE_WIDTH
from tandem.planner.choices.decision import Decision
from tandem.planner.forecast.advice import PlanChange
from tandem.planner.forecast.compare import ComparedPlan
from tandem.planner.forecast.ledger import Ledger
from tandem.planner.forecast.prediction import Prediction, Range
from tandem.planner.forecast.quantisations import Quantisation
from tandem.planner.forecast.report import Report
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.memory import gib

ROUNDING_BYTES = 1 << 20  # the KV cache is whole pages


def show(report: Report, measured: Mapping[str, float] | None = None) -> None:
    console = Console()
    _say(console, f"{report.model} with {report.machine}", "dim")
    idle = "" if report.plan is None else report.plan.idle
    _say(console, _headline(report, idle), "bold red" if not report.fits else "bold yellow" if idle else "bold green")
    for reason in report.reasons:
        _say(console, f"  * {reason}")
    if report.assumed:
        _say(console, report.assumed, "dim")
    _ways(console, "To make it fit", report.to_fit)
    if report.ledgers and not report.fits:
        console.print("")
        _say(console, "What it would take, with as much RAM as it needs:")
    for ledger in report.ledgers:
        console.print("", ledger_table(ledger), sep="\n")
    if report.plan is not None:
        console.print("", choices_table(report.plan.decisions), sep="\n")
    if report.predicted is not None:
        console.print("", speed_table(report.predicted, measured or {}), sep="\n")
        _say(console, speeds_text(report.speeds), "dim")
    _ways(console, "To use the GPU", report.to_use_gpu)
    _ways(console, "To go faster", report.to_go_faster)
    if report.compared:
        console.print("", compare_table(report.compared), sep="\n")
    for notice in report.notices:
        _say(console, f"note: {notice}")


def _headline(report: Report, idle: str) -> str:
    """With what leaves a GPU idle, and the first way to use it."""
    if not report.fits:
        return "It does not run there:"
    if not idle:
        return f"It fits.{_in_short(report)}"
    ways = report.to_use_gpu
    advice = f" This would use it: {ways[0].change}{' (lossy)' if ways[0].lossy else ''}." if ways else ""
    return f"It fits, but {idle}.{advice}{_in_short(report)}"


def _in_short(report: Report) -> str:
    """Speed and context, before the tables that say why."""
    if report.predicted is None or report.plan is None:
        return ""
    single, prompt = report.predicted.decode[min(report.predicted.decode)], report.predicted.prompt
    return (
        f" Predicted: {_rate(single.low)} to {_rate(single.high)} tokens/s of one answer, "
        f"{_rate(prompt.low)} to {_rate(prompt.high)} of a prompt. Context: {report.plan.context_length:,} tokens."
    )


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style or None)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in columns:
        table.add_column(
            heading.strip(),
            header_style="bold",
            no_wrap=heading not in ("because", "what", "value"),
            max_width=VALUE_WIDTH if heading == "value" else None,
            justify="right" if heading[0] == " " else "left",
        )
    return table


def ledger_table(ledger: Ledger) -> Table:
    """Line by line, then the sum, and what may be used."""
    table = _table(ledger.place, "taken by", " size", "what")
    for entry in ledger.entries:
        table.add_row(entry.name, gib(entry.nbytes), Text(entry.what))
    table.add_row("together", gib(ledger.total_bytes), "", style="bold")
    table.add_row("may be used", gib(ledger.budget_bytes), f"of {gib(ledger.free_bytes)} free")
    short = -ledger.left_bytes > ROUNDING_BYTES
    table.add_row(
        "missing" if short else "left",
        gib(abs(ledger.left_bytes) if short else max(0, ledger.left_bytes)),
        style="bold red" if short else "",
    )
    return table


def choices_table(decisions: Iterable[Decision]) -> Table:
    table = _table("Choices", "choice", "value", "because")
    for decision in decisions:
        table.add_row(*map(Text, dataclasses.astuple(decision)))
    return table


def speed_table(predicted: Prediction, measured: Mapping[str, float]) -> Table:
    """measured: by the same names, where something was."""
    columns = (
        "tokens per second",
        " predicted",
        " at best",
        *((" measured",) if measured else ()),
        "takes most of the time",
    )
    table = _table("Speed", *columns)
    for name, speed in speeds_by_name(predicted).items():
        cells = [name, f"{_rate(speed.low)} to {_rate(speed.high)}", _rate(speed.bound)]
        cells += [_rate(measured[name]) if name in measured else ""] if measured else []
        table.add_row(*cells, _largest(speed))
    return table


def speeds_by_name(predicted: Prediction) -> dict[str, Range]:
    """Every range under the name that tables and `measured` use."""
    by_name = {f"decoding, {_sequences(batch)}": speed for batch, speed in predicted.decode.items()}
    return by_name | {f"prompt of {predicted.prompt_tokens}": predicted.prompt}


def _sequences(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch} sequences"


def _rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _largest(speed: Range) -> str:
    name, seconds = max(speed.parts.items(), key=lambda part: part[1])
    return f"{name}, {seconds / sum(speed.parts.values()):.0%}"


def speeds_text(speeds: Speeds) -> str:
    """Speeds that the prediction stands on, and where each number comes from."""
    parts = [_spoken(speeds, "dram_gbps", f"RAM {speeds.dram_gbps:.0f} GB/s")]
    parts.append(_spoken(speeds, "cpu_flops", f"CPU {speeds.cpu_flops / 1e12:.2f} TFLOPS"))
    if speeds.gpu_gbps:
        parts.append(_spoken(speeds, "gpu_gbps", f"GPU {speeds.gpu_gbps:.0f} GB/s"))
        parts.append(_spoken(speeds, "gpu_flops", f"{speeds.gpu_flops / 1e12:.0f} TFLOPS"))
    return "Predicted from: " + ", ".join(parts)


def _spoken(speeds: Speeds, name: str, text: str) -> str:
    return f"{text} ({speeds.sources.get(name, 'assumed')})"


def _ways(console: Console, title: str, ways: list[PlanChange]) -> None:
    if not ways:
        return
    _say(console, f"\n{title}", "bold")
    for way in ways:
        _say(console, f"  {way.change}: {way.brings}{' (lossy)' if way.lossy else ''}")


def show_quantisations(model: str, machine: str, rows: list[Quantisation]) -> None:
    console, fitting = Console(), [row for row in rows if row.fits]
    _say(console, f"{model} with {machine}", "dim")
    if fitting:
        _say(console, f"The largest that fits: kt serve {fitting[0].name}", "bold green")
    else:
        _say(console, "None of its files runs there.", "bold red")
    console.print("", quantisation_table(model, rows), sep="\n")
    _say(
        console,
        "KL: what the experts' types cost the demo model, in nats, a mean over their weights (docs/quality.md). "
        "Another model's is another; files that were made with importances are better.",
        "dim",
    )


def quantisation_table(model: str, rows: list[Quantisation]) -> Table:
    columns = "file", " GB", "experts", " on the GPU", " VRAM", " RAM", " decoding", " prompt", " KL"
    table = _table("Files, in tokens per second", *columns)
    for row in rows:
        plan, kl = row.plan, "not known" if row.kl is None else f"{row.kl:.4f}"
        cells = [row.name.removeprefix(model).lstrip(":/"), f"{row.file_bytes / 1e9:.1f}", row.types]
        if plan.decode is None or plan.prompt is None:
            table.add_row(*cells, "", "", "", "not possible" if plan.fits else "does not fit", "", kl, style="dim")
            continue
        rates = (f"{_rate(r.low)} to {_rate(r.high)}" for r in (plan.decode, plan.prompt))
        table.add_row(*cells, f"{plan.planned_share:.0%}", gib(plan.vram_bytes), gib(plan.ram_bytes), *rates, kl)
    return table


def compare_table(rows: list[ComparedPlan]) -> Table:
    table = _table("Compared, in tokens per second", "experts", " on the GPU", " VRAM", " RAM", " decoding", " prompt")
    for row in rows:
        name = f"{row.method}{' (lossy)' if row.lossy else ''}"
        if row.decode is None or row.prompt is None:
            share = "what fits" if row.gpu_share is None else f"{row.gpu_share:.0%}"
            table.add_row(
                name, share, "", "", "not possible" if row.fits else "does not fit", "", style="dim"
            )
        else:
            rates = (f"{_rate(r.low)} to {_rate(r.high)}" for r in (row.decode, row.prompt))
            table.add_row(name, f"{row.planned_share:.0%}", gib(row.vram_bytes), gib(row.ram_bytes), *rates)
    return table
