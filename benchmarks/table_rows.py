"""Rows of a table of n-grams, found and left in pinned memory for a step: what the host does before a GPU begins it.

    python benchmarks/table_rows.py --rows 20000000 --where ram --where map --json benchmarks/results

A made-up file of random bytes, as wide as Qwen3.8-Flash-Next's rows in fp8. `warm`: the page cache has all of it, or
memory; else the cache was dropped before, and each step reads other rows. `tokens`: of each sequence, in the step.
`us` is a median, `least_us` the quickest: they lie apart where the machine does something else. `ahead_ms`: so long
before the step its rows were asked for, as the engine does after a token was chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from tandem.bench.rows import Row, machine_name, stamp, write
from tandem.checkpoint.tables.readers import TableRows, ignored, lookup_of
from tandem.checkpoint.tables.stored_rows import RowRange, StoredRows
from tandem.errors import CheckpointError
from tandem.machine.machine import Machine
from tandem.mechanisms.ngrams.gpu.staged import StagedRows
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes, NgramWeights
from tandem.models.batch import ForwardBatch
from tandem.spec.norm import Norm
from tandem.spec.stored import RowTable

WIDTH, HEADS, LONGEST, VOCAB, PROMPT = 160, 8, 3, 248_320, 8192
PART = 64 << 20
AHEAD_MS = {1: 1.0, PROMPT: 4000.0}  # by a sequence's tokens: about as long as what runs meanwhile takes


def made_up(path: Path, rows: int) -> StoredRows:
    if not path.exists() or path.stat().st_size != rows * WIDTH:
        with path.open("wb") as file:
            for first in range(0, rows * WIDTH, PART):
                file.write(os.urandom(min(PART, rows * WIDTH - first)))
    return StoredRows("bench", (RowRange(path, 0, rows),), WIDTH, numbers_of, True)


def numbers_of(raw: torch.Tensor) -> torch.Tensor:
    return raw.view(torch.float8_e4m3fn).float()


def staged(find: TableRows, rows: int, device: torch.device) -> StagedRows:
    hashes, each = (LONGEST - 1) * HEADS, rows // ((LONGEST - 1) * HEADS)
    shape = Ngram(LONGEST, HEADS, RowTable(rows, WIDTH, hashes), 4, 4, 2560, VOCAB - 1, Norm(1e-6))
    numbers = Hashes(
        torch.tensor([3, (1 << 44) + 7, (1 << 44) + 9]), torch.full((hashes,), each), torch.arange(hashes) * each
    )
    unused = torch.zeros(0)
    return StagedRows(shape, NgramWeights(numbers, find, unused, unused, unused, None, PROMPT), device)  # type: ignore[arg-type]


def step(sequences: int, tokens: int, first: int) -> ForwardBatch:
    """tokens: of each sequence."""
    ids, each = torch.randint(VOCAB - 1, (sequences * tokens,)), torch.arange(sequences, dtype=torch.int32)
    positions, starts = torch.arange(first, first + tokens).repeat(sequences), torch.arange(sequences + 1) * tokens
    return ForwardBatch(
        ids, positions, positions, starts.int(),
        torch.full((sequences,), first + tokens, dtype=torch.int32), torch.zeros(sequences, 1, dtype=torch.int32),
        torch.arange(sequences), each + 1, sequences if tokens == 1 else 0,
    )  # fmt: skip


def dropped(path: Path) -> None:
    """The page cache lets go of the file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(rows: StagedRows, steps: list[ForwardBatch], before: Callable[[ForwardBatch], object]) -> list[float]:
    """Microseconds of each step, but for the first ones. before: each, and not counted."""
    times = list[float]()
    for batch in steps:
        before(batch)
        begin = time.perf_counter()
        rows.begin(batch, len(batch.input_ids) == len(batch.slots))
        times.append(time.perf_counter() - begin)
    return [1e6 * each for each in times[len(times) // 10 :]]


def ahead(find: TableRows, rows: StagedRows, milliseconds: float, batch: ForwardBatch) -> None:
    """Asks for a step's rows, so long before it."""
    if milliseconds:
        find.read_ahead(rows.numbers(batch).view(-1))
        time.sleep(milliseconds / 1000)


def cases(where: str) -> Iterator[tuple[int, int, bool, float]]:
    """Sequences, tokens of each, whether the page cache is empty, and `ahead_ms`."""
    for sequences, tokens in ((1, 1), (8, 1), (64, 1), (1, PROMPT)):
        for cold in (False, True) if where == "map" else (where == "disk",):
            yield sequences, tokens, cold, 0.0
        if where == "disk":
            yield sequences, tokens, True, AHEAD_MS[tokens]


def lines(options: argparse.Namespace) -> Iterator[Row]:
    stored, device = made_up(options.file, options.rows), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for where in options.where:
        try:
            find = lookup_of(stored, where, ignored)
        except CheckpointError as error:
            yield {"bench": "tables", "where": where, "error": str(error)}
            continue
        rows = staged(find, options.rows, device)
        for sequences, tokens, cold, ahead_ms in cases(where):
            if where == "map" and not cold:
                options.file.read_bytes()  # into the page cache
            if cold:
                dropped(options.file)
            steps = [step(sequences, tokens, i * tokens) for i in range(options.rounds if tokens == 1 else 3)]
            us = measured(rows, steps, partial(ahead, find, rows, ahead_ms))
            row = {"bench": "tables", "where": where, "warm": not cold, "sequences": sequences, "tokens": tokens}
            figures = {"us": round(statistics.median(us), 1), "least_us": round(min(us), 1)}
            yield row | figures | {"ahead_ms": ahead_ms, "device": device.type, "rows": options.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--where", action="append", choices=["ram", "map", "disk"])
    parser.add_argument("--file", type=Path, default=Path("table_rows.bin"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="a file, or a directory of results")
    options = parser.parse_args()
    options.where = options.where or ["ram", "map", "disk"]
    torch.set_num_threads(1)
    about, rows = stamp(machine_name(Machine.detect())), list[Row]()
    for line in lines(options):
        print(json.dumps(line), flush=True)
        rows.append(line | about)
    if options.json is not None:
        write(rows, options.json)


if __name__ == "__main__":
    main()
