"""Sums of several ranks, a GPU each: through peers, through mapped CPU memory, and NCCL's, in CUDA graphs.

    python benchmarks/rank_sums.py --ranks 2 --out sums.json

Each sum of our own is compared with the one in float32 in the order of ranks. Ranks share a GPU where there are fewer:
then times mean nothing. Rows: {"bench": "sum", "lane": …, "ranks": …, "bytes": …, "us": …, "right": …}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = (16, 4096, 14336, 65536, 131072, 262144, 524288, 1 << 20, 2 << 20, 8 << 20, 32 << 20, 112 << 20)
IN_GRAPH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lane", action="append", help="peer, host or nccl; all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    lanes = options.lane or ["peer", "host", "nccl"]
    if options.rank is not None:
        for row in (row for lane in lanes for row in measured(lane, options.rank, options.ranks, options.folder)):
            if options.rank == 0:
                print(json.dumps(row), flush=True)
        return
    rows = [row for lane in lanes for row in in_processes(lane, options.ranks)]
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def in_processes(lane: str, ranks: int) -> list[dict[str, Any]]:
    """Rows of one process a rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--lane", lane, "--ranks", str(ranks), "--folder", folder, "--rank"]
        others = [subprocess.Popen([*command, str(rank)]) for rank in range(1, ranks)]
        first = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True, timeout=200)
        for each in others:
            each.wait(20)
    print(first.stdout, end="", flush=True)
    return [json.loads(line) for line in first.stdout.splitlines() if line.startswith("{")]


def measured(lane: str, rank: int, ranks: int, folder: str) -> list[dict[str, Any]]:
    import torch

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return list(nccl(rank, ranks, folder) if lane == "nccl" else own(lane, rank, ranks, folder))


def own(lane: str, rank: int, ranks: int, folder: str) -> Any:
    import torch

    from tandem.errors import EngineError
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup
    from tandem.kernels.gpu.ranks.lane import graph_seconds
    from tandem.kernels.ranks.meeting import Meeting

    meeting = Meeting(rank, ranks, f"{folder}/sums", 60.0)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        group = GpuGroup(meeting, device, (lane,))
    except EngineError as error:
        yield {"bench": "sum", "lane": lane, "ranks": ranks, "error": str(error)}
        return
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        times = IN_GRAPH if nbytes < 1 << 22 else 10
        meeting.share(f"size-{nbytes}", b"-")
        seconds = graph_seconds(lambda x=x: group.sum(x), times, 10)
        right = is_right(group, rank, ranks, nbytes)
        yield {
            "bench": "sum", "lane": lane, "ranks": ranks, "bytes": nbytes, "us": round(seconds * 1e6, 2),
            "right": right,
        }  # fmt: skip


def is_right(group: Any, rank: int, ranks: int, nbytes: int) -> bool:
    import torch

    each = []
    for other in range(ranks):
        generator = torch.Generator(device="cuda").manual_seed(other)
        each.append(torch.randn(nbytes // 2, device="cuda", generator=generator).to(torch.bfloat16))
    expected = each[0].float()
    for other in each[1:]:
        expected = expected + other.float()
    sums = [group.sum(each[rank].clone()) for _ in range(5)]
    return all(torch.equal(found, expected.to(torch.bfloat16)) for found in sums)


def nccl(rank: int, ranks: int, folder: str) -> Any:
    import torch
    import torch.distributed as dist

    from tandem.kernels.gpu.ranks.lane import graph_seconds

    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=rank, world_size=ranks)
    for nbytes in SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
        dist.barrier()
        seconds = graph_seconds(lambda x=x: dist.all_reduce(x), IN_GRAPH if nbytes < 1 << 22 else 10, 10)
        yield {"bench": "sum", "lane": "nccl", "ranks": ranks, "bytes": nbytes, "us": round(seconds * 1e6, 2)}
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
