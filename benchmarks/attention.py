"""Attention over paged keys and values on a GPU, backend by backend, in Qwen3-30B-A3B's shape.

    PYTHONPATH=src python benchmarks/attention.py --json attention.json
    PYTHONPATH=src python benchmarks/attention.py --backend triton --batch 1 --context 1024

Decode: a CUDA graph of many layers; each has keys and values of its own, in scattered pages, and all of them together
are several times as large as an L2 cache. GB/s counts the keys and values that a layer must read, its share is of what
a copy inside the GPU memory moves (bytes read and written) in the same run. Prefill: whole prompts, and the last 512
tokens of a long one; only keys that a token sees count as work. Backends that cannot run here are named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bench.rows import commit
from tandem.errors import TandemError
from tandem.kernels.gpu.attention_backends import AttentionBackend, attention_of
from tandem.kernels.gpu.attention_flashinfer import AttentionShape
from tandem.models.batch import ForwardBatch

HEADS, KV_HEADS, DIM, LAYERS = 32, 4, 128, 48
PAGES = {"triton": 16, "torch": 256, "flashinfer": 16}  # tokens per page
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # keys and values of a layer, bfloat16
COLD_BYTES = 256 << 20  # a GPU's L2 cache holds 50 to 126 MB
COPIES, REPLAYS = 10, 7
GRAPH_BYTES = 16 << 30  # read by one replay, at most
PREFILLS = ((512, 512), (4096, 4096), (512, 32768))  # new tokens, tokens in all
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Pool:
    """Keys and values of many layers, or of one long step."""

    k: Tensor
    v: Tensor

    def layers(self, page: int, count: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Pages of `count` layers; they have none in common until the pool is used up."""
        each = -(-tokens // page) * page
        apart = len(self.k) // each
        starts = [i % apart * each for i in range(count)]
        return [
            tuple(t[at : at + each].view(-1, page, KV_HEADS, DIM) for t in (self.k, self.v)) for at in starts
        ]


def batch_of(page: int, count: int, context: int, new: int) -> ForwardBatch:
    """Sequences of `context` tokens, the last `new` of which are this step's, in scattered pages."""
    width = -(-context // page)
    tables = torch.randperm(count * width, device=DEVICE).view(count, width).int()
    positions = torch.arange(context - new, context, device=DEVICE).repeat(count)
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * new
    lens = torch.full((count,), context, dtype=torch.int32, device=DEVICE)
    return ForwardBatch(positions, positions, positions, starts, lens, tables, positions[:1], starts[1:])


def attended(
    backend: AttentionBackend, q: Tensor, layers: list[tuple[Tensor, Tensor]], batch: ForwardBatch
) -> float:
    """Microseconds of one layer: the median over replays of a CUDA graph of all of them."""
    on_cpu = {name: getattr(batch, name).cpu() for name in ("query_starts", "seq_lens", "block_tables")}
    backend.begin(replace(batch, **on_cpu), len(q) == len(batch.seq_lens))
    for pages in layers[:2]:
        backend(q, *pages, batch, DIM**-0.5, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pages in layers:
            backend(q, *pages, batch, DIM**-0.5, 0)
    graph.replay()
    return statistics.median(_replayed(graph) for _ in range(REPLAYS)) * 1e3 / len(layers)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_rate(pool: Pool) -> float:
    """GB/s, bytes read and written, of a copy of the pool's keys; for a second first, so that clocks have risen."""
    to, ends = torch.empty_like(pool.k), time.monotonic() + 1.0
    while time.monotonic() < ends:
        to.copy_(pool.k)
        torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(COPIES):
        to.copy_(pool.k)
    end.record()
    end.synchronize()
    return COPIES * 2 * to.nbytes / begin.elapsed_time(end) / 1e6


def decode(backend: AttentionBackend, pool: Pool, page: int, batch: int, context: int) -> dict[str, Any]:
    read = batch * context * TOKEN_BYTES
    count = max(2, min(LAYERS, GRAPH_BYTES // read), min(4 * LAYERS, COLD_BYTES // read))
    q, layers = queries(batch), pool.layers(page, count, batch * (-(-context // page) * page))
    us = attended(backend, q, layers, batch_of(page, batch, context, 1))
    return {"us": round(us, 2), "calls": count, "gb_s": round(read / us / 1e3, 1)}


def prefill(backend: AttentionBackend, pool: Pool, page: int, new: int, context: int) -> dict[str, Any]:
    us = attended(backend, queries(new), pool.layers(page, 4, context), batch_of(page, 1, context, new))
    seen = new * (context - new) + new * (new + 1) / 2
    return {"us": round(us, 1), "tflops": round(4 * HEADS * DIM * seen / us / 1e6, 1)}


def queries(rows: int) -> Tensor:
    return torch.randn(rows, HEADS, DIM, device=DEVICE).bfloat16()


def measure(
    name: str, pool: Pool, rate: float, batches: list[int], contexts: list[int]
) -> Iterator[dict[str, Any]]:
    page = PAGES[name]
    shape = AttentionShape(HEADS, KV_HEADS, DIM, DIM**-0.5, 0, page, -(-max(contexts) // page))
    backend = attention_of(name, shape, DEVICE)
    about = {"bench": "attention", "backend": name, "page_size": page}
    for batch in batches:
        for context in contexts:
            row = decode(backend, pool, page, batch, context)
            share = round(row["gb_s"] / rate, 3)
            yield about | {"phase": "decode", "batch": batch, "context": context} | row | {"share": share}
    for new, context in PREFILLS:
        row = prefill(backend, pool, page, new, context)
        yield about | {"phase": "prefill", "tokens": new, "context": context} | row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=list(PAGES), action="append", help="default: all that can run")
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8, 32")
    parser.add_argument("--context", type=int, action="append", help="default: 1024, 8192, 32768, 131072")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("an NVIDIA GPU is needed")
    batches, contexts = options.batch or [1, 8, 32], options.context or [1024, 8192, 32768, 131072]
    torch.manual_seed(0)
    longest = [max(batches) * max(contexts), PREFILLS[-1][1], COLD_BYTES // TOKEN_BYTES]
    tokens = -(-max(longest) // max(PAGES.values())) * max(PAGES.values())
    k = torch.empty(tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device=DEVICE).normal_()
    pool = Pool(k, torch.empty_like(k).normal_())
    rate, rows = copy_rate(pool), []
    machine = torch.cuda.get_device_name()
    print(f"{machine}: a copy moves {rate:.0f} GB/s (read + written)", flush=True)
    about = {
        "copy_gb_s": round(rate, 1), "machine": machine, "torch": torch.__version__, "commit": commit(),
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    for name in options.backend or PAGES:
        try:
            for row in measure(name, pool, rate, batches, contexts):
                rows.append(row | about)
                shown = {key: value for key, value in row.items() if key not in ("bench", "page_size")}
                print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        except (TandemError, ImportError) as error:
            print(f"{name}: left out: {error}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
