"""Runs of `kt bench kernels`: one MoE layer's routed experts, ours and PyTorch's, over the same distinct weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem import _core
from tandem.bench import formats as bench_formats
from tandem.bench.ceilings import Ceilings, repeat_seconds
from tandem.errors import ConfigError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.packed.experts import PackedExperts

ROUTINGS = 16  # different random routings that repeats rotate through


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Routed experts of one layer: `experts` gated MLPs hidden -> width -> hidden, top_k of them per token."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden * self.width

    def expert_bytes(self, fmt: str) -> int:
        """Packed, scales and padding included."""
        return bench_formats.expert_bytes(self.hidden, self.width, fmt)

    def limited_to(self, expert_count: int) -> ExpertShape:
        return ExpertShape(self.name, self.hidden, self.width, min(self.experts, expert_count), self.top_k)


SHAPES = {
    "demo": ExpertShape("demo", 576, 192, 32, 8),
    "q3": ExpertShape("q3", 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "ds3": ExpertShape("ds3", 7168, 2048, 32, 8),  # DeepSeek-V3, an eighth of its experts
}


def parse_shape(text: str) -> ExpertShape:
    """A name, or hidden x width x experts x top_k: "2048x768x128x8"."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        hidden, width, experts, top_k = (int(part) for part in text.split("x"))
    except ValueError:
        raise ConfigError(
            f"--shape {text!r}: say {', '.join(SHAPES)}, or HIDDENxWIDTHxEXPERTSxTOPK"
        ) from None
    if not (hidden > 0 and width > 0 and 1 <= top_k <= experts):
        raise ConfigError(
            f"--shape {text!r}: sizes must be positive and the last not above the number of experts"
        )
    return ExpertShape(text, hidden, width, experts, top_k)


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table and of the JSON."""

    bench: str  # "tandem" | "tandem A8" (int8 activations) | "torch loop" | "torch grouped_mm"
    shape: str
    format: str
    tier: str
    tokens: int
    ms: float  # median of one call
    value: float
    unit: str  # "GB/s" where the memory bounds the call, "TFLOPS" where arithmetic does
    ceiling: float  # in the same unit
    share: float  # least possible time, memory and arithmetic both counted, over this time
    bytes_read: float  # weights of the distinct experts of a call, mean
    operations: float


@dataclass(slots=True)
class Workload:
    """Random activations and routings of `tokens` tokens; the same for everything that is compared."""

    shape: ExpertShape
    tokens: int
    x: Tensor = field(init=False)
    ids: list[Tensor] = field(init=False)
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        rows, top_k = self.tokens, self.shape.top_k
        self.x = torch.randn(rows, self.shape.hidden, generator=random).bfloat16()
        ranks = torch.rand(ROUTINGS, rows, self.shape.experts, generator=random)
        self.ids = list(ranks.topk(top_k).indices.int().unbind())
        self.weights = torch.full((rows, top_k), 1 / top_k)

    @property
    def operations(self) -> float:
        return 2.0 * self.shape.weights_per_expert * self.tokens * self.shape.top_k

    def bytes_read(self, fmt: str) -> float:
        """Weights of the distinct experts of a call, mean over the routings."""
        return statistics.mean(len(ids.unique()) for ids in self.ids) * self.shape.expert_bytes(fmt)

    def result(self, bench: str, fmt: str, tier: str, seconds: float, ceilings: Ceilings) -> Result:
        nbytes = self.bytes_read(fmt)
        share = ceilings.bound_seconds(nbytes, self.operations) / seconds
        if ceilings.is_memory_bound(nbytes, self.operations):
            value, unit, ceiling = nbytes / seconds / 1e9, "GB/s", ceilings.read_gbps
        else:
            value, unit, ceiling = self.operations / seconds / 1e12, "TFLOPS", ceilings.flops / 1e12
        return Result(
            bench,
            self.shape.name,
            fmt,
            tier,
            self.tokens,
            seconds * 1e3,
            value,
            unit,
            ceiling,
            share,
            nbytes,
            self.operations,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """One row's turns: seconds of a call, and what the machine could do at that time."""

    bench: str
    work: Workload
    format: str
    tier: str
    turns: tuple[tuple[float, Ceilings], ...]

    def result(self) -> Result:
        """The turn whose share is in the middle."""
        keys = self.bench, self.format, self.tier
        results = [self.work.result(*keys, seconds, ceilings) for seconds, ceilings in self.turns]
        return sorted(results, key=lambda each: each.share)[len(results) // 2]


Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, ids, weights) -> [T, hidden]


def run_in(layers: list[Layer], work: Workload) -> None:
    """Each once, not timed."""
    for layer in layers:
        layer(work.x, work.ids[0], work.weights)


def time_layers(layers: list[Layer], work: Workload, min_seconds: float) -> float:
    """Median seconds of one call; each call takes the next layer, so weights come from memory, not from cache."""
    turns: Iterator[tuple[Layer, Tensor]] = zip(cycle(layers), cycle(work.ids), strict=False)

    def call() -> Tensor:
        layer, ids = next(turns)
        return layer(work.x, ids, work.weights)

    return statistics.median(repeat_seconds(call, min_seconds, min_repeats=len(layers)))


def packed_layers(
    shape: ExpertShape, fmt: str, tier: str, pool: _core.WorkerPool, count: int, int8_activations: bool = False
) -> list[PackedExperts]:
    ops = CpuOps(pool, tier, int8_activations)
    gate, up, down = (bench_formats.as_stored(w, fmt) for w in random_expert(shape))
    numbers = fmt if fmt in bench_formats.NUMBERS else "bf16"
    layers: list[PackedExperts] = []
    for _ in range(count):
        layer = ops.experts(shape.experts, shape.hidden, shape.width, numbers)
        for expert in range(shape.experts):
            layer.load(expert, gate, up, down)
        layers.append(layer)
    return layers


def random_expert(shape: ExpertShape) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    up_shape, down_shape = (shape.width, shape.hidden), (shape.hidden, shape.width)
    gate, up, down = (torch.randn(s, generator=random) * 0.02 for s in (up_shape, up_shape, down_shape))
    return gate.bfloat16(), up.bfloat16(), down.bfloat16()


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One layer's experts as stacked bf16 tensors, computed the two ways that PyTorch offers."""

    gate_up: Tensor  # [E, 2 * width, hidden]
    down: Tensor  # [E, hidden, width]

    @classmethod
    def random(cls, shape: ExpertShape) -> StackedExperts:
        gate, up, down = random_expert(shape)
        repeat = (shape.experts, 1, 1)
        return cls(torch.cat((gate, up)).repeat(repeat), down.repeat(repeat))

    def loop(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert by expert over the rows that chose it, as Transformers' eager experts do."""
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, places = torch.where(ids == expert)
            gate, up = F.linear(x[rows], self.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, rows, y * weights[rows, places, None].to(y.dtype))
        return out

    def grouped(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, then one grouped_mm per matrix."""
        order = ids.flatten().long().argsort()
        rows = order // ids.shape[1]
        ends = torch.bincount(ids.flatten(), minlength=len(self.down)).cumsum(0).int()
        gate, up = F.grouped_mm(x[rows], self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        return torch.zeros_like(x).index_add_(0, rows, y * weights.flatten()[order, None].to(y.dtype))


def torch_layers(shape: ExpertShape, count: int) -> dict[str, list[Layer]]:
    layers = [StackedExperts.random(shape) for _ in range(count)]
    ways: dict[str, list[Layer]] = {"torch loop": [layer.loop for layer in layers]}
    if hasattr(F, "grouped_mm"):
        ways["torch grouped_mm"] = [layer.grouped for layer in layers]
    return ways
