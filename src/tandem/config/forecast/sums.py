"""`SumLane`: how long ranks take for a sum, by the way between them. Twice a layer, so a token waits for some hundred.

Measured are two H200s (NVLink, PCIe 5), 100 sums in a CUDA graph, and two CPU ranks on an EPYC. All else is estimated
from those: more ranks, and GPUs without peers on PCIe 4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.forecast.speeds import GPU_MODELS, gpu_model
from tandem.config.layers import Layer, Moe
from tandem.config.model_config import ModelConfig
from tandem.config.ranks.cut import divided

# Bytes of a message, and seconds of its sum over two ranks.
PEERS = (
    (4096, 2.25e-6), (14336, 2.33e-6), (65536, 2.56e-6), (1 << 20, 19.8e-6), (32 << 20, 145e-6), (112 << 20, 423e-6),
)  # fmt: skip
MAPPED = ((4096, 3.26e-6), (14336, 4.00e-6), (65536, 6.93e-6))
SHARED = ((2, 0.5e-6), (14336, 5.0e-6), (65536, 22e-6), (1 << 20, 342e-6), (16 << 20, 7.7e-3))

LINKED = ("a10040", "a100", "h100", "h200", "b200")  # sold with NVLink, mostly
OLDER_BUS = 2.0  # PCIe 4 beside 5: 8 us where 4.00 was measured
MORE_PEERS = {2: 1.0, 4: 1.25, 8: 1.5}  # times as long as with two
MORE_MAPPED = {2: 1.0, 4: 9 / 8, 8: 12 / 8}


@dataclass(frozen=True, slots=True)
class SumLane:
    """name: in rows of benches. estimated: whether its times were not measured."""

    name: str
    way: str
    estimated: bool
    seconds: Callable[[float], float]
    """Of a sum of so many bytes."""

    def text(self, nbytes: int) -> str:
        """What a plan says of it, with the time of a message."""
        kind = "estimated" if self.estimated else "measured"
        return f"{1e6 * self.seconds(nbytes):.1f} us each through {self.way} ({kind})"


def lane_of(gpu: str, ranks: int, pcie_gbps: float) -> SumLane:
    """gpu: its name; "": ranks compute on the CPU. Raises nothing: an unknown GPU counts as one without peers."""
    if not gpu:
        return SumLane("shm", "shared memory", ranks > 2, lambda nbytes: ranks / 2 * _between(SHARED, nbytes))
    share = 2 * (ranks - 1) / ranks  # of a long message, that each sends and receives
    if gpu_model(gpu) in [GPU_MODELS[name] for name in LINKED]:
        more = _of_ranks(MORE_PEERS, ranks)
        return SumLane("peer", "NVLink", ranks > 2, lambda nbytes: more * _between(PEERS, nbytes))
    more = _of_ranks(MORE_MAPPED, ranks) * OLDER_BUS
    short = MAPPED[-1][0]

    def mapped(nbytes: float) -> float:
        long = max(0.0, nbytes - short) * share / pcie_gbps / 1e9
        return more * _between(MAPPED, min(nbytes, short)) + long

    return SumLane("host", "mapped CPU memory", True, mapped)


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
    bodies = [block.body for block in layer.blocks]
    twice = sum(isinstance(body, Moe) and body.beside is not None for body in bodies)
    return sum(map(divided, bodies)) + twice


def step_sums(lane: SumLane, model: ModelConfig, rows: int, logits: int) -> float:
    """Seconds of a step of so many rows, whose logits are wanted of some. model: a rank's."""
    itemsize = 2  # bfloat16
    sums = sum(map(sums_of, model.layers)) * lane.seconds(rows * model.hidden * itemsize)
    return sums + lane.seconds(logits * -(-model.vocab // model.shard.ranks) * itemsize)
