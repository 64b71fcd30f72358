"""`kt bench compare`: files of `kt bench report` as one table, a column each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1  # of the file that `kt bench report` writes
CHOICES = ("expert format", "kernel tier", "threads", "GPU experts", "context length")
Report = dict[str, Any]


def read(path: Path) -> Report:
    """Raises ConfigError where the file is none of `kt bench report`, or of another format."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    kind = content.get("bench") if isinstance(content, dict) else None
    if kind != "report":
        kind_text = f"`kt bench {kind}` wrote it" if isinstance(kind, str) else "it has other JSON"
        raise ConfigError(f"{path} is no report: {kind_text}; give files that `kt bench report` wrote")
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {content.get('format')}, and {FORMAT} is read: take the newer Tandem")
    report: Report = content
    try:
        list(rows([report]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} lacks {error.args[0] if isinstance(error, KeyError) else 'a part'}") from error
    return report


def table(reports: Sequence[Report], names: Sequence[str]) -> Table:
    """Rows are facts; × is beside the first report, where both measured the same of the same model."""
    from rich.table import Table
    from rich.text import Text

    comparison = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", *names):
        comparison.add_column(Text(heading), overflow="fold")
    for name, *cells in rows(reports):
        comparison.add_row(Text(name, style="bold"), *map(Text, cells))
    return comparison


def rows(reports: Sequence[Report]) -> Iterator[list[str]]:
    """Each with a name in front."""
    facts = [_facts(report) for report in reports]
    yield from ([name, *(each[name] for each in facts)] for name in facts[0])
    measured = dict.fromkeys(chain.from_iterable(report["measured"] for report in reports))
    for name in measured:
        yield [f"{name}, tokens/s", *(_rate(report, name, reports[0]) for report in reports)]
        yield ["  predicted", *(_predicted(report, name) for report in reports)]


def _facts(report: Report) -> dict[str, str]:
    plan, software = report["plan"], report["software"]
    choices = {choice["name"]: choice["value"] for choice in plan["choices"]}
    flags = (f"--{name.replace('_', '-')} {value}" for name, value in report["flags"].items())
    return {
        "model": plan["model"],
        "flags": "\n".join(flags) or "none",
        "machine": plan["machine"].replace("; ", "\n"),
        "memory read": _speed(plan["speeds"], "dram_gbps"),
        "bus to the GPU": _speed(plan["speeds"], "pcie_gbps") if report["machine"]["gpus"] else "–",
        **{name: choices.get(name, "–") for name in CHOICES},
        "versions": f"Tandem {software['tandem']}\nPyTorch {software['torch']}",
        "date": report["date"][:10],
    }


def _speed(speeds: dict[str, Any], name: str) -> str:
    return f"{speeds[name]:.0f} GB/s, {speeds['sources'].get(name, 'assumed')}"


def _rate(report: Report, name: str, first: Report) -> str:
    rate, other = report["measured"].get(name), first["measured"].get(name)
    if rate is None:
        return "–"
    comparable = other and report is not first and report["plan"]["model"] == first["plan"]["model"]
    return f"{rate:.1f}" + (f" ({rate / other:.2f} ×)" if comparable else "")


def _predicted(report: Report, name: str) -> str:
    """The range of what has this name; "–" where nothing was measured, or nothing predicted."""
    predicted = report["plan"]["predicted"]
    each = predicted["prompt"] if name.startswith("prompt") else predicted["decode"].get("1")
    if name not in report["measured"] or each is None:
        return "–"
    return f"{each['low']:.1f} to {each['high']:.1f}"
