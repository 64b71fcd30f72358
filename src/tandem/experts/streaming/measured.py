"""Time of a layer's experts over the bus, and on the CPU: measured at the start, with the layer's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from tandem.experts.streaming.copy_stream import CopyStream
from tandem.experts.streaming.stream import StreamedLayer, cpu_slot_of
from tandem.kernels.packed.experts import PackedExperts
from tandem.planner.forecast.stream_rates import StreamRates
from tandem.spec.gpu_scratch import StagingRing

FEW, MANY = 64, 256  # rows of the two steps that the CPU's time is read from
REPEATS = 2  # after one that warms up; the best counts


def measured_rates(
    layers: Sequence[StreamedLayer], ring: StagingRing, bus: CopyStream, device: torch.device, top_k: int
) -> StreamRates:
    """Rates of layers that have experts in CPU memory. `least_rows` is left for the caller."""
    largest = max(layers, key=lambda layer: layer.cpu.loaded)
    memory = torch.empty(ring.part_bytes, dtype=torch.uint8, device=device)
    bus.copy_after(bus.computing_given())  # as in `Transfers`: who had this memory before may still read it
    runs = largest.runs(range(min(ring.experts, largest.cpu_slots)))

    def copy() -> None:
        for source, target, nbytes in runs:
            bus.copy(source, memory.data_ptr() + target, nbytes)
        bus.finish()

    mean = sum(layer.cpu_slots * layer.cpu.bytes_per_expert for layer in layers) / len(layers)
    bus_seconds = _best(copy) * mean / sum(nbytes for *_, nbytes in runs)
    share = sum(layer.cpu.loaded for layer in layers) / len(layers) / largest.cpu.loaded
    experts = largest.cpu.num_experts
    few_seconds, many_seconds = (share * _best(_step(largest.cpu, rows, top_k, experts)) for rows in (FEW, MANY))
    per_row = max(0.0, many_seconds - few_seconds) / (MANY - FEW)
    parts = -(-largest.cpu_slots // ring.experts)
    return StreamRates(bus_seconds, max(0.0, few_seconds - FEW * per_row), per_row, parts=parts)


def _step(layer: PackedExperts, rows: int, top_k: int, experts: int) -> Callable[[], object]:
    """Rows that use all experts alike; the layer skips those that it does not have."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, layer.hidden, generator=generator).bfloat16()
    ids = torch.rand(rows, experts, generator=generator).topk(min(top_k, experts)).indices.int()
    mask = torch.tensor([cpu_slot_of(layer, expert) >= 0 for expert in range(experts)])
    ids = torch.where(mask[ids.long()], ids, -1)
    weights, out = torch.full(ids.shape, 1 / top_k), torch.empty(rows, layer.hidden)
    return lambda: layer.forward(x, ids, weights, out)


def _best(call: Callable[[], object]) -> float:
    """Seconds."""
    call()
    times = []
    for _ in range(REPEATS):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return min(times)
