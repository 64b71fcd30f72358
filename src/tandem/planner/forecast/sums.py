"""`SumLane`: how long ranks take for a sum, by the way between them. Twice a layer, so a token waits for some hundred.

Measured are two and four H200s (NVLink, PCIe 5; docs/lab/ranks.md), sums in a CUDA graph, and two CPU ranks on an EPYC.
All else is estimated from those: more ranks, and GPUs without peers on PCIe 4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tandem.mechanisms.cost import cost_of
from tandem.planner.forecast.speeds import GPU_MODELS, gpu_model
from tandem.planner.gpu_plan import GpuPlan
from tandem.spec.layers import Layer
from tandem.spec.model_config import ModelConfig

# Bytes of a message, and seconds of its sum over two ranks.
PEERS = (
    (16, 1.7e-6), (4096, 2.2e-6), (14336, 2.3e-6), (65536, 2.5e-6), (256 << 10, 3.6e-6), (1 << 20, 9.6e-6),
    (8 << 20, 37e-6), (32 << 20, 128e-6), (112 << 20, 426e-6),
)  # fmt: skip
MAPPED = (
    (16, 2.6e-6), (4096, 3.2e-6), (14336, 3.9e-6), (65536, 7.2e-6), (256 << 10, 18e-6), (1 << 20, 47e-6),
    (8 << 20, 316e-6), (32 << 20, 1026e-6), (112 << 20, 3100e-6),
)  # fmt: skip
SHARED = ((2, 0.5e-6), (14336, 5.0e-6), (65536, 22e-6), (1 << 20, 342e-6), (16 << 20, 7.7e-3))

LINKED = ("a10040", "a100", "h100", "h200", "b200")  # sold with NVLink, but for cards with "PCIe" in their names
OLDER_BUS = 2.0  # times as long: PCIe 4 beside 5
MORE_PEERS = {2: 1.0, 4: 1.57, 8: 2.7}  # times as long as with two; eight: in proportion to what each receives
MORE_MAPPED = {2: 1.0, 4: 2.5, 8: 5.5}
MEASURED_RANKS = 2, 4


@dataclass(frozen=True, slots=True)
class SumLane:
    """name: in rows of benches. estimated: whether its times were not measured."""

    name: str
    way: str
    estimated: bool
    seconds: Callable[[float], float]
    """Seconds of a sum of so many bytes."""

    def text(self, nbytes: int) -> str:
        """The plan's words for it, with the time of a message."""
        kind = "estimated" if self.estimated else "measured"
        return f"{1e6 * self.seconds(nbytes):.1f} us each through {self.way} ({kind})"


def gpu_lane(gpu: GpuPlan | None, ranks: int, pcie_gbps: float) -> SumLane:
    """The lane of ranks with this plan; None: they compute on the CPU."""
    return lane_of("", ranks, pcie_gbps) if gpu is None else lane_of(gpu.name, ranks, pcie_gbps, gpu.no_nvlink)


def lane_of(gpu: str, ranks: int, pcie_gbps: float, no_nvlink: bool = False) -> SumLane:
    """gpu: its name; "": ranks compute on the CPU. An unknown GPU counts as one without peers, and so does any where
    the machine says that no NVLink joins them."""
    if not gpu:
        return SumLane("shm", "shared memory", ranks > 2, lambda nbytes: ranks / 2 * _between(SHARED, nbytes))
    share = 2 * (ranks - 1) / ranks  # of a long message, that each sends and receives
    if _is_linked(gpu) and not no_nvlink:
        more = _of_ranks(MORE_PEERS, ranks)
        return SumLane("peer", "NVLink", ranks not in MEASURED_RANKS, lambda nbytes: more * _between(PEERS, nbytes))
    more = _of_ranks(MORE_MAPPED, ranks) * OLDER_BUS

    def mapped(nbytes: float) -> float:
        return max(more * _between(MAPPED, nbytes), share * nbytes / pcie_gbps / 1e9)

    return SumLane("host", "mapped CPU memory", True, mapped)


def _is_linked(gpu: str) -> bool:
    """True for GPUs that NVLink connects where a host has several, by their product name."""
    return "pcie" not in gpu.lower() and gpu_model(gpu) in [GPU_MODELS[name] for name in LINKED]


def _of_ranks(times: dict[int, float], ranks: int) -> float:
    return next((times[most] for most in sorted(times) if ranks <= most), max(times.values()))


def _between(points: tuple[tuple[int, float], ...], nbytes: float) -> float:
    """Along straight lines; before the first point as there, past the last one in proportion."""
    if nbytes <= points[0][0]:
        return points[0][1]
    if nbytes >= points[-1][0]:
        return points[-1][1] * nbytes / points[-1][0]
    at = bisect_right([size for size, _ in points], nbytes)
    (low, first), (high, last) = points[at - 1], points[at]
    return first + (last - first) * (nbytes - low) / (high - low)


def sums_of(layer: Layer) -> int:
    """How often ranks meet in a layer."""
    return sum(cost_of(block.body).sums for block in layer.blocks)


def step_sums(lane: SumLane, model: ModelConfig, rows: int, logits: int) -> float:
    """Seconds of a step of so many rows, whose logits are wanted of some. model: a rank's."""
    itemsize = 2  # bfloat16
    sums = sum(map(sums_of, model.layers)) * lane.seconds(rows * model.hidden * itemsize)
    return sums + lane.seconds(logits * -(-model.vocab // model.shard.ranks) * itemsize)
