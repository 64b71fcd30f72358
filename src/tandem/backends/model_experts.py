"""`ModelExperts`: a model's routed experts for an engine that computes all else; `LayerExperts`: one layer of them.

Weights are read from the model's own files, in any format that Tandem reads; the engine's tensors are never looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tandem.backends.host import CPU, Host
from tandem.backends.made_up import MadeUpExperts
from tandem.backends.own_experts import OwnExperts
from tandem.backends.planning import (
    beginning_at,
    check_model,
    experts_plan,
    share_of,
    threads_text,
    with_spare_core,
)
from tandem.checkpoint import Checkpoint, load_model_config, open_checkpoint, with_experts
from tandem.engine.start.loader import for_loading, model_directory
from tandem.engine.start.packed_start import packed_cache
from tandem.errors import CacheDamaged, ConfigError
from tandem.experts import ExpertStore, RoutedExperts
from tandem.experts.hybrid_experts import HybridExperts
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing
from tandem.kernels.this_machine import these_cpus
from tandem.kernels.workers import planned_pool
from tandem.mechanisms.experts.block import routed_experts
from tandem.mechanisms.experts.cost import cut_experts
from tandem.mechanisms.experts.shape import Moe
from tandem.models.builder import Builder
from tandem.models.model import names_of
from tandem.planner.choices.left_to_ram import asked_experts
from tandem.planner.in_place import stored_in
from tandem.planner.ranks.ranked import expert_unit
from tandem.spec.model_config import ModelConfig


class ModelExperts:
    """Opened once in a process. `layer` reads; `finish` follows the last of them."""

    def __init__(self, config: EngineConfig, host: Host) -> None:
        """Raises ConfigError for wishes that cannot be met, CheckpointError for files that cannot be read."""
        directory = model_directory(config.model)
        whole = load_model_config(directory)
        check_model(whole)
        checkpoint = _checkpoint(directory, config, host, whole)
        stored = stored_in(checkpoint.formats(), *checkpoint.expert_files())
        machine = these_cpus(host.cpus)
        own, machine = share_of(config, machine, host)
        self.config = cut_experts(whole, host.shard, expert_unit(config, stored))
        self.host, self.gpu_experts = host, asked_experts(config, whole)[0] or 0
        if self.gpu_experts and host.device.type != "cuda":
            raise ConfigError("kt_gpu_experts_ratio and kt_num_gpu_experts need a GPU, which this engine has not")
        on_cpu = whole.routed_experts - self.gpu_experts - host.skipped * len(whole.moe_layers)
        threads = with_spare_core(own, machine, host)
        self.leaves_core = threads is not own
        plan = experts_plan(threads, self.config, machine, stored, on_cpu)
        self.plan = replace(plan, cpus=beginning_at(plan, _only_cpu()))
        self.ops = CpuOps(planned_pool(self.plan), self.plan.tier, self.plan.int8_activations)
        self._cache = packed_cache(config, self.plan, self.config, checkpoint, self.ops)
        if self._cache is not None:
            self._cache.begin()
            with suppress(CacheDamaged):  # which the cache has said; it has nothing any more
                self._cache.confirm(lambda _done, _total: None)
        self._waiting = set(self.config.moe_layers if host.loads is None else host.loads)
        store = self._store(config)
        self._builder = Builder(self.config, self.plan, checkpoint, self.ops, None, store, self._cache)
        self._names = names_of(self._builder)

    def layer(self, number: int) -> LayerExperts:
        """The experts of decoder layer `number`, read now. Raises CheckpointError, and ConfigError for a layer without
        any."""
        shape = self._moe(number)
        with _plain_torch(), for_loading():
            experts = routed_experts(self._builder, number, shape, self._names)
            self._builder.layer_done(number)
            self._waiting.discard(number)
            if not self._waiting:
                self._builder.all_done()
        return LayerExperts(experts, shape, self.config, self.host.graph_rows)

    def _moe(self, number: int) -> Moe:
        shape = self.config.layers[number].moe if number < len(self.config.layers) else None
        if shape is None:
            raise ConfigError(
                f"layer {number} of {self.config.model_type} has no experts that can be asked for; those with some: "
                f"{', '.join(map(str, self.config.moe_layers))} (draft layers are not among them)"
            )
        return shape

    def _store(self, config: EngineConfig) -> ExpertStore | None:
        """None: all of them in CPU memory, and so are batches."""
        if self.host.device.type == CPU.type:
            return OwnExperts(self.ops, self.config.expert_channels, self.host.skipped) if self.host.skipped else None
        from tandem.backends.gpu_side import gpu_store  # Triton is there only where a GPU is

        return gpu_store(config, self.config, self.host, self.ops, self.gpu_experts)

    def text(self) -> str:
        """One line for the engine's log."""
        where = f", {self.gpu_experts} experts on {self.host.device}" if self.gpu_experts else ""
        ranks = f", part {self.host.shard.rank + 1} of {self.host.shard.ranks}" if self.host.shard.ranks > 1 else ""
        kind = f"{self.plan.expert_format} experts, {self.plan.tier} kernels"
        return f"{kind}, {threads_text(self.plan.cpus)}{where}{ranks}"


class LayerExperts:
    """A layer's experts: `submit` a batch, do something else, `wait` for its sum. One batch at a time in a process."""

    def __init__(self, experts: RoutedExperts, shape: Moe, config: ModelConfig, graph_rows: int) -> None:
        self.experts, self.count, self.hidden = experts, shape.experts.count, shape.experts.channels(config.hidden)
        self._gpu = experts.gpu if isinstance(experts, HybridExperts) else None
        self._graph_rows = graph_rows

    def submit(self, x: Tensor, ids: Tensor, weights: Tensor, skip_mask: Tensor | None = None) -> Any:
        """x [T, hidden], bfloat16 or float32. ids and weights [T, k], of any integers and floats; pairs whose id is
        negative add nothing. skip_mask bool [experts]: nor do theirs. All on the host's device."""
        ids, weights = ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()
        if skip_mask is not None:
            ids = torch.where(skip_mask[ids.clamp(min=0).long()], -1, ids)
        if self._gpu is not None:  # kernels are the same before a capture and in it: there they cannot be compiled
            self._gpu.step.captured = len(x) <= self._graph_rows
        return self.experts.submit(x.contiguous(), self._routing(ids, weights))

    def _routing(self, ids: Tensor, weights: Tensor) -> Routing:
        """Beside a GPU a pair of no expert stands for one there, with weight 0: nobody posts it."""
        slot_of = self.experts.slot_of
        if slot_of is None:
            return Routing(ids, weights)
        expert_ids, no_expert = ids.clamp(min=0), ids < 0
        slots = slot_of[expert_ids.long()].masked_fill(no_expert, 0)
        return Routing(expert_ids, weights.masked_fill(no_expert, 0.0), slots)

    def wait(self, ticket: Any) -> Tensor:
        """sum over k of weight * expert(x), [T, hidden] in x's dtype; of this rank's width."""
        return self.experts.wait(ticket)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.wait(self.submit(x, ids, weights))


def _checkpoint(directory: Path, config: EngineConfig, host: Host, model: ModelConfig) -> Checkpoint:
    if host.made_up:
        return cast(Checkpoint, MadeUpExperts(directory))
    return with_experts(open_checkpoint(directory), config.kt_weight_path, model)


def _only_cpu() -> int:
    """The CPU that the calling thread is bound to; -1: it may have several."""
    cpus = os.sched_getaffinity(0)
    return next(iter(cpus)) if len(cpus) == 1 else -1


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Engines load under defaults of their own: another dtype, and a device that new tensors lie on."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)
