"""`PlacementFlags`, the flags of `kt bench experts`, and `Traffic`, which it decodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.bench.placement.traces import ROUTINGS, TraceShape, expert_counts, generate, load_trace
from tandem.bench.stored import METHODS
from tandem.errors import ConfigError
from tandem.spec.model_config import ModelConfig

STRATEGIES = ("random", "uniform", "front-loading", "frequency", "dynamic")
SIMULATED, MEASURED = "experts_simulated", "experts"


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementFlags:
    """The flags of a run; shares 0 to 1; rates in GB/s, for the cost model only."""

    config: str
    routing: str  # a name of ROUTINGS, or a file
    shares: tuple[float, ...]
    strategies: tuple[str, ...]
    fmt: str
    layers: int | None
    tokens: int
    seed: int
    context: int = 1024
    threads: int | None = None
    tier: str = "auto"
    dram_gbps: float = 130.0
    pcie_gbps: float = 55.0
    hbm_gbps: float = 2150.0
    gpu_step_ms: float | None = None  # without routed experts; None: from dense bytes and layers

    def check(self) -> None:
        """Raises ConfigError."""
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ConfigError(f"--strategies {','.join(unknown)}: these exist: {', '.join(STRATEGIES)}")
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise ConfigError("--shares are percentages from 0 to 100, like 0,10,50")
        if self.fmt not in METHODS:
            raise ConfigError(f"--format {self.fmt}: give {', '.join(METHODS)}")
        if self.routing not in ROUTINGS and not Path(self.routing).is_file():
            raise ConfigError(f"--routing {self.routing}: give {', '.join(ROUTINGS)}, or a recorded file")


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """A trace that is decoded, and counts of earlier traffic, which "frequency" places by."""

    trace: Tensor  # int16 [tokens, layers, k]
    counts: Tensor  # int64 [layers, experts]


def numbers(text: str) -> tuple[float, ...]:
    """ "0,10,50" -> shares. Raises ConfigError."""
    try:
        return tuple(float(word) / 100 for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--shares {text!r} are percentages from 0 to 100, like 0,10,50") from error


def traffic(request: PlacementFlags, config: ModelConfig) -> Traffic:
    """Generated: other requests to the same model came before. Recorded: its first half came before the second."""
    router = config.moe.router
    shape = TraceShape(request.tokens, len(config.moe_layers), router.num_experts, router.top_k)
    if request.routing in ROUTINGS:
        law = ROUTINGS[request.routing]
        before, trace = generate(shape, law, request.seed + 1), generate(shape, law, request.seed)
    else:
        halves = load_trace(request.routing, dataclasses.replace(shape, tokens=2 * request.tokens))
        before, trace = halves.chunk(2)
    return Traffic(trace, expert_counts(before, router.num_experts))


def shape_columns(request: PlacementFlags, bench: str, strategy: str, share: float) -> dict[str, Any]:
    return {
        "bench": bench, "config": request.config, "layers": request.layers, "format": request.fmt,
        "routing": request.routing, "tokens": request.tokens, "seed": request.seed,
        "strategy": strategy, "gpu_share": round(share, 4),
    }  # fmt: skip
