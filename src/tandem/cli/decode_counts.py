"""What the steps of a decoding benchmark used, in all."""

from __future__ import annotations

from typing import Any, NamedTuple

from tandem.experts.handoff import Handoff
from tandem.experts.usage import ExpertUsage


class StepCounts(NamedTuple):
    """posts: layers handed to the CPU; cpu_experts: that it used, each once per post. Tokens are routed ones, bytes
    those of routed experts, each once per step. The last three are `HintCounts`."""

    posts: int = 0
    cpu_experts: int = 0
    gpu_tokens: int = 0
    cpu_tokens: int = 0
    gpu_bytes: int = 0
    cpu_bytes: int = 0
    hinted: int = 0
    hint_hits: int = 0
    hint_bytes: int = 0

    @classmethod
    def now(cls, handoff: Handoff, usage: ExpertUsage | None) -> StepCounts:
        """Since the start; without `usage` no tokens and bytes are known."""
        (posts, experts), hints, sides = handoff.used(), handoff.hints(), [0, 0, 0, 0]
        if usage is not None:
            usage.read()
            sides = [int(total.sum()) for total in usage.sides()]
        return cls._make((posts, experts, *sides, *hints))

    def since(self, before: StepCounts) -> StepCounts:
        return StepCounts(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(a + b for a, b in zip(self, other, strict=True)))

    def cpu_experts_per_step(self, layers: int) -> float:
        return self.cpu_experts / self.posts * layers if self.posts else 0.0

    def columns(self, steps: int) -> dict[str, Any]:
        """hit: share of the routed tokens whose expert is on the GPU. hint_hit: of the experts in CPU memory that were
        foreseen, those that were used; ahead: their bytes that were fetched before they were asked for."""
        return {
            "hit": round(self.gpu_tokens / max(1, self.gpu_tokens + self.cpu_tokens), 4),
            "cpu_bytes_per_step": round(self.cpu_bytes / steps),
            "gpu_bytes_per_step": round(self.gpu_bytes / steps),
            "hint_hit": round(self.hint_hits / max(1, self.hinted), 4),
            "ahead_bytes_per_step": round(self.hint_bytes / steps),
        }
