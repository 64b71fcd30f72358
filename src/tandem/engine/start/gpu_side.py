"""`gpu_side`: the parts of an engine that a GPU adds. Imported only where one is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from tandem.config import ModelConfig, Plan
from tandem.config.layers import Latent
from tandem.engine.expert_statistics import expert_placement
from tandem.engine.start.gpu_device import planned_device
from tandem.experts.handoff import Handoff, HandoffSizes
from tandem.experts.hybrid_store import HybridStore
from tandem.experts.live.copies import CudaCopies, hold_all
from tandem.experts.live.cost import READS_PER_EXCHANGE
from tandem.experts.live.exchange import LiveExchange
from tandem.experts.live.live_experts import LiveExperts, Usage
from tandem.experts.live.policy import LivePolicy, PolicySettings
from tandem.experts.placement import ExpertPlacement
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu.attention_backends import attention_of
from tandem.kernels.gpu.attention_flashinfer import AttentionShape
from tandem.kernels.gpu.ops import GpuOps
from tandem.models import Progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuSide:
    """The operations, where experts live, and the way between the two sides."""

    ops: GpuOps
    store: HybridStore
    handoff: Handoff
    placement: ExpertPlacement

    def another_store(self, sizes: HandoffSizes, hidden: int) -> HybridStore:
        """The same placement with a hand-off of its own, so that nothing of it stays when its layers are let go."""
        handoff = Handoff(sizes, self.ops.device, self.handoff.patience_seconds)
        return HybridStore(self.ops, self.placement, handoff, hidden)


def gpu_side(plan: Plan, model: ModelConfig, cpu: CpuOps) -> GpuSide:
    """Raises ConfigError when PyTorch cannot use the GPU, or the placement's statistics do not fit the model."""
    assert plan.gpu is not None
    device = planned_device(plan.gpu)
    placement = expert_placement(plan.gpu, model)
    ops = GpuOps(device, cpu, attention_of(plan.gpu.attention, attention_shape(plan, model), device))
    sizes, patience = handoff_sizes(plan, model), plan.gpu.patience_seconds
    handoff = Handoff(sizes, device, patience, plan.gpu.foresight)
    store = HybridStore(ops, placement, handoff, model.hidden, plan.gpu.live)
    return GpuSide(ops, store, handoff, placement)


def attention_shape(plan: Plan, model: ModelConfig) -> AttentionShape:
    """Of the first layer; a backend that needs one for all layers is refused where they differ."""
    first, pages = model.attentions[0], -(-plan.context_length // plan.page_size)
    if isinstance(first, Latent):
        return AttentionShape(first.heads, 1, first.cached_dim, first.scale, 0, plan.page_size, pages)
    return AttentionShape(
        first.heads, first.kv_heads, first.head_dim, first.scale, first.window, plan.page_size, pages
    )


def live_experts(
    plan: Plan, side: GpuSide, usage: Usage[Any] | None, progress: Progress | None = None
) -> LiveExperts | None:
    """After the model was built; None where experts stay where they are."""
    tables = side.store.tables
    if plan.gpu is None or not plan.gpu.live or usage is None or tables is None:
        return None
    layers = [experts.sides for _, experts in sorted(side.store.layers.items())]
    if not any(layers):
        _log.warning("experts stay where they are: every layer has all of them on one side")
        return None
    settings, copies = PolicySettings(), CudaCopies(side.ops.device)
    slot_of = torch.stack([side.placement.slots(layer) for layer in range(len(layers))])
    largest = max(layer.gpu.bytes_per_expert for layer in layers if layer)
    policy = LivePolicy(slot_of, largest, READS_PER_EXCHANGE, settings)
    usage.copy = copies.in_order
    hold_all([layer.cpu for layer in layers if layer], copies, progress)
    at_once = settings.bytes_per_step * settings.interval_steps
    exchange = LiveExchange(layers, tables, copies, at_once, meanwhile=side.handoff.meanwhile)
    return LiveExperts(policy, exchange, usage, side.handoff.seconds_per_expert)


def handoff_sizes(plan: Plan, model: ModelConfig) -> HandoffSizes:
    assert plan.gpu is not None
    fused = model.moe.fusible_shared if plan.fuse_shared_experts else 0
    largest = max(plan.gpu.graph_sizes, default=1)
    return HandoffSizes(largest, plan.max_step_tokens, model.hidden, model.moe.router.top_k + fused)
