"""Time of a sum between CPU ranks: through shared memory, and by gloo over the loopback beside it.

    PYTHONPATH=src python benchmarks/ranks.py
    PYTHONPATH=src python benchmarks/ranks.py --ranks 2 --ranks 4 --bytes 14336 --keep benchmarks/results

Rows are of bfloat16. Each lane's sums come in turns of some milliseconds; a row has the median of turns' means, and the
fastest turn's. Every rank has a CPU of its own where there are enough: else its wait yields the CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bench.rows import keep, machine_name, stamp
from tandem.kernels.ranks.shm import ShmGroup
from tandem.machine.machine import Machine

TURNS, TURN_SECONDS, MOST_SUMS = 15, 0.02, 1000
BYTES = (2, 1 << 10, 4 << 10, 14 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
Sum = Callable[[Tensor], Tensor]


def gloo_sum(rank: int, ranks: int, file: str) -> Sum:
    """All ranks' rows are gathered and added in their order, as the shared memory's are."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)

    def sum(rows: Tensor) -> Tensor:
        of_all = [torch.empty_like(rows) for _ in range(ranks)]
        dist.all_gather(of_all, rows)
        total = of_all[0].float()
        for each in of_all[1:]:
            total = total + each
        return total.to(rows.dtype)

    return sum


def measured(sum: Sum, bytes: int) -> dict[str, float]:
    """As many sums a turn on all ranks: the first says how many."""
    rows = torch.zeros(1, bytes // 2, dtype=torch.bfloat16)
    count = torch.tensor([[float(_sums_of_a_turn(sum, rows))]])
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(int(count)):
            sum(rows)
        times.append((time.perf_counter() - began) / int(count))
    return {"us": round(1e6 * statistics.median(times), 2), "best_us": round(1e6 * min(times), 2)}


def _sums_of_a_turn(sum: Sum, rows: Tensor) -> int:
    """The same on all ranks: the least that one has thought of."""
    began = time.perf_counter()
    for _ in range(5):
        sum(rows)
    each = (time.perf_counter() - began) / 5
    slowest = sum(torch.tensor([[each]]))  # of all of them together
    return max(1, min(MOST_SUMS, int(TURN_SECONDS / float(slowest))))


def run_rank(rank: int, ranks: int, sizes: list[int], paths: Queue[str], told: Queue[Any], file: str) -> None:
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    group = ShmGroup(rank, ranks, "" if rank == 0 else paths.get())
    for _ in range(1, ranks if rank == 0 else 1):
        paths.put(group.path)
    if ranks <= len(cpus):
        os.sched_setaffinity(0, {cpus[rank]})
    for lane, sum in (("shm", group.sum), ("gloo", gloo_sum(rank, ranks, file))):
        for bytes in sizes:
            row = {"bench": "sum", "lane": lane, "ranks": ranks, "bytes": bytes, **measured(sum, bytes)}
            if rank == 0:
                told.put(row)
    torch.distributed.destroy_process_group()
    if rank == 0:
        told.put(None)


def rows_of(ranks: int, sizes: list[int]) -> Iterator[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    paths, told = spawn.Queue(), spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, ranks, sizes, paths, told, f"{folder}/gloo") for rank in range(ranks)]
        processes = [spawn.Process(target=run_rank, args=each, daemon=True) for each in given]
        for process in processes:
            process.start()
        while (row := told.get()) is not None:
            yield row
        for process in processes:
            process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--bytes", type=int, action="append", help="of a message")
    parser.add_argument("--keep", type=Path, help="directory of results to add the rows to")
    options, rows = parser.parse_args(), []
    said = stamp(machine_name(Machine.detect_cpus()))
    for ranks in options.ranks or [2]:
        for row in rows_of(ranks, options.bytes or list(BYTES)):
            print(json.dumps(row), flush=True)
            rows.append(row | said)
    if options.keep:
        keep(rows, options.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
