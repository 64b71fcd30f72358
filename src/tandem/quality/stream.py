"""`LayerStream`: a model run over all windows one layer at a time, so that only one layer is ever packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem import _core
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.engine.state.arrays import allocate
from tandem.engine.step.batch import moved
from tandem.engine.step.host_batch import SequenceRows, host_batch
from tandem.errors import ConfigError
from tandem.experts import RoutedExperts
from tandem.experts.deferral import Deferral, DeferredExperts, DeferredSum, who_defers
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertBiases, Linear, Ops
from tandem.kernels.selected_keys import SelectedKeys
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import planned_pool
from tandem.machine.machine import Machine
from tandem.models import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.model import embedding_of, final_norm_of, head_of, names_of
from tandem.models.names import expert_biases
from tandem.models.passing import Arrays, ForwardState
from tandem.models.residual import Residual, add_pending, end_of, widened
from tandem.planner.choices.cached import cached_as
from tandem.planner.choices.deferral import NEVER_DEFERRED
from tandem.planner.memory import gib
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.quality.text import Windows
from tandem.spec.activation import SILU, Activation
from tandem.spec.model_config import ModelConfig
from tandem.spec.state import DTYPE_BYTES, State, state_layout
from tandem.spec.stored import StoredFormats

if TYPE_CHECKING:
    from tandem.engine.start.gpu_side import GpuSide

WORKSPACE_BYTES = 2 << 30  # of the GPU, beside what a layer takes
ENOUGH = 1 << 62  # bytes: one layer is checked instead of the whole model

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """A model and how it is held and computed; None and "auto": as `kt serve` would choose."""

    directory: Path
    method: str | None = None  # --kt-method
    dtype: str = "auto"
    tier: str = "auto"
    threads: int | None = None
    int8_activations: bool = False
    gpu_share: float | None = None  # of the routed experts, on a GPU beside everything else; None: no GPU
    deferred: int = 0  # of a token's experts in CPU memory, at most so many are added one layer later
    cached: str = "auto"  # --kv-cache-dtype
    disable_shared_experts_fusion: bool = False

    def model(self) -> ModelConfig:
        engine_config = EngineConfig(model=str(self.directory), kv_cache_dtype=self.cached)
        return cached_as(engine_config, load_model_config(self.directory))

    def plan(self, model: ModelConfig, machine: Machine, window: int, stored: StoredFormats) -> Plan:
        """As the server's, but memory holds a layer and a window, not the model and its KV cache."""
        if window > model.max_positions:
            raise ConfigError(
                f"windows of {window} tokens are too long: the model goes to {model.max_positions}; "
                "give a smaller --window"
            )
        if self.deferred and model.moe.experts.latent:
            raise ConfigError(f"--late {self.deferred}: {NEVER_DEFERRED}, so none is ever deferred; leave it out")
        config = EngineConfig(
            model=str(self.directory),
            kt_method=self.method,
            dtype=self.dtype,
            kernel_tier=self.tier,
            kt_cpuinfer=self.threads,
            kt_int8_activations=self.int8_activations,
            context_length=window,
            max_total_tokens=window,
            max_running_requests=1,
            chunked_prefill_size=-1,
            device="cpu" if self.gpu_share is None else "auto",
            kt_gpu_experts_ratio=self.gpu_share,
            disable_cuda_graph=self.gpu_share is not None,
            disable_dynamic_expert_update=self.gpu_share is not None,  # it measures one placement
            kv_cache_dtype=self.cached,
            disable_shared_experts_fusion=self.disable_shared_experts_fusion,
        )
        gpus = tuple(replace(gpu, free_bytes=ENOUGH) for gpu in machine.gpus)
        plan = resolve(config, model, replace(machine, available_memory=ENOUGH, gpus=gpus), stored)
        if self.gpu_share is not None and plan.gpu is None:
            why = next(each.reason for each in plan.decisions if each.name == "device")
            raise ConfigError(
                f"--kt-gpu-experts-ratio {self.gpu_share:g} needs a GPU, but {why}; leave it out"
            )
        _check_layer_fits(model, plan, machine, stored)
        _check_gpu_fits(model, plan, machine, stored)
        return plan


def _check_layer_fits(model: ModelConfig, plan: Plan, machine: Machine, stored: StoredFormats) -> None:
    layers = max(1, len(model.moe_layers))
    whole = model.weight_bytes(plan.dtype, plan.expert_format, stored)
    layer = whole // layers
    if layer > machine.available_memory:
        raise ConfigError(
            f"one layer with {plan.expert_format} experts takes {gib(layer)}, and {gib(machine.available_memory)} "
            "are free: measure a smaller --format, or free some memory"
        )


def _check_gpu_fits(model: ModelConfig, plan: Plan, machine: Machine, stored: StoredFormats) -> None:
    """Raises ConfigError if the GPU is too small for the largest part at a time: a layer with its experts, the
    embedding, or the head."""
    if plan.gpu is None:
        return
    gpu = next(each for each in machine.gpus if plan.gpu.uuid in ("", each.uuid))
    gpu_experts = -(-plan.gpu.sizes.experts // max(1, len(model.moe_layers)))
    experts = gpu_experts * model.expert_bytes(plan.expert_format, stored.experts)
    layer = model.dense_bytes(plan.dtype, stored, for_gpu=True) // len(model.layers) + experts
    table = model.vocab * model.hidden * DTYPE_BYTES[plan.dtype]
    needed = max(layer, table) + WORKSPACE_BYTES
    if needed > gpu.free_bytes:
        raise ConfigError(
            f"{gpu.name} is too small: {gib(gpu.free_bytes)} are free, and measuring takes {gib(needed)}, of them "
            f"{gib(experts)} for {gpu_experts} experts of a layer and {gib(WORKSPACE_BYTES)} of workspace; give a "
            "smaller --kt-gpu-experts-ratio, or leave it out"
        )


class LayerStream:
    """Gives the same bits as `models.Model` does: the same operations on the same rows in the same order.

    `hidden` is the residual stream of every row, [rows, hidden] in the plan's dtype, in CPU memory, or
    [rows, n, hidden] where there are n; `advance` moves it one layer on. `owed` [rows, hidden]: the sums of experts
    that are deferred; None where none ever are.
    """

    def __init__(self, variant: Variant, windows: Windows, pool: _core.WorkerPool | None = None) -> None:
        self.variant, self.windows = variant, windows
        self.config, checkpoint = variant.model(), open_checkpoint(variant.directory)
        longest = max(map(len, windows.ids))
        self.plan = variant.plan(self.config, this_machine(), longest, checkpoint.formats())
        self.pool = pool or planned_pool(self.plan)
        cpu = CpuOps(self.pool, self.plan.tier, self.plan.int8_activations)
        self._gpu = self._gpu_side(cpu)
        self.ops: Ops = cpu if self._gpu is None else self._gpu.ops
        self.device = torch.device("cpu") if self._gpu is None else self._gpu.ops.device
        store = None if self._gpu is None else _OneLayer(self._gpu, self.plan, self.config)
        self._builder = Builder(self.config, self.plan, checkpoint, self.ops, store=store)
        self._states = self._new_states(longest)
        self._batches = [self._batch(window) for window in windows.ids]
        self._links: list[dict[int, SelectedKeys | None]] = [{} for _ in self._batches]
        self._due = DeferredSum()
        self.hidden = self._embedded()
        self.owed = self.hidden.new_zeros(len(self.hidden), self.config.hidden) if variant.deferred else None

    def layer(self, index: int) -> DecoderLayer:
        """Reads and packs layer `index`; it lives as long as it is referenced."""
        decoder = decoder_layer(self._builder, index, names_of(self._builder))
        self._builder.layer_done(index)
        if decoder.moe is not None and self.variant.deferred:
            decoder.moe.experts = DeferredExperts(decoder.moe.experts, self._deferral(index), self._due)
        return decoder

    def _deferral(self, index: int) -> Deferral | None:
        layers, top_k = self.config.moe_layers, self.config.moe.router.top_k
        on_cpu = [True] * len(layers)
        if self._gpu is not None:
            on_cpu = [not bool(layer.all()) for layer in self._gpu.placement.gpu_experts]
        if not who_defers(on_cpu)[layers.index(index)]:
            return None
        return Deferral(max(0, top_k - self.variant.deferred), top_k)

    def biases(self, index: int) -> ExpertBiases | None:
        """Biases of the experts of layer `index`; None where they have none."""
        shape, b = self.config.moe.experts, self._builder
        if not shape.biases:
            return None
        sizes = shape.count, self.config.hidden, self.config.shard.share(shape.width)
        return expert_biases(names_of(b).experts, b.checkpoint, f"model.layers.{index}.", sizes)

    def advance(
        self, layer: DecoderLayer, hidden: Tensor, tick: Tick = lambda: None, owed: Tensor | None = None
    ) -> None:
        """`hidden` [rows, hidden] becomes what it is after `layer`, in place; `tick` is called after every window.
        owed: likewise what is deferred; None: nothing was before this layer, and what is after it nobody gets."""
        with torch.inference_mode():
            for span, batch, links in zip(self.windows.spans, self._batches, self._links, strict=True):
                p = ForwardState(batch, hidden[span].to(self.device), links=links)
                self._due.sum = None if owed is None else owed[span].to(self.device)
                self._advance(layer, p)
                hidden[span] = p.residual.cpu()
                if owed is not None:
                    owed[span] = 0 if self._due.sum is None else self._due.sum.cpu()
                tick()

    def head(self) -> Linear:
        return head_of(self._builder)

    def final_norm(self) -> tuple[Residual, Tensor]:
        """How the stream ends, and the weight of the norm behind it."""
        return end_of(self._builder, names_of(self._builder)), final_norm_of(self._builder)

    def _advance(self, layer: DecoderLayer, p: ForwardState) -> None:
        if self._gpu is not None:
            self._gpu.ops.begin_step(p.batch, False)
        for block in layer.blocks:
            states = [self._states[each] for each in block.states]
            p.pending = block.leave(block.operator(block.enter(p), p, states))
        add_pending(p)

    def _embedded(self) -> Tensor:
        largest = int(self.windows.tokens.max())
        if largest >= self.config.vocab:
            raise ConfigError(
                f"{self.variant.directory} has {self.config.vocab} tokens, but the text has token {largest}: "
                "its tokenizer is another model's"
            )
        rows = embedding_of(self._builder)(self.windows.tokens.to(self.device))
        rows = rows.to("cpu", getattr(torch, self.plan.dtype))
        return widened(rows, self.config.layers[0].hyper)

    def _new_states(self, tokens: int) -> dict[State, Arrays]:
        """One window of each kind of state: nothing is read that was not written just before."""
        kinds = dict.fromkeys(self.config.states)
        layout = state_layout(kinds, self.plan.dtype, self.plan.page_size)
        arrays = allocate(layout, self._pages_of(tokens), None if self._gpu is None else self.device, slots=2)
        return dict(zip(kinds, arrays.arrays, strict=True))

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.plan.page_size)

    def _batch(self, window: tuple[int, ...]) -> ForwardBatch:
        pages = np.arange(self._pages_of(max(map(len, self.windows.ids))), dtype=np.int32)
        rows = SequenceRows(window, first=0, table=pages, slot=1, logits=len(window))
        return moved(host_batch([rows], self.plan.page_size), self.device)

    def _gpu_side(self, cpu: CpuOps) -> GpuSide | None:
        if self.plan.gpu is None:
            return None
        if self.config.tables:  # their rows are found from token ids, which a stream of layers does not keep
            raise ConfigError(f"{self.variant.directory} has n-gram tables: leave out the flags of a GPU")
        from tandem.engine.start.gpu_side import gpu_side  # Triton is there only where a GPU is

        return gpu_side(self.plan, self.config, cpu)


class _OneLayer:
    """An `ExpertStore` that keeps no layer: the stream holds one at a time."""

    def __init__(self, gpu: GpuSide, plan: Plan, config: ModelConfig) -> None:
        self._gpu, self._plan, self._config = gpu, plan, config

    def layer(self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU) -> RoutedExperts:
        from tandem.engine.start.gpu_side import handoff_sizes

        sizes = handoff_sizes(self._plan, self._config)
        return self._gpu.another_store(sizes, self._config.expert_channels).layer(
            index, count, width, fmt, activation
        )
