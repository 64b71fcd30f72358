"""Latent attention on a GPU in DeepSeek's shape (576 cached numbers a token, 512 of them values).

    PYTHONPATH=src python benchmarks/latent.py --json latent.json
    PYTHONPATH=src python benchmarks/latent.py --phase decode --heads 128 --batch 8 --context 32768

decode: absorbed queries against the pages of many layers in one CUDA graph, as `attention` (keys divided, merged) and
as `layer` (with rotation, cache write and the matrices of each head). TFLOPS count the products of all heads, GB/s the
latents that must be read. prompt: a chunk with keys and values of each head made anew, by what computes its attention;
TFLOPS count only that. crossing: chunks of few rows in both forms. first: the first call of a new length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.bench.rows import commit
from tandem.kernels.ops import RopeTables
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights
from tandem.mechanisms.latent.gpu import decode as decode_module
from tandem.mechanisms.latent.gpu import heads as heads_module
from tandem.mechanisms.latent.gpu.decode import LatentPages, decode
from tandem.mechanisms.latent.gpu.heads import GpuLatentHeads
from tandem.mechanisms.latent.gpu.prompt import Prompts, attention_for
from tandem.mechanisms.latent.gpu.prompt_kernels import attended
from tandem.models.batch import ForwardBatch

PAGE, LAYERS, COLD_BYTES, REPLAYS = 16, 64, 256 << 20, 7
PROMPTS = ((8192, 8192), (2048, 32768), (2048, 102400), (512, 32768))  # new tokens, tokens in all
CROSSING = (8, 16, 32, 64, 128, 256)
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Shape:
    sizes: LatentSizes
    weights: LatentWeights
    latents: Tensor  # [pages, PAGE, 1, width]

    def layers(self, tokens: int) -> list[Tensor]:
        """Pages of several layers, all together more than an L2 cache holds."""
        each = -(-tokens // PAGE)
        wanted = max(2, min(LAYERS, -(-COLD_BYTES // (tokens * 1152))))
        apart = len(self.latents) // each
        return [self.latents[i % apart * each : (i % apart + 1) * each] for i in range(wanted)]


def shape_of(heads: int, longest: int, tokens: int) -> Shape:
    sizes = LatentSizes(heads, 128, 64, 512, 128)

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()

    angles = torch.rand(longest + 1, 32, device=DEVICE) * 6.3
    rope, norm = RopeTables(angles.cos(), angles.sin()), torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
    weights = LatentWeights(made(heads, 512, 128) * 0.05, made(heads, 128, 512) * 0.05, norm, 1e-6, rope, 0.1)
    return Shape(sizes, weights, made(-(-tokens // PAGE), PAGE, 1, 576))


def batch_of(count: int, context: int, new: int) -> ForwardBatch:
    """Sequences of scattered pages."""
    width = -(-context // PAGE)
    tables = torch.randperm(count * width, device=DEVICE).view(count, width).int()
    positions = torch.arange(context - new, context, device=DEVICE)
    slots = tables[:, positions // PAGE].long() * PAGE + positions % PAGE
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * new
    lens = torch.full((count,), context, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(count, device=DEVICE)
    none = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    return ForwardBatch(rows, positions.repeat(count), slots.flatten(), starts, lens, tables, rows, none)


def in_graph(call: Callable[[Tensor], object], layers: list[Tensor]) -> float:
    """Microseconds of a call, of a graph of one for each layer."""
    for pages in layers[:2]:
        call(pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pages in layers:
            call(pages)
    graph.replay()
    return statistics.median(timed(graph.replay) for _ in range(REPLAYS)) * 1e3 / len(layers)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def usual(call: Callable[[], object]) -> float:
    call(), call()
    return statistics.median(timed(call) for _ in range(REPLAYS))


def decode_rows(
    shape: Shape, batches: list[int], contexts: list[int], rate: float
) -> Iterator[dict[str, Any]]:
    s = shape.sizes
    layer = GpuLatentHeads(s, shape.weights, torch.bfloat16, DEVICE)
    for batch in batches:
        for context in contexts:
            some, layers = batch_of(batch, context, 1), shape.layers(batch * context)
            x = torch.randn(batch, s.heads, s.width, device=DEVICE).bfloat16()
            q = torch.randn(batch, s.heads * 192, device=DEVICE).bfloat16()
            kv = torch.randn(batch, s.width, device=DEVICE).bfloat16()

            def attention(pages: Tensor, x: Tensor = x, some: ForwardBatch = some) -> None:
                decode(x, LatentPages(pages, some.block_tables, some.seq_lens), s, 0.1)

            def whole(pages: Tensor, q: Tensor = q, kv: Tensor = kv, some: ForwardBatch = some) -> None:
                layer(q, kv, some, pages)

            for name, call, kernel in kernels_of(s, attention, whole):
                with using(kernel):
                    us = in_graph(call, layers)
                flops, nbytes = 2 * s.heads * (576 + 512) * context * batch, 1152 * context * batch
                yield {
                    "phase": "decode", "what": name, "kernel": kernel, "heads": s.heads, "batch": batch,
                    "context": context, "us": round(us, 1), "tflops": round(flops / us / 1e6, 1),
                    "gb_s": round(nbytes / us / 1e3), "share": round(nbytes / us / 1e3 / rate, 3),
                    "layers": len(layers),
                }  # fmt: skip


Call = Callable[[Tensor], None]


def kernels_of(sizes: LatentSizes, attention: Call, whole: Call) -> Iterator[tuple[str, Call, str]]:
    """Calls to measure, each with its kernel."""
    chosen = "gluon" if sizes.heads > 32 and decode_module.hopper_kernel(DEVICE, sizes) else "triton"
    yield "attention", attention, chosen
    if chosen == "gluon":
        yield "attention", attention, "triton"
    yield "layer", whole, chosen


@contextmanager
def using(kernel: str) -> Iterator[None]:
    """Triton's kernel where Gluon's would run."""
    before = decode_module.hopper_kernel
    if kernel == "triton":
        decode_module.hopper_kernel = lambda device, sizes: None
    yield
    decode_module.hopper_kernel = before


def prompt_rows(shape: Shape) -> Iterator[dict[str, Any]]:
    s = shape.sizes
    for name, attend in (("cudnn", attention_for(s, DEVICE)), ("own", attended)):
        if name == "cudnn" and attend is attended:
            print("cuDNN does not take these heads here", flush=True)
            continue
        layer = GpuLatentHeads(s, shape.weights, torch.bfloat16, DEVICE)
        prompts: Prompts = layer._prompts
        prompts._attend = attend
        for new, context in PROMPTS:
            us, first = chunk_us(shape, layer, new, context)
            seen = new * (context - new) + new * (new + 1) / 2
            flops = 2 * s.heads * (192 + 128) * seen
            yield {
                "phase": "prompt", "attend": name, "heads": s.heads, "tokens": new, "context": context,
                "ms": round(us / 1e3, 2), "tflops": round(flops / us / 1e6, 1), "first_ms": round(first, 1),
            }  # fmt: skip


def chunk_us(shape: Shape, layer: GpuLatentHeads, new: int, context: int) -> tuple[float, float]:
    """Microseconds of one layer; and milliseconds of the first call."""
    s, batch = shape.sizes, batch_of(1, context, new)
    q = torch.randn(new, s.heads * 192, device=DEVICE).bfloat16()
    kv = torch.randn(new, s.width, device=DEVICE).bfloat16()
    pages = shape.latents[: -(-context // PAGE)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    layer(q, kv, batch, pages)
    torch.cuda.synchronize()
    first = (time.perf_counter() - started) * 1e3
    return usual(lambda: layer(q, kv, batch, pages)) * 1e3, first


def crossing_rows(shape: Shape) -> Iterator[dict[str, Any]]:
    layer, before = GpuLatentHeads(shape.sizes, shape.weights, torch.bfloat16, DEVICE), heads_module.FEW_ROWS
    for context in (2048, 32768):
        for new in CROSSING:
            found = {}
            for name, few in (("absorbed_us", new), ("made_anew_us", 0)):
                heads_module.FEW_ROWS = few
                found[name] = round(chunk_us(shape, layer, new, context)[0], 1)
            yield {"phase": "crossing", "heads": shape.sizes.heads, "tokens": new, "context": context} | found
    heads_module.FEW_ROWS = before


def first_rows(shape: Shape) -> Iterator[dict[str, Any]]:
    """Lengths that nobody had before; kernels are compiled."""
    layer = GpuLatentHeads(shape.sizes, shape.weights, torch.bfloat16, DEVICE)
    for new, context in ((300, 300), (700, 700), (1100, 1100), (1100, 5000), (1100, 9000), (1100, 20000)):
        usually, first = chunk_us(shape, layer, new, context)
        yield {
            "phase": "first", "heads": shape.sizes.heads, "tokens": new, "context": context,
            "first_ms": round(first, 1), "ms": round(usually / 1e3, 2),
        }  # fmt: skip


def copy_rate() -> float:
    """GB/s, bytes read and written, of a large copy; for a second first, so that clocks have risen."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target, ends = torch.empty_like(source), time.monotonic() + 1.0
    while time.monotonic() < ends:
        target.copy_(source)
        torch.cuda.synchronize()
    return 2 * source.numel() / min(timed(lambda: target.copy_(source)) for _ in range(10)) / 1e6


def measure(asked: argparse.Namespace, rate: float) -> Iterator[dict[str, Any]]:
    batches, contexts = asked.batch or [1, 8], asked.context or [1024, 8192, 32768, 131072]
    phases = asked.phase or ["decode", "prompt", "crossing", "first"]
    longest = max(*contexts, *(context for _, context in PROMPTS))
    tokens = max(max(batches) * max(contexts), 2 * longest, COLD_BYTES // 1152)
    for heads in asked.heads or [128, 16]:
        shape = shape_of(heads, longest, tokens)
        if "decode" in phases:
            yield from decode_rows(shape, batches, contexts, rate)
        for name, rows in (("prompt", prompt_rows), ("crossing", crossing_rows), ("first", first_rows)):
            if name in phases:
                yield from rows(shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", choices=["decode", "prompt", "crossing", "first"], action="append")
    parser.add_argument("--heads", type=int, action="append", help="default: 128, 16")
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8")
    parser.add_argument("--context", type=int, action="append", help="default: 1024, 8192, 32768, 131072")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("an NVIDIA GPU is needed")
    torch.manual_seed(0)
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy moves {rate:.0f} GB/s (read + written)", flush=True)
    about = {
        "bench": "latent", "copy_gb_s": round(rate, 1), "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__, "commit": commit(), "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    rows = []
    with torch.inference_mode():
        for row in measure(asked, rate):
            rows.append(about | row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
