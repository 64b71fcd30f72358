"""AMX, few rows: as digits (below so many rows of an expert) against the kernels without them, in turn in one process.

Prints, for random routings over more weights than the caches keep, milliseconds of a layer, GB/s of the distinct
experts' weights, and their share of what reading memory gave in between (the median). Example:

    PYTHONPATH=src python benchmarks/digits.py --shape q3 --format int4 --tokens 1 --below 0 --below 9 --out digits.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from tandem.bench import formats as bench_formats
from tandem.bench.ceilings import DramReader
from tandem.bench.kernels.experts import SHAPES, ExpertShape, Workload, random_expert
from tandem.bench.rows import commit
from tandem.formats.codes import Weight
from tandem.kernels.cpu import PackedExperts, Workspace
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import machine_pool

ROUNDS = 3  # of all variants in turn, with a reading of memory between


@dataclass(frozen=True)
class Row:
    shape: str
    format: str
    tokens: int
    digits_below: int
    ms: float
    gbps: float
    dram_gbps: float


class Comparison:
    def __init__(self, tier: str, below: list[int], seconds: float, working_set: int) -> None:
        machine = this_machine()
        self.tier, self.below, self.seconds, self.working_set = tier, below, seconds, working_set
        self.pool = machine_pool(machine, machine.max_threads)
        self.reader = DramReader(self.pool, tier)

    def layers(self, shape: ExpertShape, weights: tuple[Weight, Weight, Weight], below: int) -> list[PackedExperts]:
        """Layers for one way to multiply: as many layers as make up the working set."""
        layers: list[PackedExperts] = []
        size = 0
        while size < self.working_set or len(layers) < 2:
            layer = PackedExperts(
                Workspace(self.pool, self.tier, -1, below), shape.experts, shape.hidden, shape.width
            )
            layer.load_all(0, [weights] * shape.experts)
            size += layer.bytes_per_expert * shape.experts
            layers.append(layer)
        return layers

    def rows(self, shape: ExpertShape, fmt: str, tokens: list[int]) -> list[Row]:
        weights = tuple(bench_formats.as_stored(w, fmt) for w in random_expert(shape))
        layers = {below: self.layers(shape, weights, below) for below in self.below}
        return [row for count in tokens for row in self.compared(shape, fmt, Workload(shape, count), layers)]

    def compared(
        self, shape: ExpertShape, fmt: str, work: Workload, layers: dict[int, list[PackedExperts]]
    ) -> list[Row]:
        seconds: dict[int, list[float]] = {below: [] for below in layers}
        dram = []
        for _ in range(ROUNDS):
            dram.append(self.reader.gbps(0.06))
            for below in layers:
                seconds[below] += self.timed(layers[below], work)
        one = next(iter(layers.values()))[0].bytes_per_expert
        read = statistics.mean(len(ids.unique()) for ids in work.ids) * one
        return [
            Row(
                shape.name,
                fmt,
                work.tokens,
                below,
                1e3 * median,
                read / median / 1e9,
                statistics.median(dram),
            )
            for below, times in seconds.items()
            for median in [statistics.median(times)]
        ]

    def timed(self, layers: list[PackedExperts], work: Workload) -> list[float]:
        turns = zip(itertools.cycle(layers), itertools.cycle(work.ids), strict=False)
        times: list[float] = []
        end = time.perf_counter() + self.seconds / ROUNDS
        while time.perf_counter() < end or len(times) < 2 * len(layers):
            layer, ids = next(turns)
            start = time.perf_counter()
            layer.forward(work.x, ids, work.weights)
            times.append(time.perf_counter() - start)
        return times


def main(
    shape: Annotated[list[str], typer.Option()] = ["q3", "ds3"],  # noqa: B006
    format: Annotated[list[str], typer.Option()] = ["int4", "mxfp4", "q4_k"],  # noqa: B006
    tokens: Annotated[list[int], typer.Option()] = [1, 4, 16],  # noqa: B006
    below: Annotated[list[int], typer.Option(help="0: no digits")] = [0, 9],  # noqa: B006
    tier: str = "amx",
    seconds: Annotated[float, typer.Option(help="of measuring per row")] = 0.15,
    working_set_mib: int = 1300,
    out: Path | None = None,
) -> None:
    comparison = Comparison(tier, below, seconds, working_set_mib << 20)
    torch.set_num_threads(1)
    rows = []
    for name, fmt in itertools.product(shape, format):
        for row in comparison.rows(SHAPES[name], fmt, tokens):
            rows.append(row)
            print(
                f"{name} {fmt} {row.tokens:3d} tokens, digits below {row.digits_below}: {row.ms:.3f} ms, "
                f"{row.gbps:.0f} of {row.dram_gbps:.0f} GB/s, {row.gbps / row.dram_gbps:.2f}",
                flush=True,
            )
    if out:
        report = {"machine": this_machine().cpu_model, "tier": tier, "commit": commit()}
        out.write_text(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
