"""`ExpertSizes`: packed bytes of a model's routed experts, layer by layer, and of those that a placement puts on a GPU.

GGUF files of mixed types differ by layer: a quarter of the experts may take a fifth of the bytes, or a third.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache

from tandem.planner.memory import MemoryRequest, gib
from tandem.spec.model_config import STORED, ModelConfig
from tandem.spec.stored import StoredFormat


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """each: bytes of an expert, by MoE layer; count: experts of a layer. layer_by_layer: the GPU takes whole layers
    first; else the first expert of each, then the second: where statistics or chance decide, about as many of each."""

    each: tuple[int, ...]
    count: int
    layer_by_layer: bool = False

    @property
    def total(self) -> int:
        return self.count * sum(self.each)

    @property
    def largest(self) -> int:
        return max(self.each, default=0)

    def gpu_bytes(self, experts: int) -> int:
        """Bytes of so many (layer, expert) pairs there."""
        if not self.each:
            return 0
        rounds, rest = divmod(experts, self.count if self.layer_by_layer else len(self.each))
        if self.layer_by_layer:
            return self.count * sum(self.each[:rounds]) + (rest * self.each[rounds] if rest else 0)
        return rounds * sum(self.each) + sum(self.each[:rest])

    def ram_bytes(self, gpu_experts: int) -> int:
        """Bytes of all others."""
        return self.total - self.gpu_bytes(gpu_experts)

    def spare_bytes(self, gpu_experts: int) -> int:
        """Bytes of a place in each layer with experts on both sides, where experts move. At most: statistics or chance
        may put whole layers on one side."""
        rounds, rest = divmod(gpu_experts, max(1, self.count))
        if self.layer_by_layer:
            return self.each[rounds] if rest else 0
        layers = min(len(self.each), gpu_experts, self.count * len(self.each) - gpu_experts)
        return sum(sorted(self.each, reverse=True)[:layers])

    def fitting(self, nbytes: int) -> int:
        """So many pairs fit there."""
        everyone = range(self.count * len(self.each) + 1)
        return max(0, bisect_right(everyone, nbytes, key=self.gpu_bytes) - 1)

    def text(self) -> str:
        """Bytes of an expert."""
        least, most = gib(min(self.each, default=0)), gib(self.largest)
        return f"{least} each" if least == most else f"{least} to {most} each"


def unpacked_experts(model: ModelConfig) -> tuple[int, int, int]:
    """Experts of a layer, at most: shared ones may count as such. Their channels and width."""
    experts = model.moe.experts.count + model.moe.fusible_shared
    return experts, model.expert_channels, model.moe.experts.width


def expert_sizes(request: MemoryRequest) -> ExpertSizes:
    strategy = request.config.kt_expert_placement_strategy
    stored = request.stored.experts
    return sizes_of(request.model, request.expert_format, stored, strategy == "front-loading")


@cache
def sizes_of(model: ModelConfig, expert_format: str, stored: StoredFormat, layer_by_layer: bool) -> ExpertSizes:
    layers = len(model.moe_layers)
    weights = stored.layers[:layers] if expert_format == STORED and len(stored.layers) >= layers else ()
    if not weights:
        each = (model.expert_bytes(expert_format, stored),) * layers
    else:
        each = tuple(model.expert_bytes(STORED, replace(stored, bytes_per_weight=per)) for per in weights)
    return ExpertSizes(each, model.moe.experts.count, layer_by_layer)
