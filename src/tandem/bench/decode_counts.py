"""Totals of a decoding benchmark's steps: experts, tokens, bytes and seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

from tandem.experts.handoff import Handoff
from tandem.experts.usage.expert_usage import ExpertUsage


class StepCounts(NamedTuple):
    """posts: layers handed to the CPU; cpu_experts: that it used, each once per post. Tokens are routed ones, bytes
    those of routed experts, each once per step. hinted to hint_bytes: `PrefetchCounts`. Seconds: `HandoffTimes`."""

    posts: int = 0
    cpu_experts: int = 0
    gpu_tokens: int = 0
    cpu_tokens: int = 0
    gpu_bytes: int = 0
    cpu_bytes: int = 0
    hinted: int = 0
    hint_hits: int = 0
    hint_bytes: int = 0
    wait_seconds: float = 0.0
    serve_seconds: float = 0.0

    @classmethod
    def now(cls, handoff: Handoff, usage: ExpertUsage | None) -> StepCounts:
        """Since the start; without `usage` no tokens and bytes are known."""
        sides = [0, 0, 0, 0]
        if usage is not None:
            usage.read()
            sides = [int(total.sum()) for total in usage.sides()]
        times = handoff.times()
        return cls._make((*handoff.used(), *sides, *handoff.hints(), times.wait_seconds, times.serve_seconds))

    def since(self, before: StepCounts) -> StepCounts:
        return StepCounts._make(end - start for end, start in zip(self, before, strict=True))

    def plus(self, other: StepCounts) -> StepCounts:
        return StepCounts._make(a + b for a, b in zip(self, other, strict=True))

    def cpu_experts_per_step(self, layers: int) -> float:
        return self.cpu_experts / self.posts * layers if self.posts else 0.0

    def columns(self, steps: int) -> dict[str, Any]:
        """hit: share of the routed tokens whose expert is on the GPU. wait_us, cpu_us: of a layer, until the CPU was
        asked and until it answered. hint_hit: of the experts in CPU memory that were foreseen, those that were used;
        ahead: their bytes that were fetched before they were computed."""
        return {
            "hit": round(self.gpu_tokens / max(1, self.gpu_tokens + self.cpu_tokens), 4),
            "cpu_bytes_per_step": round(self.cpu_bytes / steps),
            "gpu_bytes_per_step": round(self.gpu_bytes / steps),
            "wait_us": round(self.wait_seconds / max(1, self.posts) * 1e6, 1),
            "cpu_us": round(self.serve_seconds / max(1, self.posts) * 1e6, 1),
            "hint_hit": round(self.hint_hits / max(1, self.hinted), 4),
            "ahead_bytes_per_step": round(self.hint_bytes / steps),
        }
