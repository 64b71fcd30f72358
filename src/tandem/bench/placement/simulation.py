"""A stream of tokens, one per step, against a placement: what it hits and, by the cost model, how fast it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.bench.placement.traces import expert_counts
from tandem.experts.live.cost import StepCost
from tandem.experts.live.policy import LivePolicy, PolicySettings
from tandem.experts.live.virtual import Exchange
from tandem.experts.placement import ExpertPlacement
from tandem.experts.residency import Location, Residency


@dataclass(frozen=True, slots=True)
class Simulated:
    """hit: share of routed tokens that the GPU served; exchanges in all; rests: how often all went home."""

    hit: float
    tok_s: float
    exchanges: int = 0
    rests: int = 0


def simulate_static(trace: Tensor, placement: ExpertPlacement, cost: StepCost) -> Simulated:
    """trace int16 [tokens, layers, k]."""
    return _result(_hits(trace, placement.gpu_experts), torch.zeros(len(trace)), trace, cost)


def simulate_live(
    trace: Tensor, placement: ExpertPlacement, cost: StepCost, settings: PolicySettings
) -> Simulated:
    """As the engine does: every `interval_steps` the policy sees what was used and says what moves; it is there at the
    next decision, which may be sooner than here."""
    layers, experts = placement.gpu_experts.shape
    slot_of = torch.stack([placement.slots(layer) for layer in range(layers)])
    policy = LivePolicy(Residency(slot_of), cost.expert_bytes, cost.reads_per_exchange, settings)
    hits, moved, reads = [], torch.zeros(len(trace)), torch.zeros(layers, experts, dtype=torch.int64)
    under_way: list[Exchange] = []
    first = 0
    while first < len(trace):
        part = trace[first : first + policy.interval_steps]
        hits.append(_hits(part, torch.from_numpy(policy.residency.on(Location.GPU))))
        reads = reads + expert_counts(part, experts)
        policy.observe(reads.numpy(), len(part))
        if under_way:
            policy.done(*under_way)
        under_way = policy.next_exchanges()
        moved[first] += len(under_way)
        first += len(part)
    result = _result(torch.cat(hits), moved, trace, cost)
    return Simulated(result.hit, result.tok_s, int(moved.sum()), policy.rests)


def _hits(trace: Tensor, gpu_experts: Tensor) -> Tensor:
    """Experts of every token that are on the GPU, all layers together, float32 [tokens]."""
    layers = torch.arange(trace.shape[1])[None, :, None]
    return gpu_experts[layers, trace.long()].sum((1, 2)).float()


def _result(hits: Tensor, moved: Tensor, trace: Tensor, cost: StepCost) -> Simulated:
    uses = trace[0].numel()
    seconds = cost.seconds(uses - hits, hits, moved)
    return Simulated(float(hits.mean()) / uses, len(trace) / float(seconds.double().sum()))
