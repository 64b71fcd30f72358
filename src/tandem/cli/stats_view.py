"""Views of `kt stats`, in the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from tandem.errors import ConfigError
from tandem.experts.usage.usage_file import UsageRecord, read_usage
from tandem.experts.usage.usage_summary import UsageSummary, summary

# Use relative to even use: up to the bound, a sign for terminals without colours, and a colour (viridis).
LEVELS = (
    (0.05, " ", "#440154"), (0.25, "·", "#46327e"), (0.5, ":", "#365c8d"), (1.0, "░", "#277f8e"),
    (2.0, "▒", "#1fa187"), (4.0, "▓", "#4ac16d"), (8.0, "█", "#a0da39"), (float("inf"), "█", "#fde725"),
)  # fmt: skip
FIXED_COLUMNS = 36  # what the table needs beside the heat map
LEAST_COLUMNS = 16
WIDEST_CELL = 4  # of few experts


def run(file: Path, png: Path | None, as_json: bool) -> None:
    if png is not None:
        from tandem.bench.figures import check_matplotlib

        check_matplotlib("--png")
    record = read_usage(file)
    try:
        usage = summary(record)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    if as_json:
        print(json.dumps(as_dict(file, record, usage), indent=1))
    else:
        show(Console(), record, usage)
    if png is not None:
        from tandem.cli.stats_plot import draw

        draw(png, record, usage)
        if not as_json:
            print(f"Written to {png}")


def as_dict(file: Path, record: UsageRecord, summary: UsageSummary) -> dict[str, Any]:
    return {
        "file": str(file), "model": record.model, "mode": record.mode, "passes": record.passes,
        "tokens": record.tokens, "experts": summary.experts, "effective": round(summary.effective, 3),
        "gpu_experts": summary.gpu_experts, "gpu_tokens": summary.gpu_tokens,
        "curve": [dataclasses.asdict(point) for point in summary.curve],
        "layers": [dataclasses.asdict(layer) for layer in summary.layers],
    }  # fmt: skip


def show(console: Console, record: UsageRecord, summary: UsageSummary) -> None:
    console.print(headline(record, summary), highlight=False)
    console.print(heat_map(summary, console.width))
    console.print(legend(summary, console.width))
    console.print(curve(summary))
    if summary.gpu_experts is not None and summary.gpu_tokens is not None:
        console.print(
            f"On the GPU: {summary.gpu_experts:.1%} of the experts, {summary.gpu_tokens:.1%} of the routed tokens.",
            highlight=False,
        )


def headline(record: UsageRecord, summary: UsageSummary) -> str:
    parts = [record.model or "model not named", f"{len(summary.layers)} MoE layers of {summary.experts} experts"]
    if record.tokens:
        parts.append(f"{record.tokens:,} tokens in {record.passes:,} steps")
    parts.append(f"{summary.effective:.1f} effective experts a layer")
    return ", ".join(parts)


def heat_map(summary: UsageSummary, width: int) -> Table:
    rows = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("layer", "effective", "hottest 10 %", "unused"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column(f"experts 0 to {summary.experts - 1}", no_wrap=True)
    for layer, row in zip(summary.layers, summary.relative, strict=True):
        rows.add_row(
            str(layer.layer), f"{layer.effective:.1f}", f"{layer.hottest_tenth:.0%}", str(layer.unused),
            cells(row, room(width)),
        )  # fmt: skip
    return rows


def room(width: int) -> int:
    """Columns of the heat map."""
    return max(LEAST_COLUMNS, width - FIXED_COLUMNS)


def per_cell(experts: int, columns: int) -> int:
    return -(-experts // columns)


def cells(row: Tensor, columns: int) -> Text:
    """One layer; a cell shows the most used of its experts."""
    text, step = Text(), per_cell(len(row), columns)
    wide = max(1, min(WIDEST_CELL, columns // len(row)))
    for first in range(0, len(row), step):
        value = float(row[first : first + step].max())
        _, sign, colour = next(level for level in LEVELS if value <= level[0])
        text.append(sign * wide, style=f"{colour} on {colour}" if sign == " " else colour)
    return text


def legend(summary: UsageSummary, width: int) -> Text:
    step = per_cell(summary.experts, room(width))
    text = Text("Beside even use, at most: ")
    for bound, sign, colour in LEVELS[:-1]:
        text.append(sign, style=f"{colour} on {colour}" if sign == " " else colour)
        text.append(f" {bound:g}×  ")
    text.append("and more." if step == 1 else f"and more. A cell is the most used of {step} experts.")
    return text


def curve(summary: UsageSummary) -> Table:
    rows = Table(title="The hottest experts of all layers serve", title_justify="left", box=None)
    for name in ("of the experts", "of the routed tokens", "by chance alone"):
        rows.add_column(name, justify="right")
    for point in summary.curve:
        rows.add_row(f"{point.experts:.0%}", f"{point.tokens:.1%}", f"{point.chance:.1%}")
    return rows
