"""Dense matrices kept as codes on a GPU, beside bfloat16's: milliseconds and GB/s of weights.

    PYTHONPATH=src python benchmarks/dense.py --json dense.json
    PYTHONPATH=src python benchmarks/dense.py --shape 2048x4096 --format fp8 --rows 1

A CUDA graph of products with many matrices in turn, together several times as large as an L2 cache, as in a model.
GB/s counts the packed bytes of a matrix, once; its share is of what a copy inside the GPU memory moves (bytes read and
written) in the same run. "bf16" is what the engine takes for numbers: a kernel of ours for one row, else cuBLAS.
--warm: compiles only, for several processes at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem import _core
from tandem.bench.hybrid import gpu_copy_gbps
from tandem.bench.rows import commit
from tandem.formats.codes import WeightCodes
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu.dense_codes import GpuCodes
from tandem.kernels.gpu.linear import GpuLinear
from tandem.kernels.gpu.mma import code_mma
from tandem.kernels.gpu.ops import GpuOps
from tandem.kernels.ops import Linear

SHAPES = ("2048x2048", "2048x4096", "4096x12288", "7168x2048")  # inputs x outputs
FORMATS = ("bf16", "fp8", "int8", "int4", "mxfp4")
ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
COLD_BYTES, MOST_CALLS, REPLAYS = 256 << 20, 128, 7
DEVICE = torch.device("cuda")


def made(fmt: str, columns: int, depth: int) -> WeightCodes:
    """Random codes; weights of about 0.01 to 1."""

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape) * 0.01 + 0.005

    bits = torch.randint(256, (columns, depth // (1 if fmt in ("fp8", "int8") else 2)), dtype=torch.uint8)
    if fmt == "fp8":  # in blocks, without NaN
        each = scales(columns // 128, depth // 128)
        return WeightCodes(bits & 0xBF, each, "fp8", 128, depth, 128)
    if fmt == "mxfp4":
        exponents = torch.randint(118, 122, (columns, depth // 32), dtype=torch.uint8)
        return WeightCodes(bits, exponents.view(torch.float8_e8m0fnu), "fp4", 32, depth)
    group = 32
    return WeightCodes(bits, scales(columns, depth // group).bfloat16(), fmt, group, depth)


def copies(linear: Linear) -> list[Linear]:
    """The matrix many times, at addresses of their own."""
    kept = linear.pool if isinstance(linear, GpuCodes) else linear.weight  # type: ignore[attr-defined]
    made = [linear]
    for _ in range(min(MOST_CALLS, max(2, COLD_BYTES // kept.nbytes)) - 1):
        other: Any = object.__new__(type(linear))
        other.__dict__ |= linear.__dict__
        setattr(other, "pool" if isinstance(linear, GpuCodes) else "weight", kept.clone())
        made.append(other)
    return made


def seconds(run: Callable[[], object], calls: int) -> float:
    """Seconds of one call, from a graph that holds `run`'s."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times) / calls


def measure(ops: GpuOps, shape: str, fmt: str, rows: list[int], rate: float) -> list[dict[str, Any]]:
    depth, columns = map(int, shape.split("x"))
    torch.manual_seed(0)
    if fmt == "bf16":
        linear: Linear = GpuLinear(torch.randn(columns, depth) * 0.02, None, "bf16", DEVICE)
        nbytes = columns * depth * 2
    else:
        linear = ops.linear(made(fmt, columns, depth))
        assert isinstance(linear, GpuCodes)
        nbytes = linear.pool.nbytes
    many, found = copies(linear), []
    for count in rows:
        x = torch.randn(count, depth, device=DEVICE).bfloat16()

        def run(x: Tensor = x) -> None:
            for each in many:
                each(x)

        each = seconds(run, len(many))
        gbps = nbytes / each / 1e9
        found.append({
            "bench": "dense", "shape": shape, "format": fmt, "rows": count, "us": round(each * 1e6, 2),
            "gb_s": round(gbps), "share": round(gbps / rate, 3),
        })  # fmt: skip
    return found


def warm(ops: GpuOps, shape: str, fmt: str, rows: list[int]) -> None:
    depth, columns = map(int, shape.split("x"))
    if fmt == "bf16":
        linear: Linear = GpuLinear(torch.zeros(columns, depth), None, "bf16", DEVICE)
    else:
        linear = ops.linear(made(fmt, columns, depth))
    for count in rows:
        linear(torch.zeros(count, depth, device=DEVICE).bfloat16())
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="inputs x outputs; default: " + ", ".join(SHAPES))
    parser.add_argument("--format", action="append", choices=FORMATS, help="default: all")
    parser.add_argument("--rows", action="append", type=int, help=f"default: {', '.join(map(str, ROWS))}")
    parser.add_argument(
        "--few", choices=("cuda", "triton"), default="cuda", help="whose kernels multiply few rows (cuda)"
    )
    parser.add_argument(
        "--many", choices=("tiles", "unpacked"), help="what from 17 rows on; default: the engine's"
    )
    parser.add_argument("--threads", type=int, default=4, help="that pack (4)")
    parser.add_argument("--warm", action="store_true", help="compile the kernels, and nothing else")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("an NVIDIA GPU is needed")
    if options.few == "triton":
        code_mma.reads = lambda panels, device: False
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1] * options.threads), _core.supported_tiers()[-1]))
    shapes, formats, rows = options.shape or SHAPES, options.format or FORMATS, options.rows or list(ROWS)
    if options.warm:
        for shape in shapes:
            for fmt in formats:
                warm(ops, shape, fmt, rows)
        return
    rate, found = gpu_copy_gbps(), []
    machine = torch.cuda.get_device_name()
    print(f"{machine}: a copy moves {rate:.0f} GB/s (read + written)", flush=True)
    about = {
        "copy_gb_s": round(rate), "machine": machine, "torch": torch.__version__, "commit": commit(),
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    with torch.inference_mode():
        for shape in shapes:
            for fmt in formats:
                mine = measure(ops, shape, fmt, rows, rate)
                found += [row | about | {"few": options.few} for row in mine]
                cells = "  ".join(f"{r['rows']}: {r['us']:.1f} us {r['share']:.2f}" for r in mine)
                print(f"{shape:>11} {fmt:>6}  {cells}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
