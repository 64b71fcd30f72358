"""Builds of the extension in turn: how long a layer of experts takes with each, on one host, at one time.

    python benchmarks/turns.py amx "ds3:int4,mxfp4:16,64" /tmp/old/_core.abi3.so /tmp/new/_core.abi3.so

Every build gets a process with its own layers, which waits while another one is timed; rounds go forth and back, since
who comes first is often a little faster (name a build twice to see by how much). Prints medians in ms, shares of the
least possible time by ceilings read in between, and ratios to the first build. Cases: shape:formats:tokens, with `;`
in between. All of them run this tree's Python sources.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "src" / "tandem"
ROOF_SECONDS = 0.02


class Build:
    """A process that uses one build."""

    def __init__(self, directory: Path, extension: Path, tier: str) -> None:
        ignored = shutil.ignore_patterns("_core*.so", "__pycache__")
        shutil.copytree(SOURCES, directory / "tandem", ignore=ignored)
        shutil.copy(extension, directory / "tandem")
        self.extension = extension
        path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", tier],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def ask(self, *request: object) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.extension} ended")
        return json.loads(answer)


def serve(tier: str) -> None:
    """Requests by line: layers SHAPE FORMAT, work TOKENS, time SECONDS, roof."""
    from tandem.bench.ceilings import DramReader, beyond_caches_bytes, measure_flops, peak_format
    from tandem.bench.kernels import run as bench_kernels
    from tandem.bench.kernels.experts import Workload, packed_layers, parse_shape, run_in, time_layers
    from tandem.kernels.this_machine import this_machine

    machine = this_machine()
    pool = bench_kernels.pools_of(machine, None)[-1]
    for line in sys.stdin:
        what, *values = json.loads(line)
        answer: object = None
        if what == "layers":
            layers = reader = None  # two sets might not fit
            fmt = values[1]
            shape, count = bench_kernels.fit(
                parse_shape(values[0]), fmt, beyond_caches_bytes(), machine.available_memory
            )
            layers = packed_layers(shape, fmt, tier, pool, count)
            reader = DramReader.of(layers, pool, machine.tiers[-1])
        elif what == "work":
            work = Workload(shape, values[0])
            run_in([layer.forward for layer in layers], work)
            answer = work.bytes_read(fmt), work.operations
        elif what == "time":
            answer = time_layers([layer.forward for layer in layers], work, values[0])
        else:
            flops = measure_flops(pool, tier, peak_format(fmt), ROOF_SECONDS)
            answer = reader.gbps(ROOF_SECONDS, min_repeats=2) * 1e9, flops
        print(json.dumps(answer), flush=True)


def compare(builds: list[Build], tokens: int, seconds: float, rounds: int) -> str:
    answers = [build.ask("work", tokens) for build in builds]
    nbytes, operations = answers[0]
    times: list[list[float]] = [[] for _ in builds]
    roofs = []
    for i in range(rounds):
        roofs.append(builds[0].ask("roof"))
        order = range(len(builds))
        for b in order if i % 2 == 0 else reversed(order):
            times[b].append(builds[b].ask("time", seconds))
    read, flops = (statistics.median(values) for values in zip(*roofs, strict=True))
    least, medians = max(nbytes / read, operations / flops), [statistics.median(t) for t in times]
    shown = " ".join(f"{t * 1e3:8.3f} ({least / t:.2f})" for t in medians)
    ratios = " ".join(f"{t / medians[0]:.2f}" for t in medians[1:])
    return f"{tokens:5d} ms {shown} | {ratios} | DRAM {read / 1e9:.0f} GB/s, peak {flops / 1e12:.1f} TFLOPS"


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tier")
    parser.add_argument("cases")
    parser.add_argument("builds", type=Path, nargs="+", help="_core*.so, each in a directory of its own")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a build's turn")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        builds = [Build(Path(directory, str(i)), path, args.tier) for i, path in enumerate(args.builds)]
        for shape, formats, counts in (case.split(":") for case in args.cases.split(";")):
            for fmt in formats.split(","):
                for build in builds:
                    build.ask("layers", shape, fmt)
                for tokens in map(int, counts.split(",")):
                    print(shape, f"{fmt:8s}", compare(builds, tokens, args.seconds, args.rounds), flush=True)
        for build in builds:
            build.process.communicate()


if __name__ == "__main__":
    main()
