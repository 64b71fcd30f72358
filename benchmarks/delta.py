"""Kernels of gated delta nets on a GPU, of Qwen3-Next's shape: rows that decode beside the rate of GPU memory, prompts.

    PYTHONPATH=src python benchmarks/delta.py --keep benchmarks/results

A step reads and writes each sequence's memory; its share is of a large copy's rate. It is timed in a graph of one call
for each of so many layers that their memory does not stay in the cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.bench.architectures import named_config
from tandem.bench.hybrid import gpu_copy_gbps
from tandem.bench.rows import print_and_keep
from tandem.mechanisms.delta_net.gpu.net import GpuDelta
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaState, DeltaWeights
from tandem.models.batch import ForwardBatch

REPLAYS, LAYERS = 20, 36


def net_of(shape: DeltaRule) -> GpuDelta:
    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda")

    weights = DeltaWeights(
        made(shape.conv, shape.channels), -made(shape.v_heads).exp(), made(shape.v_heads), made(shape.v_dim).bfloat16()
    )
    return GpuDelta(shape, weights)


def states_of(shape: DeltaRule, sequences: int) -> DeltaState:
    inputs = torch.randn(sequences + 1, shape.conv, shape.channels, device="cuda").bfloat16()
    gates = torch.randn(sequences + 1, shape.conv, 2 * shape.v_heads, device="cuda").bfloat16()
    memory = torch.randn(sequences + 1, shape.v_heads, shape.k_dim, shape.v_dim, device="cuda")
    return DeltaState(inputs, gates, memory)


def batch_of(sequences: int, new: int, before: int) -> ForwardBatch:
    none = torch.zeros(sequences * new, dtype=torch.int64, device="cuda")
    count = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    lens = torch.full((sequences,), before + new, dtype=torch.int32, device="cuda")
    return ForwardBatch(none, none, none, count * new, lens, none[:1, None].int(), none[:1], count[1:])


def rows_of(shape: DeltaRule, rows: int) -> tuple[Tensor, Tensor]:
    wide = torch.randn(rows, shape.channels + shape.values, device="cuda").bfloat16()
    return wide, torch.randn(rows, 2 * shape.v_heads, device="cuda").bfloat16()


def milliseconds(call: Callable[[], object]) -> float:
    """The median of some."""
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.median(times[2:])


def decode_row(shape: DeltaRule, sequences: int, gbps: float) -> dict[str, Any]:
    layers = max(4, min(LAYERS, 2048 // sequences))
    net, rows, batch = net_of(shape), rows_of(shape, sequences), batch_of(sequences, 1, 1000)
    states = [states_of(shape, sequences) for _ in range(layers)]
    for each in states[:2]:
        net(*rows, batch, each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in states:
            net(*rows, batch, each)
    us = milliseconds(graph.replay) * 1e3 / layers
    nbytes = 2 * sequences * states[0].memory[0].numel() * 4
    return {
        "bench": "delta_decode", "batch": sequences, "us": round(us, 2), "mb": round(nbytes / 1e6, 2),
        "share": round(nbytes / (us * 1e3) / gbps, 3), "hbm_gbps": round(gbps),
    }  # fmt: skip


def prompt_row(shape: DeltaRule, rows: int, sequences: int) -> dict[str, Any]:
    net, given, states = net_of(shape), rows_of(shape, rows), states_of(shape, sequences)
    batch = batch_of(sequences, rows // sequences, 0)

    def call() -> Tensor:
        return net(*given, batch, states)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return {
        "bench": "delta_prompt", "rows": rows, "batch": sequences, "ms": round(milliseconds(call), 3),
        "ms_in_graph": round(milliseconds(graph.replay), 3), "kernels_us": kernels_us(call),
    }  # fmt: skip


def kernels_us(call: Callable[[], object]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key: round(event.device_time_total, 1) for event in profile.key_averages()}


def measured() -> Iterator[dict[str, Any]]:
    shape = next(m for m in named_config("qwen3-next-80b", None).mixers if isinstance(m, DeltaRule))
    gbps = gpu_copy_gbps()
    for sequences in (1, 2, 8, 64):
        yield decode_row(shape, sequences, gbps)
    for rows, sequences in ((64, 1), (200, 1), (2048, 1), (2048, 8), (8192, 1)):
        yield prompt_row(shape, rows, sequences)


if __name__ == "__main__":
    print_and_keep(measured, __doc__)
