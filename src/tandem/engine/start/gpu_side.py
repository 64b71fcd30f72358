"""`gpu_side`: the parts of an engine that a GPU adds. Imported only where one is used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem.engine.expert_statistics import expert_placement
from tandem.engine.start.gpu_device import planned_device
from tandem.errors import ConfigError, EngineError
from tandem.experts.deferral import who_defers
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.experts.hybrid_store import HybridStore
from tandem.experts.live.copies import CudaCopies, hold_all
from tandem.experts.live.cost import READS_PER_EXCHANGE
from tandem.experts.live.exchange import LiveExchange
from tandem.experts.live.live_experts import LiveExperts, UsageCounter
from tandem.experts.live.policy import LivePolicy, PolicySettings
from tandem.experts.placement import ExpertPlacement
from tandem.experts.residency import Residency
from tandem.experts.streaming.copy_stream import CudaCopyStream
from tandem.experts.streaming.measured import measured_rates
from tandem.experts.streaming.stream import (
    Cuts,
    ExpertStream,
    Layers,
    StreamedLayer,
    StreamReadings,
    streamed_layer,
)
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.gpu.attention_backends import attention_of
from tandem.kernels.gpu.attention_flashinfer import AttentionShape
from tandem.kernels.gpu.ops import GpuOps
from tandem.mechanisms.cost import cost_of
from tandem.models import ForwardBatch, Progress
from tandem.planner.plan import Plan
from tandem.spec.gpu_scratch import ring_of
from tandem.spec.model_config import ModelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuSide:
    """The operations, where experts live, and the way between the two sides."""

    ops: GpuOps
    store: HybridStore
    handoff: Handoff
    placement: ExpertPlacement

    @property
    def hybrids(self) -> list[HybridExperts]:
        """Experts of every MoE layer but a draft layer's, in order; once the model was built."""
        return [experts for index, experts in sorted(self.store.layers.items()) if index < self.placement.layers]

    def another_store(self, sizes: HandoffSizes, hidden: int) -> HybridStore:
        """The same placement with a hand-off of its own, so that nothing of it stays when its layers are let go."""
        handoff = Handoff(sizes, self.ops.device, self.handoff.patience_seconds)
        return HybridStore(self.ops, self.placement, handoff, hidden)


def gpu_side(plan: Plan, model: ModelConfig, cpu: CpuOps) -> GpuSide:
    """Raises ConfigError when PyTorch cannot use the GPU, or the placement's statistics do not fit the model."""
    assert plan.gpu is not None
    if plan.gpu.stages:
        why = "this measures one GPU; leave --pipeline-parallel-size out"
        raise ConfigError(why, fields=("pipeline_parallel_size",))
    device = planned_device(plan.gpu)
    placement = expert_placement(plan.gpu, model)
    attention = attention_of(plan.gpu.attention, attention_shape(plan, model), device)
    ops = GpuOps(device, cpu, attention, plan.deterministic)
    sizes, patience = handoff_sizes(plan, model), plan.gpu.patience_seconds
    handoff = Handoff(sizes, device, patience, plan.gpu.foresight)
    own_memory = plan.gpu.streams_experts
    store = HybridStore(ops, placement, handoff, model.expert_channels, plan.gpu.live, own_memory=own_memory)
    return GpuSide(ops, store, handoff, placement)


def order_posts(plan: Plan, side: GpuSide) -> None:
    """Says which layer's post is a step's last, and which layers defer experts to the next one. Called after the model
    was built, before a graph is recorded."""
    layers = side.hybrids
    if on_cpu := [experts for experts in layers if experts.cpu is not None]:
        on_cpu[-1].end_step()
    if plan.gpu is None or not plan.gpu.deferred:
        return
    for experts, defers in zip(layers, who_defers([each.cpu is not None for each in layers]), strict=True):
        if defers:
            experts.defer(plan.gpu.deferred)


def attention_shape(plan: Plan, model: ModelConfig) -> AttentionShape | None:
    """Attention shape of the first layer; a backend that needs one for all layers is refused where they differ. None:
    modules that are not ours attend, by kernels that need none."""
    if not model.attentions:
        return None
    first, pages = model.attentions[0], -(-plan.context_length // plan.page_size)
    keys = cost_of(first).keys
    assert keys is not None, "attention has keys"
    return AttentionShape(keys.heads, keys.kv_heads, keys.dim, keys.scale, keys.window, plan.page_size, pages)


def registered(plan: Plan, side: GpuSide, progress: Progress | None = None) -> CudaCopies | None:
    """After the model was built: experts in CPU memory, such that DMA reads them, if any move or are streamed. None
    where the system refuses that, where they lie in a file, or where nobody wants it."""
    layers = [experts.cpu for experts in side.hybrids if experts.cpu is not None]
    if plan.gpu is None or not layers or not (plan.gpu.live or plan.gpu.streams_experts):
        return None
    if any(layer.own_memory()[1] == 0 for layer in layers):
        _log.warning("experts are not streamed to the GPU for long prompts: they lie in a mapped file")
        return None
    try:
        copies = CudaCopies(side.ops.device)
    except EngineError as error:  # a package is missing, which nothing else needs
        _log.warning("experts are not streamed to the GPU: %s", error)
        return None
    return copies if hold_all(layers, copies, progress) else None


def live_experts(
    plan: Plan, side: GpuSide, usage: UsageCounter[Any] | None, copies: CudaCopies | None = None
) -> LiveExperts | None:
    """After the model was built; None where experts stay where they are. copies: as `registered` made them."""
    tables = side.store.tables
    if plan.gpu is None or not plan.gpu.live or usage is None or tables is None:
        return None
    layers = [experts.sides for experts in side.hybrids]
    if not any(layers):
        _log.warning("experts stay where they are: every layer has all of them on one side")
        return None
    try:
        copies = copies or CudaCopies(side.ops.device)
    except EngineError as error:  # a package is missing, which nothing else needs
        _log.warning("experts stay where they are: %s", error)
        return None
    settings = PolicySettings()
    slot_of = torch.stack([side.placement.slots(layer) for layer in range(len(layers))])
    largest = max(layer.gpu.bytes_per_expert for layer in layers if layer)
    policy = LivePolicy(Residency(slot_of), largest, READS_PER_EXCHANGE, settings)
    usage.copy = copies.in_order
    at_once = settings.bytes_per_step * settings.interval_steps
    buffers = plan.gpu.sizes.exchange_bytes // largest or None
    exchange = LiveExchange(layers, tables, copies, at_once, buffers, side.handoff.between_answers)
    return LiveExperts(policy, exchange, usage, side.handoff.seconds_per_expert)


def expert_stream(
    plan: Plan,
    side: GpuSide,
    copies: CudaCopies | None,
    live: LiveExperts | None = None,
    usage: ExpertUsage | None = None,
) -> ExpertStream | None:
    """After the model was built; None where no expert is streamed. copies: as `registered` made them, kept by the
    stream. live: what moves experts meanwhile; usage: counts the rows of each expert."""
    if plan.gpu is None or not plan.gpu.streams_experts or copies is None:
        return None
    layers = [streamed_layer(experts.cpu, experts.gpu, side.ops) for experts in side.hybrids]
    followed = StreamReadings(served=lambda: side.handoff.times().serve_seconds)
    if live is not None:
        followed = followed._replace(moves=live.moves)
    if usage is not None:
        followed = followed._replace(ask=usage.ask)
    stream = stream_of(plan, side.ops.device, layers, copies, side.handoff.sizes.top_k, followed)
    if stream is not None:
        for index, experts in enumerate(side.hybrids):
            experts.stream, experts.index = stream, index
    return stream


def stream_of(
    plan: Plan,
    device: torch.device,
    layers: Sequence[StreamedLayer | None],
    copies: CudaCopies,
    top_k: int,
    followed: StreamReadings,
) -> ExpertStream | None:
    """A stream of these layers to a GPU; None where none of them can be streamed there, or it is never faster."""
    streamed = [layer for layer in layers if layer is not None]
    if plan.gpu is None or not streamed:
        return None
    bus = CudaCopyStream(device, copies)
    largest = max(layer.cpu.bytes_per_expert for layer in streamed)
    ring = ring_of(largest, min(layer.prompts.at_once for layer in streamed))
    rates = measured_rates(streamed, ring, bus, device, top_k)
    rates.least_rows = plan.gpu.stream_from
    _log.info("experts are streamed to the GPU %s", rates.text(plan.max_step_tokens))
    if not rates.least(plan.max_step_tokens):
        return None
    return ExpertStream(layers, ring, bus, rates, device, followed)


def without_stream(side: GpuSide) -> None:
    """Experts stay in CPU memory for long prompts, too."""
    for experts in side.hybrids:
        experts.stream = None


class PausableMoves(Protocol):
    """Changer of tables and slots between steps, as `LiveExperts` is."""

    def pause(self) -> None:
        """They stay as they are until `resume`."""
        ...

    def resume(self) -> None: ...


class StepStart:
    """Hook that runs before a step of the engine, and before a task that steps overtake."""

    def __init__(
        self, ops: GpuOps, stream: ExpertStream | None, without_cpu: bool, live: PausableMoves | None = None
    ) -> None:
        """without_cpu: no expert is in CPU memory; live: moves experts between steps."""
        self._ops, self._stream, self._without_cpu, self._held = ops, stream, without_cpu, False
        self._live = live

    def __call__(self, batch: ForwardBatch, captured: bool) -> None:
        """Beside a task only graphs are replayed, for which only rows of tables are prepared where tasks can be."""
        self._ops.find_rows(batch, captured)
        self.of_drafts(batch, captured)

    def of_drafts(self, batch: ForwardBatch, captured: bool) -> None:
        """As a call, for a draft layer: its rows are other tokens, and no sequence goes on from them."""
        if self._held:
            return
        self._ops.begin_step(batch, captured)
        if self._stream is not None:
            self._stream.begin(0 if captured else len(batch.input_ids), shared=batch.single_rows > 0)

    def load_kernels(self, batch: ForwardBatch, streamed: Sequence[int]) -> None:
        """As a call for a step kernel by kernel, in which the experts of these layers alone are streamed."""
        self._ops.find_rows(batch, False)
        self._ops.begin_step(batch, False)
        if self._stream is not None:
            self._stream.begin_only(len(batch.input_ids), streamed)

    def pausable(self) -> bool:
        return self._ops.pausable

    def begin_task(self, batch: ForwardBatch, split: bool = False) -> bool:
        """The ring is the task's: no graph of a step uses it. Experts stay where they are until `release`."""
        if self._live is not None:
            self._live.pause()
        self._ops.find_rows(batch, False)
        self._ops.begin_step(batch, False, overlapped=True)
        if self._stream is not None:
            self._stream.begin(len(batch.input_ids), layers=Layers.SPLIT if split else Layers.WHOLE)
        self._held = True
        return self._without_cpu or (self._stream is not None and bool(self._stream.counts))

    def end_task(self) -> None:
        self._held = False
        if self._live is not None:
            self._live.resume()

    def slot_copied(self, source: int, target: int) -> None:
        for table in self._ops.tables:
            table.copied(source, target)

    def replayable(self, split: bool = False) -> bool:
        return split or self._stream is None or self._stream.holds_layers

    def may_split(self, rows: int) -> bool:
        return self._stream is not None and self._stream.may_split(rows)

    def splits(self, rows: int) -> bool:
        return self._stream is not None and self._stream.splits(rows)

    def recording(self, cuts: Cuts) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._stream.recording(cuts)


def begin_step(side: GpuSide, stream: ExpertStream | None, live: PausableMoves | None = None) -> StepStart:
    without_cpu = all(experts.cpu is None for experts in side.hybrids)
    return StepStart(side.ops, stream, without_cpu, live)


def handoff_sizes(plan: Plan, model: ModelConfig) -> HandoffSizes:
    assert plan.gpu is not None
    fused = model.moe.fusible_shared if plan.fuse_shared_experts else 0
    largest = max(plan.gpu.graph_sizes, default=1)
    top_k, deferred = model.moe.router.top_k + fused, plan.gpu.deferred > 0
    return HandoffSizes(largest, plan.max_step_tokens, model.expert_channels, top_k, deferred)
