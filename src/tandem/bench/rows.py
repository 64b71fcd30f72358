"""Rows of measurements: what each says of its run, and where the repository keeps them.

A row is a flat object with `bench`, the figures, and `machine`, `commit`, `command`, `date`. `keep` writes the rows of
one run to `benchmarks/results/<machine>/<bench>.json`, which holds the current figures (git has the old ones), and adds
one line to `benchmarks/results/history.jsonl`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tandem.machine.machine import Machine
from tandem.spec.small_files import write_output, write_whole

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]
_STARTED = perf_counter()
STAMP = ("machine", "commit", "command", "date")
ASKED = {"format": "", "strategy": "", "batch": " sequences", "tokens": " tokens"}
"""Keys of a row that `say` shows, with their units."""
RESULTS = (
    ":(top,exclude)benchmarks/results"  # each run writes there, and the next one measures the same commit
)


def commit() -> str | None:
    """The commit of the checkout this runs from, with "+" where its files are not the commit's; None when installed."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", RESULTS)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changed else head


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine_name(machine: Machine, threads: int | None = None) -> str:
    """As `NVIDIA H200; Intel(R) Xeon(R) ..., 16 threads`: what a row is measured on."""
    cpu = f"{machine.cpu_model}, {threads or machine.max_threads} threads"
    return f"{machine.gpus[0].name}; {cpu}" if machine.gpus else cpu


def stamp(machine: str) -> Row:
    """The columns of every row about its run: {machine, commit, command, date}."""
    program = Path(sys.argv[0]).name
    return {
        "machine": machine, "commit": commit(), "command": " ".join([program, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def folder_name(machine: str) -> str:
    """The folder of a machine's rows: its name in small letters, digits and dashes."""
    plain = re.sub(r"\((r|tm)\)", "", machine.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def write(rows: Sequence[Row], out: Path) -> None:
    """To the file `out` as one JSON list, whole or not at all; to a directory as `keep` does."""
    if out.is_dir():
        keep(rows, out)
    else:
        write_json_file(list(rows), out)


def progress(what: str) -> None:
    """Says on stderr what begins, and how long after the start: what comes before the first row takes minutes where
    models are large."""
    print(f"{perf_counter() - _STARTED:6.1f} s: {what}", file=sys.stderr, flush=True)


@contextmanager
def kept_rows(out: Path | None) -> Iterator[list[Row]]:
    """A list whose rows are written to `out` at the end, also those before an error or Ctrl+C. None: nowhere."""
    rows = list[Row]()
    try:
        yield rows
    finally:
        if out is not None and rows:
            write(rows, out)
            print(f"Written to {out}")


def shown(measured: Iterable[Row], table: Callable[[list[Row]], Any], out: Path | None) -> list[Row]:
    """Prints stamped rows as they are measured, then their table; writes them as `kept_rows` does."""
    from rich.console import Console

    console = Console()
    with kept_rows(out) as rows:
        for row in measured:
            rows.append(row)
            say(console, row)
        console.print(table(rows))
    return rows


def say(console: Console, row: Row) -> None:
    """A row as soon as it is measured: JSON for a program, on a terminal what was asked, and the rate."""
    if not console.is_terminal:
        console.print(json.dumps(row), highlight=False, soft_wrap=True)
        return
    keys = ", ".join(f"{row[key]}{unit}" for key, unit in ASKED.items() if row.get(key) is not None)
    gpu = f", {row['gpu_share']:.0%} of the experts on the GPU" if row.get("gpu_share") is not None else ""
    console.print(f"{keys}{gpu}: {row['tok_s']:.1f} tokens/s", highlight=False, markup=False)


def write_json_file(content: Row | list[Row], out: Path) -> None:
    """Whole or not at all; to a device or a pipe as it comes."""
    write_output(out, (json.dumps(content, indent=1) + "\n").encode())


def of_bench(bench: str, row: Row) -> Row:
    """A row whose `bench` says who computed: {..., "bench": bench, "by": who}."""
    return {**row, "bench": bench, "by": row["bench"]}


def keep(rows: Sequence[Row], results: Path) -> list[Path]:
    """Writes one run's rows, which are stamped, under `results`; returns the files that were written."""
    missing = [name for row in rows for name in ("bench", *STAMP) if name not in row]
    if missing:
        raise ValueError(f"a row lacks {missing[0]}")
    written = []
    for machine, bench in dict.fromkeys((row["machine"], row["bench"]) for row in rows):
        chosen = [row for row in rows if (row["machine"], row["bench"]) == (machine, bench)]
        written.append(_write_current(results / folder_name(machine) / f"{bench}.json", chosen))
        _add_to_history(results / "history.jsonl", chosen)
    return written


def print_and_keep(measured: Callable[[], Iterable[Row]], about: str | None) -> None:
    """The command line of a script: prints rows as JSON; `--keep DIRECTORY` adds them to what is kept there."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="directory of results to add the rows to")
    flags, rows = parser.parse_args(), list[Row]()
    for row in measured():
        rows.append(row | stamp(machine_name(Machine.detect())))
        print(json.dumps(row), flush=True)
    if flags.keep:
        keep(rows, flags.keep)


def _write_current(file: Path, rows: Sequence[Row]) -> Path:
    """Rows of other configurations stay; those that were measured again are replaced."""
    old = json.loads(file.read_text()) if file.exists() else []
    identities = {_identity(row) for row in rows}
    others = [row for row in old if _identity(row) not in identities]
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(" " + json.dumps(row) for row in (*others, *rows))
    write_whole(file, f"[\n{lines}\n]\n".encode())
    return file


def _identity(row: Row) -> str:
    """JSON of a row's keys, without its measurements: names, formats, counts and shares."""
    columns = {name: value for name, value in row.items() if name not in STAMP}
    keys = {name: value for name, value in columns.items() if isinstance(value, str | bool) or name in COUNTS}
    return json.dumps(keys, sort_keys=True)


COUNTS = frozenset((
    "acceptance", "batch", "cached", "clients", "context", "cores", "gpu_share", "heads", "hidden", "layers", "overlap",
    "rows", "steps", "streams", "threads", "tokens", "top_k",
))  # fmt: skip
"""Numbers that say what was measured; any other number of a row is a figure."""


def _add_to_history(file: Path, rows: Sequence[Row]) -> None:
    """One line a run and bench: the stamp once, then the rows without it."""
    first = rows[0]
    measurements = [{name: value for name, value in row.items() if name not in (*STAMP, "bench")} for row in rows]
    line = {"bench": first["bench"], **{name: first[name] for name in STAMP}, "rows": measurements}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")
