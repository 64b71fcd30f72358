"""Two versions of the package in turn: how long a decode step on a GPU takes with each, at one time, on one machine.

    python benchmarks/decode_turns.py /tmp/old src --config qwen3-30b-a3b --layers 24

Each version (a folder with `tandem` and its extension) gets a process, which holds its own model with made-up weights:
the same ones in both, for numbers go by hashes of names.
They are loaded in turn, then steps are timed in pairs; who comes first alternates. Prints milliseconds of each pair,
the median ratio of speeds (second version to first; above 1: the second is faster) and seconds of loading.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any


class Version:
    """A process that uses one version of the package."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self.folder = folder
        command = [sys.executable, __file__, "--serve", str(folder), "--config", asked.config]
        command += ["--format", asked.format, "--steps", str(asked.steps)]
        command += ["--layers", str(asked.layers)] if asked.layers else []
        path = os.pathsep.join(filter(None, (str(folder.resolve()), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )

    def ask(self, what: str, value: float = 0.0) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what} {value}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("answer "):
                return float(line.split()[1])
        raise SystemExit(f"the process of {self.folder} ended")


def bench_module() -> Any:
    """It has moved since November 23."""
    try:
        return importlib.import_module("tandem.bench.hybrid")
    except ModuleNotFoundError:
        return importlib.import_module("tandem.cli.bench_hybrid")


def serve(asked: argparse.Namespace) -> None:
    """Requests by line: load SHARE, time 0. Answers in seconds."""
    import torch

    bench = bench_module()
    bench.use_one_torch_thread()
    request = bench.Request(
        asked.config, (asked.format,), (0.0,), (1,), asked.layers, 1024, asked.steps, 1, None
    )
    built: Any = None
    for line in sys.stdin:
        what, value = line.split()
        started = perf_counter()
        if what == "load":
            built = None
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            built = bench.build(request, asked.format, float(value))
            torch.cuda.synchronize()
            print("answer", perf_counter() - started, flush=True)
        else:
            print("answer", next(iter(bench.step_times(built, 1, request))), flush=True)


def compare(versions: list[Version], share: float, pairs: int) -> dict[str, Any]:
    loaded = [each.ask("load", share) for each in versions]
    times: list[list[float]] = [[], []]
    for i in range(pairs + 1):
        for v in (0, 1) if i % 2 == 0 else (1, 0):
            seconds = versions[v].ask("time")
            if i:  # the first pair warms up
                times[v].append(seconds)
    ratios = [old / new for old, new in zip(*times, strict=True)]
    return {
        "gpu_share": share, "ratio": round(statistics.median(ratios), 4), "ratios": [round(r, 4) for r in ratios],
        "step_ms": [[round(t * 1e3, 3) for t in each] for each in times], "load_s": [round(s, 2) for s in loaded],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", type=Path, nargs="*", help="two folders: the older one first")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="INT4")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpu-share", type=float, action="append", help="default: 0, 0.5, 1")
    parser.add_argument("--steps", type=int, default=32, help="of each turn")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    asked = parser.parse_args()
    if asked.serve:
        return serve(asked)
    versions = [Version(folder, asked) for folder in asked.versions]
    about = {"bench": "decode_turns", "config": asked.config, "format": asked.format, "layers": asked.layers}
    rows = []
    for share in asked.gpu_share or [0.0, 0.5, 1.0]:
        rows.append(about | compare(versions, share, asked.pairs))
        print(json.dumps(rows[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    for each in versions:
        each.process.communicate()


if __name__ == "__main__":
    main()
