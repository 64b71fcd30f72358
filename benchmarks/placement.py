"""Hit rates and tokens/s of live placement against static ones, by the cost model, for every routing and share.

    PYTHONPATH=src python benchmarks/placement.py --out rows.json
    PYTHONPATH=src python benchmarks/placement.py --beside rows.json --out benchmarks/results
    PYTHONPATH=src python benchmarks/placement.py --gpu --out rows.json

The policy is the one that serves (`tandem.experts.live.policy`), on any machine: nothing is measured. `--beside` keeps
the rows of an earlier commit, too, and the table compares them. Runs twelve layers of qwen3-512e in int4 in a minute.

With --gpu a model with made-up weights decodes the same traces, strategies in turn: zipf and mild at all shares, the
others at 30 per cent. Prompts of 512 and 2048 tokens follow, with and without live placement, in turn; not where
--routing names some. Each row is printed when it is there, and `--out` is written anew after it.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tandem.bench.placement import traces
from tandem.bench.placement.request import PlacementFlags
from tandem.bench.placement.simulated import simulated_rows
from tandem.bench.rows import stamp, write

STEADY = {"exponent": 0.7, "jump": 0.2, "drift": 0.05}
LAWS = {"mild": traces.Zipf(exponent=0.7), "steady": traces.Zipf(**STEADY)}  # as `kt bench experts` has them
STRATEGIES = ("uniform", "frequency", "dynamic")
EVERY = ("zipf", "mild", "steady", "adversarial", "uniform")


def rows(
    routings: Sequence[str], layers: int, tokens: int, seed: int, shares: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    for routing in routings:
        traces.ROUTINGS.setdefault(routing, LAWS.get(routing))
        request = PlacementFlags("qwen3-512e", routing, shares, STRATEGIES, "INT4", layers, tokens, seed)
        for row in simulated_rows(request):
            law = dataclasses.asdict(traces.ROUTINGS[routing])
            yield row | {"bench": "placement_simulated", "routing_parameters": law} | stamp("none used (simulation)")


def measured(
    routings: Sequence[str], layers: int, tokens: int, seed: int, shares: tuple[float, ...]
) -> Iterator[dict[str, Any]]:
    from tandem.bench.architectures import named_config
    from tandem.bench.placement.gpu_rows import measured_rows
    from tandem.bench.placement.request import traffic

    config = named_config("qwen3-512e", layers)
    for routing in routings:
        traces.ROUTINGS.setdefault(routing, LAWS.get(routing))
        some = shares if routing in ("zipf", "mild") else tuple(share for share in shares if share == 0.3) or shares
        request = PlacementFlags("qwen3-512e", routing, some, ("uniform", "dynamic"), "INT4", layers, tokens, seed)
        yield from measured_rows(request, traffic(request, config))


def prompts(layers: int) -> Iterator[dict[str, Any]]:
    from tandem.bench import prefill

    ways = tuple(way for way in ("auto", "live") if way in prefill.WAYS)
    yield from prefill.measure(
        prefill.PrefillFlags("qwen3-512e", ("INT4",), (0.3,), (512, 2048), layers, repeats=7, ways=ways)
    )


def keep_each(found: Iterator[dict[str, Any]], out: Path | None) -> None:
    from tandem.bench.rows import machine_name, say
    from tandem.machine.machine import Machine

    kept: list[dict[str, Any]] = []
    for row in found:
        kept.append(row | stamp(machine_name(Machine.detect())))
        say(Console(width=200), row)
        if out is not None:
            write(kept, out)


def table(found: list[dict[str, Any]]) -> Table:
    """A line for each routing and share, a column for each strategy and commit: tokens/s over `uniform`, hits."""
    columns = list(dict.fromkeys((row["strategy"], row["commit"]) for row in found if row["strategy"] != "uniform"))
    shown = Table("routing", "on the GPU", *(f"{name} {commit}" for name, commit in columns))
    cells = {(row["routing"], row["gpu_share"], row["strategy"], row["commit"]): row for row in found}
    for routing, share in dict.fromkeys((row["routing"], row["gpu_share"]) for row in found):
        texts = []
        for name, commit in columns:
            row, static = (cells[routing, share, each, commit] for each in (name, "uniform"))
            moved = f", {row['swaps']} moved" if name == "dynamic" else ""
            texts.append(f"{row['tok_s'] / static['tok_s']:.3f} ({row['hit']:.0%} hit{moved})")
        shown.add_row(routing, f"{share:.0%}", *texts)
    return shown


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--routing", nargs="+", choices=EVERY)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3, 0.5])
    parser.add_argument("--beside", type=Path, help="rows of another commit, to compare with")
    parser.add_argument("--gpu", action="store_true", help="measure on a GPU")
    parser.add_argument("--out", type=Path, help="a file, or benchmarks/results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = asked.routing or EVERY, asked.layers, asked.tokens, asked.seed, tuple(asked.shares)
    if asked.gpu:
        keep_each(chain(measured(*sizes), () if asked.routing else prompts(asked.layers)), asked.out)
        return
    found = list(rows(*sizes))
    found += json.loads(asked.beside.read_text()) if asked.beside else []
    Console(width=200).print(table(found))
    if asked.out is not None:
        write(found, asked.out)


if __name__ == "__main__":
    main()
