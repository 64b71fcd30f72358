"""Products of a layer's experts with many rows on a GPU, by kernel: microseconds, TFLOPS and errors.

    PYTHONPATH=src python benchmarks/expert_products.py --format int4 --tokens 512 --tokens 2048 --out rows.json

The way that a prompt's layer takes (`PromptExperts`, with sorting, gathering and sums) is forced: tiles of warps from
codes, whole warpgroups (Hopper), or unpacked experts. `us` is of the layer, as the host gives it: below some 600 us
that is the host's time. `gate_up_us` and `down_us` are of both products alone. `change`: relative to the first way's
result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem import _core
from tandem.formats.reference import stored
from tandem.kernels import which
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu.expert_rows import ExpertActivation
from tandem.kernels.gpu.ops import GpuOps
from tandem.kernels.gpu.prompts import code_product, wgmma_product
from tandem.kernels.gpu.prompts.products import PromptExperts, parts_of
from tandem.kernels.gpu.prompts.unpack import Packed
from tandem.kernels.ops import Routing

DEVICE = torch.device("cuda:0")
PACKED = ("bf16", "int8", "int4")  # rounded while they are loaded; others are as a checkpoint stores them
COPIES = 4  # experts with weights of their own; the others are copies
REPEATS = 20
NEVER, ALWAYS = -1, 1 << 40
LIMITS = {  # pairs of an expert: from codes up to, whole warpgroups from and up to
    "code_product": (ALWAYS, ALWAYS, ALWAYS),
    "wgmma_product": (ALWAYS, NEVER, ALWAYS),
    "unpacked": (NEVER, NEVER, NEVER),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", help="default: int4; bf16, int8, fp8, mxfp4, mxfp8, nvfp4, …")
    parser.add_argument("--shape", default="2048x768x128x8", help="hidden x width x experts x experts of a token")
    parser.add_argument("--tokens", type=int, action="append", help="default: 512, 2048 and 8192")
    parser.add_argument("--out", type=Path, help="JSON")
    flags = parser.parse_args()
    hidden, width, experts, top_k = map(int, flags.shape.split("x"))
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU")
    rows = []
    for fmt in flags.format or ["int4"]:
        for row in measured(fmt, (hidden, width, experts, top_k), flags.tokens or [512, 2048, 8192]):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if flags.out:
        flags.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measured(fmt: str, shape: tuple[int, int, int, int], tokens: list[int]) -> Iterator[dict[str, Any]]:
    hidden, width, experts, top_k = shape
    layer = made_up(fmt, hidden, width)
    prompts = layer.prompts
    assert prompts is not None
    pool = layer.pool[: COPIES * layer.stride].repeat(-(-experts // COPIES))
    for count in tokens:
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(count)]).int().to(DEVICE)
        x = torch.randn(count, hidden, device=DEVICE).bfloat16()
        routing = Routing(ids, torch.rand(count, top_k, device=DEVICE))
        ends = torch.bincount(ids.flatten().long(), minlength=experts).cumsum(0).int()
        first = None
        for way, limits in LIMITS.items():
            if not (way == "unpacked" or (prompts.wgmma if way == "wgmma_product" else prompts.codes)):
                continue
            which.CODES_PAIRS, which.WGMMA_LEAST_PAIRS, which.WGMMA_PAIRS = limits
            which.PLAIN_PAIRS = limits[0]
            parts = parts_of(pool, layer.stride, experts, at_once(way, prompts, experts))
            call = partial(prompts, x, ids, routing, parts)
            result = call()
            first = result if first is None else first
            row = {"bench": "expert_products", "gpu": torch.cuda.get_device_name(DEVICE), "format": fmt, "way": way}
            row |= {"tokens": count, "rows": count * top_k / experts, "us": microseconds(call)}
            row["change"] = float((result - first).norm() / first.norm())
            flops = 2.0 * count * top_k * hidden * width
            yield row | products_alone(way, layer, Packed(pool, layer.stride, 0), ends, count * top_k, flops)


def at_once(way: str, prompts: PromptExperts, experts: int) -> int:
    """Experts of a part: scratch bounds those that are unpacked."""
    return prompts.at_once if way == "unpacked" else experts


def products_alone(
    way: str, layer: Any, packed: Packed, ends: torch.Tensor, pairs: int, flops: float
) -> dict[str, float]:
    """Microseconds and TFLOPS of both products; {}: of unpacked experts, whose kernels are PyTorch's."""
    if way == "unpacked":
        return {}
    gate_up, down, between = layer.gate_up, layer.down, ExpertActivation(layer.down.depth)
    x = torch.randn(pairs + wgmma_product.MOST_ROWS, gate_up.depth, device=DEVICE).bfloat16()
    hidden = torch.randn(pairs + wgmma_product.MOST_ROWS, down.depth, device=DEVICE).bfloat16()
    mean = pairs / len(ends)
    if way == "wgmma_product":
        both = (
            lambda: wgmma_product.activated(x, packed, gate_up, ends, between, ends),
            lambda: wgmma_product.multiplied(hidden, packed, gate_up.bytes, down, ends),
        )
    else:
        both = (
            lambda: code_product.activated(x, packed, gate_up, ends, mean, between, ends),
            lambda: code_product.multiplied(hidden, packed, gate_up.bytes, down, ends, mean),
        )
    times = [microseconds(call) for call in both]
    rates = {"gate_up_tflops": round(2 * flops / times[0] / 1e6), "down_tflops": round(flops / times[1] / 1e6)}
    return {"gate_up_us": times[0], "down_us": times[1], **rates}


def made_up(fmt: str, hidden: int, width: int) -> Any:
    """Some experts of random weights on the GPU."""
    torch.manual_seed(0)
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))
    layer = ops.gpu_experts(torch.arange(COPIES, dtype=torch.int32), hidden, width, fmt if fmt in PACKED else "bf16")
    for expert in range(COPIES):
        sizes = (width, hidden), (width, hidden), (hidden, width)
        weights = (torch.randn(*size) / size[1] ** 0.5 for size in sizes)
        layer.load(expert, *(weight if fmt in PACKED else stored(weight, fmt) for weight in weights))
    return layer


def microseconds(call: Callable[[], object]) -> float:
    """Mean time of a call, after two that warm up."""
    for _ in range(2):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        call()
    end.record()
    end.synchronize()
    return round(1e3 * begin.elapsed_time(end) / REPEATS, 1)


if __name__ == "__main__":
    sys.exit(main())
