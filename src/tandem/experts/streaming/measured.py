"""Time of a layer's experts over the bus, and on the CPU: measured at the start, with the layer's own bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from tandem.experts.streaming.copy_stream import CopyStream
from tandem.experts.streaming.stream import StreamedLayer, cpu_slot_of
from tandem.kernels.packed.experts import PackedExperts
from tandem.planner.forecast.stream_rates import StreamRates
from tandem.spec.gpu_scratch import StagingRing

FEW, MANY, WIDE = 64, 256, 1024  # rows of the steps that the CPU's time is read from
MOST_WIDE_SECONDS = 0.25  # of a step of so many rows: where it would take longer, two sizes must do
REPEATS, MOST_REPEATS = 2, 8  # after one that warms up; the best counts
ALIKE = 1.05  # times as long as the best the second best takes at most: else a step may be late by chance
MOST_SECONDS = 0.1  # after which nothing is repeated any more


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
    rates = cpu_rates(lambda rows: share * _best(_step(largest.cpu, rows, top_k, largest.cpu.num_experts)))
    return replace(rates, bus=bus_seconds, parts=-(-largest.cpu_slots // ring.experts))


def cpu_rates(seconds_of: Callable[[int], float]) -> StreamRates:
    """Rates of the CPU alone, from what steps of some sizes take."""
    few, many = seconds_of(FEW), seconds_of(MANY)
    per_row, bend = max(0.0, many - few) / (MANY - FEW), None
    if many + (WIDE - MANY) * per_row <= MOST_WIDE_SECONDS:
        bend = MANY, max(0.0, seconds_of(WIDE) - many) / (WIDE - MANY)
    return StreamRates(0.0, max(0.0, few - FEW * per_row), per_row, bend=bend)


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
    """Seconds. Repeated until the two best are alike, for a moment in which the machine is busy counts for long."""
    call()
    times = list[float]()
    while len(times) < REPEATS or (times[1] > ALIKE * times[0] and len(times) < MOST_REPEATS):
        started = perf_counter()
        call()
        times = sorted([*times, perf_counter() - started])
        if len(times) >= REPEATS and sum(times) > MOST_SECONDS:
            break
    return times[0]
