"""Time of a layer's hand-off inside a CUDA graph."""

from __future__ import annotations

import statistics

import torch

from tandem.engine.start.gpu_side import GpuSide
from tandem.kernels.ops import Routing
from tandem.spec.model_config import ModelConfig


def handoff_us(side: GpuSide, config: ModelConfig, layers: int = 48) -> float:
    """Microseconds that a layer's hand-off takes in a CUDA graph when the CPU has nothing to compute: both kernels,
    both ways over PCIe, and an empty batch of the pool."""
    device, k = side.ops.device, side.handoff.sizes.top_k  # with shared experts that count as routed ones
    cpu = side.ops.cpu.experts(1, config.expert_channels, config.moe.experts.width)
    number = side.handoff.add(cpu)
    x = torch.zeros(1, config.expert_channels, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1, k, dtype=torch.int32, device=device)
    routing, slots = Routing(ids, torch.zeros(1, k, device=device)), ids  # slot 0: all of them are on the GPU
    graph = torch.cuda.CUDAGraph()
    with side.handoff.recording() as posts, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(layers):
            side.handoff.post(number, x, routing, slots)
            side.handoff.collect(1)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(50):
        side.handoff.begin(len(posts))
        start.record()
        graph.replay()
        end.record()
        side.handoff.finish()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times)) / layers
