"""kt-kernel's CPU experts (KTransformers) beside Tandem's, in turns: one layer, the same weights, tokens and routings.

    PYTHONPATH=src python benchmarks/peers/kt_kernel_turns.py --peer FOLDER --seconds 120 --out rows.jsonl

FOLDER has what the wheel of kt-kernel has, or of it one extension and `kt_kernel.libs`. Each side is a process of its
own, and stands still (SIGSTOP) while the other computes. kt-kernel's workers spin, so it is measured with all threads
and with one fewer; its better time counts. A row is written when it is known; what fails costs its own rows alone.

Rows: {"bench": "peers", "peer": "kt-kernel", "format": …, "tokens": …, "us": …, "us_peer": …, "ratio": …}; above 1:
Tandem is faster. `error`: relative to a float64 computation with weights that nobody rounded; `error_rounded`: with the
weights as each side rounds them, so of its arithmetic alone. `group`: weights that share a scale, 0: those of a row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(Path(__file__).parent), str(ROOT / "src")]  # last: an installed Tandem has its extension

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is used, and a process that uses one is not forked

import torch  # noqa: E402
from kt_kernel_sides import CHECKED, KINDS, Kind, Ours, Peer, Work, expected, made_up  # noqa: E402

from tandem.bench.kernels.experts import ExpertShape, parse_shape  # noqa: E402
from tandem.bench.rows import Row, keep, machine_name, stamp  # noqa: E402
from tandem.machine.machine import Machine  # noqa: E402

QWEN, DEEPSEEK = "qwen3-30b-a3b", "deepseek-v3"
SHAPES = {
    QWEN: ExpertShape(QWEN, 2048, 768, 128, 8),
    DEEPSEEK: ExpertShape(DEEPSEEK, 7168, 2048, 64, 8),  # a quarter of its experts, so that loading takes seconds
}
PLAN = (
    (QWEN, ("BF16", "INT4", "INT8")), (DEEPSEEK, ("INT4", "INT8", "BF16")),
    (QWEN, ("FP8", "RAWINT4", "MXFP4", "Q4_K")), (DEEPSEEK, ("Q4_K", "RAWINT4", "MXFP4", "FP8")),
)  # fmt: skip
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
LOAD_SECONDS, ASK_SECONDS = 45.0, 20.0
SHORT = 0.1  # seconds of a call; shorter ones are warmed up in each turn
WARM_SECONDS = 0.004
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Lost(Exception):
    """A side that ended, or did not answer in time; the text says what it said last."""


class Side:
    """A process that loads at once, then computes what it is asked for and stands still otherwise."""

    def __init__(self, name: str, make: Callable[[], Any], log: Path) -> None:
        self.name, self._log = name, log
        context = multiprocessing.get_context("fork")  # torch and the weights are there at once
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(make, theirs, log), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """Raises Lost."""
        try:
            answer = self._pipe.recv() if self._pipe.poll(max(seconds, 0.0)) else None
        except (EOFError, OSError):
            self._process.join(1.0)
            raise Lost(f"{self.name} ended ({self._process.exitcode}): {self._end()}") from None
        if answer is None:
            raise Lost(f"{self.name}: no answer in {seconds:.0f} s: {self._end()}")
        if isinstance(answer, Exception):
            raise Lost(f"{self.name}: {answer}")
        return answer

    def loaded(self, seconds: float) -> str:
        """Which kernels it has; it stands still from now on. Raises Lost."""
        note = str(self.answer(seconds))
        self._signal(signal.SIGSTOP)
        return note

    def ask(self, way: str, tokens: int, calls: int) -> tuple[list[float], torch.Tensor]:
        """Seconds of each call, and the first rows. Raises Lost."""
        self._signal(signal.SIGCONT)
        self._pipe.send((way, tokens, calls))
        answer = self.answer(ASK_SECONDS)
        self._signal(signal.SIGSTOP)
        return answer[0], torch.tensor(answer[1], dtype=torch.float64)

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _end(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-3:])[-500:]

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def serve(make: Callable[[], Any], pipe: Connection, log: Path) -> None:
    """The process of a side. What libraries print goes to the log."""
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        side = make()
        pipe.send(getattr(side, "note", side))
        while True:
            pipe.send(measured(side, *pipe.recv()))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    os._exit(0)  # threads that spin are not waited for


def measured(side: Any, way: str, tokens: int, calls: int) -> tuple[list[float], list[list[float]]]:
    """Seconds of so many calls, each with the next routing and layer, and the first rows of the first routing."""
    key, made = (way, tokens), side.__dict__.setdefault("made", {})
    if key not in made:
        out = torch.empty(tokens, side.hidden, dtype=torch.bfloat16)
        made[key] = out, side.calls(way, tokens, out)
        made[key, "turn"] = cycle(made[key][1])
    out, all_calls = made[key]
    turn, times = made[key, "turn"], []
    with side.caller():
        began = perf_counter()
        all_calls[0]()
        first, rows = perf_counter() - began, out[: CHECKED].tolist()
        while first < SHORT and perf_counter() - began < WARM_SECONDS:
            next(turn)()
        if first >= SHORT:
            times.append(first)
        for _ in range(calls - len(times)):
            start = perf_counter()
            next(turn)()
            times.append(perf_counter() - start)
    return times, rows


class Run:
    """One run: its sides, its rows, and the time that is left."""

    def __init__(self, flags: argparse.Namespace, machine: Machine) -> None:
        self.flags, self.machine = flags, machine
        self._ends: float = time.monotonic() + flags.seconds
        self._stamp = stamp(machine_name(machine, flags.threads)) | {"version": flags.version}
        self.rows: list[Row] = []

    def left(self) -> float:
        return self._ends - time.monotonic()

    def load_seconds(self) -> float:
        """Seconds that loading may take."""
        return min(LOAD_SECONDS, max(self.left(), 0.0))

    def measure_all(self, plan: list[tuple[ExpertShape, str]]) -> None:
        for shape, fmt in plan:
            if self.left() < self.flags.slice * 40:
                self.write(self.identity(shape, fmt) | {"lost": "no time was left"})
                continue
            try:
                self.measure_format(shape, fmt)
            except (Lost, OSError, RuntimeError, ValueError) as error:
                self.write(self.identity(shape, fmt) | {"lost": str(error)})

    def identity(self, shape: ExpertShape, fmt: str) -> Row:
        return {"bench": "peers", "peer": "kt-kernel", "config": shape.name, "format": fmt}

    def write(self, row: Row) -> None:
        row |= self._stamp
        print(json.dumps(row), flush=True)
        with self.flags.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        if "lost" not in row:
            self.rows.append(row)

    def measure_format(self, shape: ExpertShape, fmt: str) -> None:
        """Rows of a shape and a format."""
        kind = KINDS[fmt]
        work = made_up(shape, kind, max(self.flags.tokens), self.flags.working_set_mib << 20)
        with self.sides(work, f"{shape.name}-{fmt}") as (all_sides, wanted, notes):
            first = self.identity(shape, fmt) | notes | {
                "experts": shape.experts, "layers": work.layers, "threads": self.flags.threads,
                "group": kind.group, "group_peer": kind.peer_group,
                "activations_peer": "int8" if kind.peer_int8 else "bf16",
            }  # fmt: skip
            for tokens in sorted(self.flags.tokens):
                if not (rows := self.measure_tokens(all_sides, wanted, kind, tokens)):
                    raise Lost(f"no time was left for {tokens} tokens")
                for row in rows:
                    self.write(first | row)

    @contextmanager
    def sides(
        self, work: Work, name: str
    ) -> Iterator[tuple[dict[str, Side], dict[str, torch.Tensor], Row]]:
        """All sides, loaded; what they should give; and what they say of themselves. Raises Lost."""
        flags, hidden = self.flags, work.shape.hidden

        def start(label: str, make: Callable[[], Any]) -> Side:
            return Side(label, make, flags.logs / f"{name}-{label}.log")

        def peer(threads: int) -> Callable[[], Any]:
            return lambda: sized(Peer(work, flags.peer, flags.variant, threads), hidden)

        makes = {"ours": lambda: sized(Ours(work, self.machine, flags.threads), hidden)}
        makes |= {f"peer_{threads}": peer(threads) for threads in flags.peer_threads}
        each: dict[str, Side] = {}
        try:
            reference = each["expected"] = start("expected", lambda: expected(work))
            notes = {}
            for label, make in makes.items():  # one at a time: threads that spin would delay the others
                each[label] = start(label, make)
                notes[label] = each[label].loaded(self.load_seconds())
            wanted = reference.answer(self.load_seconds())
            rows = {key: torch.tensor(each_row, dtype=torch.float64) for key, each_row in wanted.items()}
            shown = {"kernels": notes["ours"], "kernels_peer": notes[f"peer_{flags.peer_threads[0]}"]}
            yield {label: each[label] for label in makes}, rows, shown
        finally:
            for side in each.values():
                side.end()

    def measure_tokens(
        self, all_sides: dict[str, Side], wanted: dict[str, torch.Tensor], kind: Kind, tokens: int
    ) -> list[Row]:
        """Rows of so many tokens: one for each way in which Tandem computes. None without time. Raises Lost."""
        peers = [label for label in all_sides if label != "ours"]
        ways = [(label, "exact") for label in (*peers, "ours")] + [("ours", "int8")] * kind.int8_here
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        calls, rows = dict[tuple[str, str], int](), dict[tuple[str, str], torch.Tensor]()
        for label, way in ways:
            if self.left() <= 0:
                return []
            seconds, rows[label, way] = all_sides[label].ask(way, tokens, 1)
            calls[label, way] = max(1, min(300, int(self.flags.slice / min(seconds))))
        for label, way in (*ways, *reversed(ways)):
            if self.left() <= 0:
                break
            times[label, way] += all_sides[label].ask(way, tokens, calls[label, way])[0]
        if not all(times.values()):
            return []
        return [self.row(tokens, way, times, rows, wanted) for label, way in ways if label == "ours"]

    def row(
        self, tokens: int, way: str, times: dict[tuple[str, str], list[float]],
        rows: dict[tuple[str, str], torch.Tensor], wanted: dict[str, torch.Tensor],
    ) -> Row:  # fmt: skip
        """One row: medians, the better one of kt-kernel's numbers of threads, and both errors."""
        us = {key: 1e6 * statistics.median(each) for key, each in times.items()}
        label = min((label for label, _ in us if label != "ours"), key=lambda each: us[each, "exact"])
        own, peer = us["ours", way], us[label, "exact"]
        count = min(CHECKED, tokens)
        row = {
            "activations": "int8" if way == "int8" else "bf16", "tokens": tokens,
            "threads_peer": int(label.removeprefix("peer_")), "us": round(own, 1), "us_peer": round(peer, 1),
            "ratio": round(peer / own, 3), "calls": len(times["ours", way]),
        }  # fmt: skip
        for suffix, answer in (("", rows["ours", way]), ("_peer", rows[label, "exact"])):
            row[f"error{suffix}"] = relative_error(answer, wanted["exact"], count)
            row[f"error_rounded{suffix}"] = relative_error(answer, wanted[suffix.removeprefix("_") or "ours"], count)
        others = {f"us_{each}": round(value, 1) for (each, _), value in us.items() if each not in ("ours", label)}
        return row | others


def sized(side: Any, hidden: int) -> Any:
    side.hidden = hidden
    return side


def relative_error(answer: torch.Tensor, wanted: torch.Tensor, rows: int) -> float:
    """Relative, in the root mean square."""
    return float(f"{((answer[:rows] - wanted[:rows]).norm() / wanted[:rows].norm()).item():.3g}")


def planned(flags: argparse.Namespace) -> list[tuple[ExpertShape, str]]:
    """Shapes and formats, in the order of what matters most."""
    if flags.shape:
        plan = [(shape, fmt) for shape in flags.shape for fmt in KINDS]
    else:
        plan = [(name, fmt) for name, formats in PLAN for fmt in formats]
    shapes = {name: SHAPES[name] if name in SHAPES else parse_shape(name) for name, _ in plan}
    return [(shapes[name], fmt) for name, fmt in plan if fmt in (flags.format or KINDS)]


def parsed(arguments: list[str], cores: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, metavar="FOLDER", help="with kt-kernel's extension")
    parser.add_argument("--variant", default="amx", help="which extension: amx, avx512_bf16, …")
    parser.add_argument("--version", default="0.7.2", help="of kt-kernel, for the rows")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which nothing new begins")
    parser.add_argument("--slice", type=float, default=0.06, help="seconds of a turn; longer calls are made once")
    parser.add_argument("--working-set-mib", type=int, default=1024, help="of weights at least, in several layers")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--peer-threads", type=int, action="append", help="default: as many, and one fewer")
    parser.add_argument("--shape", action="append", help="a name, or HIDDENxWIDTHxEXPERTSxTOPK")
    parser.add_argument("--format", action="append", choices=list(KINDS))
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--out", type=Path, default=Path("kt_kernel.jsonl"), help="rows are added to this file")
    parser.add_argument("--logs", type=Path, help="a folder for what each side prints")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="of results, to add the rows to")
    flags = parser.parse_args(arguments)
    flags.peer_threads = flags.peer_threads or sorted({flags.threads, max(1, flags.threads - 1)}, reverse=True)
    flags.tokens, flags.logs = flags.tokens or list(TOKENS), flags.logs or Path(tempfile.mkdtemp())
    for folder in (flags.logs, flags.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    return flags


def main() -> int:
    torch.set_num_threads(1)  # no threads here, as processes are forked
    machine = Machine.detect()
    flags = parsed(sys.argv[1:], len(machine.cores))
    run = Run(flags, machine)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run.measure_all(planned(flags))
    if flags.keep:
        keep(run.rows, flags.keep)
    return 0 if run.rows else 1


if __name__ == "__main__":
    sys.exit(main())
