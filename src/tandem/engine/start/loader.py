"""`load_parts`: from what the user asked for to the parts of an engine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tandem import models
from tandem.checkpoint import (
    Checkpoint,
    demo_dir,
    load_model_config,
    open_checkpoint,
    resolve_model,
    with_draft_config,
    with_draft_layer,
    with_experts,
)
from tandem.checkpoint.demo import build_demo
from tandem.config import EngineConfig, ModelConfig, Plan, resolve
from tandem.config.choices.cached import cached_as
from tandem.config.choices.threads import plan_threads
from tandem.config.in_place import stored_in
from tandem.config.planner.resolve import machine_refusals
from tandem.config.ranks.ranked import check_alone, own_side, ranked
from tandem.config.speculation.choice import drafting
from tandem.engine.expert_statistics import expert_recorder, expert_usage
from tandem.engine.start.model_files import fetch
from tandem.engine.start.packed_start import PackedStart
from tandem.engine.start.parts import EngineParts
from tandem.engine.start.planning import plan_of, without_streams
from tandem.engine.start.sampling_defaults import sampling_defaults
from tandem.engine.text.chat_template import chat_template_text
from tandem.engine.text.tokenizer import Tokenizer
from tandem.experts import ExpertStore
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.hub.names import hub_name
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.this_machine import these_cpus
from tandem.kernels.workers import planned_pool

if TYPE_CHECKING:
    from tandem.engine.ranks.leader import Leader
    from tandem.experts.handoff import Handoff
    from tandem.experts.hybrid_store import HybridStore

TURN_SECONDS = 5e-4


@contextmanager
def for_loading() -> Iterator[None]:
    """How Python runs meanwhile.

    A checkpoint's headers are hundreds of thousands of objects, all of which stay: looking for garbage among them, as
    Python does when many are made, took as long as making them. The threads that look up tensors take short turns: all
    workers stand still while the main thread, which gives them the next tensors, waits for the interpreter.
    """
    enabled, turn = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(turn)
        if enabled:
            gc.enable()


@for_loading()
def load_parts(
    config: EngineConfig,
    progress: models.Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
    leader: Leader | None = None,
) -> EngineParts:
    """Reads and packs the model. `planned` is called before the first weight is read, `progress(what, bytes done, bytes
    in all)` after every layer. leader: of other ranks, where the model is divided; this is the first then.

    Raises ConfigError when a wish cannot be met, CheckpointError when a file is missing or broken.
    """
    use_one_torch_thread()
    if leader is None:
        check_alone(config)
    directory, machine = model_directory(config.model), these_cpus()
    sampling_defaults(config, directory)  # what is wrong with them is said before anything is loaded
    if machine_refusals(config, machine):
        plan_of(config)  # raises them, with all else that stands in the way
    workers = planned_pool(plan_threads(*own_side(config, machine)))
    with (
        PackedStart(config, directory, workers, progress) as packed,
        ThreadPoolExecutor(1, "tandem-gpus") as asking,
    ):
        whole = asking.submit(lambda: machine if config.device == "cpu" else machine.with_gpus())
        model_config = with_draft_config(load_model_config(directory), config)
        checkpoint = with_experts(open_checkpoint(directory), config.kt_weight_path, model_config)
        checkpoint = with_draft_layer(checkpoint, config)
        model_config = models.with_stored_drafts(model_config, checkpoint, config.speculative_algorithm)
        model_config = cached_as(config, drafting(config, model_config))
        stored = stored_in(checkpoint.formats(), *checkpoint.expert_files())
        plan = resolve(config, model_config, whole.result(), stored)
        model_config = ranked(config, model_config, machine, stored)[1]
        if planned is not None:
            planned(plan)
        ops = CpuOps(
            workers, plan.tier, plan.int8_activations, plan.experts_in_place, plan.deterministic
        )
        if leader is not None:
            ops.group = leader.start(config, plan)
        packed.open(plan, model_config, checkpoint, ops)
        if packed.cache is None or not packed.cache.mapped:
            models.check_headers(model_config, plan, checkpoint)
        tokenizer = Tokenizer.load(directory)
        if config.chat_template is not None:
            tokenizer.use_chat_template(chat_template_text(config.chat_template))
        start = Start(config, plan, model_config, checkpoint, tokenizer, ops, packed, progress)
        parts = start.on_cpu() if plan.gpu is None else start.on_gpu()
        if leader is not None:
            leader.loaded()
        return replace(parts, leader=leader)


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that is known when the first weight is read."""

    config: EngineConfig
    plan: Plan
    model_config: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    ops: CpuOps
    packed: PackedStart
    progress: models.Progress | None

    def on_cpu(self) -> EngineParts:
        usage = expert_usage(self.config, self.plan, self.model_config)
        model = self.packed.built(lambda: self._model(self.ops, self.cpu_store(), usage))
        return self._parts(model, usage)

    def on_gpu(self) -> EngineParts:
        from tandem.engine.start.gpu_side import (  # Triton is there only where a GPU is
            begin_step,
            expert_stream,
            gpu_side,
            live_experts,
            order_posts,
            registered,
        )

        gpu = gpu_side(self.plan, self.model_config, self.ops)
        on_gpu = gpu.placement.on_gpu
        usage = expert_usage(self.config, self.plan, self.model_config, gpu.ops.device, on_gpu)
        self.packed.confirm()  # experts are copied to where they live
        parts = self._parts(self._model(gpu.ops, self.gpu_store(gpu.store, gpu.handoff), usage), usage)
        order_posts(self.plan, gpu)
        copies = registered(self.plan, gpu, self.progress)
        live = live_experts(self.plan, gpu, usage, copies)
        stream = expert_stream(self.plan, gpu, copies, live, usage)
        parts = replace(parts, live=live, handoff=gpu.handoff, begin_step=begin_step(gpu, stream))
        if stream is None:
            return replace(parts, plan=without_streams(self.config, self.plan))
        return replace(parts, stream_seconds=stream.step_seconds)

    def cpu_store(self) -> ExpertStore | None:
        """Where routed experts live without a GPU; None: where the operations compute. Benches have their own."""
        return None

    def gpu_store(self, store: HybridStore, handoff: Handoff) -> ExpertStore:
        """Likewise beside a GPU."""
        return store

    def _model(self, ops: Ops, store: ExpertStore | None, usage: ExpertUsage | None) -> models.AnyModel:
        kept = self.packed.cache
        return models.build(
            self.model_config, self.plan, self.checkpoint, ops, self.progress, store, kept, usage
        )

    def _parts(self, model: models.AnyModel, usage: ExpertUsage | None) -> EngineParts:
        recorder = expert_recorder(self.config, self.model_config, usage)
        return EngineParts(
            self.plan, self.model_config, model, self.tokenizer, self.ops.pool, usage, recorder
        )


def use_one_torch_thread() -> None:
    """The parallelism of a step is our worker pool's, whose worker 0 is the calling thread. Torch's own pool would spin
    on the same cores between its operations and make both slower."""
    torch.set_num_threads(1)


def model_directory(name_or_path: str) -> Path:
    """The model's directory or GGUF file; the demo model is built, and a name fetched, if it is not there yet."""
    name = hub_name(name_or_path)
    if name is not None:
        return fetch(name)
    directory = resolve_model(name_or_path)
    if directory == demo_dir() and not (directory / "config.json").is_file():
        build_demo(directory)
    return directory
