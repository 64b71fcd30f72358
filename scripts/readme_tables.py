"""The speed table of README.md, made from the histories in benchmarks/results.

    python scripts/readme_tables.py --check   # exit code 1 where README says something else
    python scripts/readme_tables.py --write

Each line takes the newest run that has all of its figures: a shared machine is half as fast on another day, so figures
of different runs are compared only where a line says so (`apart`). `beside` is a ratio of a run in turns, of fewer
layers or more experts; those with kt-kernel are in benchmarks/results/lab.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed: scripts/readme_tables.py writes this -->", "<!-- /speed -->"

Row = dict[str, Any]
H200 = "NVIDIA H200; Intel(R) Xeon(R) Processor, 16 threads"
H100 = "NVIDIA H100 80GB HBM3; Intel(R) Xeon(R) Processor, 16 threads"
XEON, EPYC = "Intel(R) Xeon(R) Processor, 16 threads", "AMD EPYC, 2 threads"
QWEN = {"config": "qwen3-30b-a3b", "batch": 1}
TORCH = ("torch loop", "torch grouped_mm")
IN_TURNS = {"llama.cpp": "llama.cpp, Q4_0†", "kt-kernel": "kt-kernel‡"}


@dataclass(frozen=True, slots=True)
class Peer:
    """name: in the table. by: values of a row's `by`, of which the fastest counts. apart: from another run."""

    name: str
    by: tuple[str, ...]
    more: Mapping[str, Any]
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """ours: what a row of ours must say. figure: "tok_s", more is better, or "ms"."""

    machine: str
    what: str
    bench: str
    figure: str
    ours: Mapping[str, Any]
    peers: tuple[Peer, ...] = ()
    beside: Mapping[str, Any] | None = None  # what a row of a peer in turns must say


def _llama(more: Row) -> Row:
    return {"peer": "llama.cpp", "config": "qwen3-30b-a3b"} | more


def _qwen(what: str, share: float) -> Line:
    ours = QWEN | {"gpu_share": share, "format": "int4", "context": 1024}
    beside = _llama({"gpu_share": share, "what": "decode"})
    return Line(H200, what, "decode", "tok_s", ours, beside=beside)


def _prompt(what: str, share: float, tokens: int) -> Line:
    ours = {"config": "qwen3-30b-a3b", "format": "int4", "gpu_share": share, "tokens": tokens}
    ours |= {"cached": 0, "chunk": 8192}
    beside = _llama({"gpu_share": share, "what": "prompt", "tokens": tokens})
    return Line(H100, what, "prefill", "tok_s", ours, beside=beside)


def _layer(what: str, fmt: str, tokens: int) -> Line:
    common = {"shape": "ds3", "tokens": tokens}
    peer = Peer("PyTorch, bf16", TORCH, common | {"format": "bf16"})
    ours = common | {"format": fmt, "by": "tandem", "tier": "amx"}
    beside = {"peer": "kt-kernel", "config": "deepseek-v3", "activations": "bf16", "tokens": tokens}
    return Line(XEON, what, "kernels", "ms", ours, (peer,), beside | {"format": fmt.upper()})


def _demo(what: str, batch: int, *peers: Peer) -> Line:
    ours = {"config": "demo", "by": "tandem", "format": "bf16", "batch": batch}
    return Line(EPYC, what, "decode", "tok_s", ours, peers)


def _transformers(batch: int) -> Peer:
    return Peer("Transformers", ("transformers generate",), {"batch": batch})


LLAMA_DENSE = Peer("llama.cpp on its dense base, Q4_1", ("llama.cpp, dense base",), {"batch": 1}, apart=True)
LINES = (
    _qwen("Qwen3-30B-A3B int4, one stream, tokens/s: experts on the CPU", 0.0),
    _qwen("the same, half of the experts on the GPU", 0.5),
    _qwen("the same, all on the GPU", 1.0),
    _prompt("Qwen3-30B-A3B int4, a prompt of 2048, tokens/s: experts in CPU memory", 0.0, 2048),
    _prompt("the same, half of the experts on the GPU", 0.5, 2048),
    _prompt("the same, all on the GPU", 1.0, 2048),
    _prompt("all on the GPU, a prompt of 8192", 1.0, 8192),
    _layer("a layer of DeepSeek-V3's width, 32 experts, bf16, 1 token, ms", "bf16", 1),
    _layer("the same, 64 tokens", "bf16", 64),
    _layer("the same, 4096 tokens", "bf16", 4096),
    _layer("fp8, 64 tokens", "fp8", 64),
    _layer("int4, 64 tokens", "int4", 64),
    _demo("the demo model, bf16, one stream, tokens/s", 1, _transformers(1), LLAMA_DENSE),
    _demo("the same, 8 streams", 8, _transformers(8)),
)
MACHINES = {
    H200: "H200 and 16 Xeon threads", H100: "H100 and 16 Xeon threads", XEON: "16 Xeon threads, AMX",
    EPYC: "2 Zen 5 cores",
}  # fmt: skip


def runs(results: Path) -> list[Row]:
    """{bench, machine, date, …, rows}, the newest first. `history-DATE.jsonl` has what was measured until then; each
    row beside kt-kernel is a run."""
    files = [file.read_text(encoding="utf-8") for file in results.glob("history*.jsonl")]
    found = [json.loads(line) for text in files for line in text.splitlines()]
    in_turns = [json.loads(file.read_text(encoding="utf-8")) for file in results.glob("lab/*-kt-kernel.json")]
    found += [{**row, "rows": [row]} for rows in in_turns for row in rows]
    return sorted(found, key=lambda run: str(run["date"]), reverse=True)


def chosen(run: Row, wanted: Mapping[str, Any]) -> list[Row]:
    return [row for row in run["rows"] if wanted.items() <= row.items() and row.get("way", "auto") == "auto"]


def best(run: Row, line: Line, peer: Peer) -> float | None:
    """The peer's fastest figure in a run; None where it is not there."""
    figures = [row[line.figure] for by in peer.by for row in chosen(run, {**peer.more, "by": by})]
    return (max if line.figure == "tok_s" else min)(figures, default=None)


def measured(line: Line, history: list[Row]) -> tuple[Row, list[tuple[Peer, float]]]:
    """Our row and the peers' figures. Raises LookupError where no run has all of them."""
    here = [run for run in history if (run["machine"], run["bench"]) == (line.machine, line.bench)]
    together = [peer for peer in line.peers if not peer.apart]
    for run in here:
        ours = chosen(run, line.ours)
        if ours and all(best(run, line, peer) is not None for peer in together):
            found = [
                (peer, next(_figures(here if peer.apart else [run], line, peer), None)) for peer in line.peers
            ]
            return ours[-1], [(peer, figure) for peer, figure in found if figure is not None]
    raise LookupError(f"no run of {line.bench} on {line.machine} has {dict(line.ours)} and its peers")


def _figures(here: list[Row], line: Line, peer: Peer) -> Iterator[float]:
    return (figure for run in here if (figure := best(run, line, peer)) is not None)


def beside(line: Line, history: list[Row]) -> list[str]:
    """How many times as fast as its peer in the newest run in turns."""
    if line.beside is None:
        return []
    peer, in_turns = IN_TURNS[line.beside["peer"]], [run for run in history if run["bench"] == "peers"]
    ratios = [(run, row["ratio"]) for run in in_turns for row in chosen(run, line.beside)]
    for run, ratio in ratios:
        where = "" if run["machine"] == line.machine else f"on the {MACHINES[run['machine']].split()[0]} "
        return [f"{where}{ratio:.1f} times as fast as {peer}"]
    return []


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def table(history: list[Row]) -> str:
    lines = ["| machine | what | Tandem | of its bound | others |", "| --- | --- | --- | --- | --- |"]
    named = ""
    for line in LINES:
        ours, peers = measured(line, history)
        figures = [f"{peer.name}{'*' if peer.apart else ''} {short(figure)}" for peer, figure in peers]
        others = "; ".join(figures + beside(line, history))
        machine = "" if line.machine == named else MACHINES[line.machine]
        named = line.machine
        share = f"{ours['share']:.2f}" if "share" in ours else ""
        lines.append(f"| {machine} | {line.what} | {short(ours[line.figure])} | {share} | {others} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--check", action="store_true")
    asked.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    text = README.read_text(encoding="utf-8")
    made = f"{BEGIN}\n{table(runs(RESULTS))}\n{END}"
    new, places = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.S)
    if places != 1:
        print(f"README.md needs one {BEGIN} … {END}", file=sys.stderr)
        return 1
    if write:
        README.write_text(new, encoding="utf-8")
    elif new != text:
        print("README.md's speed table is not that of benchmarks/results: run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
