"""`load_parts`: from what the user asked for to the parts of an engine."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tandem import models
from tandem._core import WorkerPool
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
from tandem.engine.expert_statistics import expert_recorder, expert_usage
from tandem.engine.ranks.joined import cpu_group, gpu_group
from tandem.engine.ranks.messages import StartRank
from tandem.engine.start.gpu_claims import PlannedWay, undisputed_plan
from tandem.engine.start.model_files import fetch
from tandem.engine.start.packed_start import PackedStart
from tandem.engine.start.parts import EngineParts
from tandem.engine.start.planning import plan_of, without_streams
from tandem.engine.start.sampling_defaults import sampling_defaults
from tandem.experts import ExpertStore
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import way_is_open
from tandem.hub.names import hub_name
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.ranks.meeting import Meeting
from tandem.kernels.this_machine import these_cpus
from tandem.kernels.workers import planned_pool
from tandem.machine.gpus import may_have_gpus
from tandem.machine.machine import Machine
from tandem.machine.memory_claims import MemoryClaims
from tandem.planner.choices.requested import as_asked
from tandem.planner.choices.threads import plan_threads
from tandem.planner.in_place import stored_in
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import check_alone, own_side, ranked
from tandem.planner.resolve import machine_refusals, resolve
from tandem.planner.ways import WayChoice, choose_way, several_usable
from tandem.spec.model_config import ModelConfig
from tandem.spec.shard import RankShard
from tandem.spec.stored import StoredFormats
from tandem.text.chat_template import chat_template_text
from tandem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.engine.ranks.leader import Leader
    from tandem.experts.handoff import Handoff
    from tandem.experts.hybrid_store import HybridStore

TURN_SECONDS = 5e-4


@contextmanager
def for_loading() -> Iterator[None]:
    """How Python runs meanwhile.

    A checkpoint's headers are hundreds of thousands of objects, all of which stay. Python looks for garbage when many
    are made; that took as long as making them. The threads that look up tensors take short turns: all
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


class StoredModelFiles(NamedTuple):
    """A model as its files are, before it is divided among ranks."""

    directory: Path
    model: ModelConfig
    checkpoint: Checkpoint
    formats: StoredFormats

    @classmethod
    def at(cls, config: EngineConfig, directory: Path) -> StoredModelFiles:
        """Raises CheckpointError, ConfigError."""
        model = with_draft_config(load_model_config(directory), config)
        checkpoint = with_experts(open_checkpoint(directory), config.kt_weight_path, model)
        checkpoint = with_draft_layer(checkpoint, config)
        model = models.with_stored_drafts(model, checkpoint, config.speculative_algorithm)
        model = models.with_stored_tower(model, checkpoint)
        model = as_asked(config, model)
        return cls(directory, model, checkpoint, stored_in(checkpoint.formats(), *checkpoint.expert_files()))

    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        tokenizer = Tokenizer.load(self.directory)
        if config.chat_template is not None:
            tokenizer.use_chat_template(chat_template_text(config.chat_template))
        return tokenizer


class ChosenWay(NamedTuple):
    """Over how many GPUs a model goes; and its files, the machine with its GPUs and the plan, where the choice has read
    them."""

    choice: WayChoice
    stored: StoredModelFiles | None = None
    machine: Machine | None = None
    plan: Plan | None = None


@for_loading()
def chosen_way(config: EngineConfig, failed: Sequence[str] = (), claims: MemoryClaims | None = None) -> ChosenWay:
    """As `choose_way`, on this machine, with its plan. Files are read only where there is a choice. claims: tell
    other starts what this one takes. Raises as `load_parts`."""
    may_choose = way_is_open(config) and may_have_gpus()
    machine = these_cpus().with_gpus() if may_choose else these_cpus()
    if not may_choose or not several_usable(machine) or machine_refusals(config, machine):
        return ChosenWay(WayChoice(config))
    stored = StoredModelFiles.at(config, model_directory(config.model))

    def planned(machine: Machine) -> PlannedWay:
        choice = choose_way(config, stored.model, machine, stored.formats, failed)
        return choice, choice.told(resolve(choice.config, stored.model, machine, stored.formats))

    choice, plan, machine = undisputed_plan(config, machine, claims, planned, _machine_now)
    return ChosenWay(choice, stored, machine, plan)


@for_loading()
def load_parts(
    config: EngineConfig,
    progress: models.Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
    leader: Leader | None = None,
    way: ChosenWay | None = None,
    claims: MemoryClaims | None = None,
) -> EngineParts:
    """Reads and packs the model. `planned` is called before the first weight is read, `progress(what, bytes done, bytes
    in all)` after every layer. leader: of other ranks, where the model is divided; this is the first then. way: over
    how many GPUs; None: as the flags say, one if they do not. `config` is then its own.

    Raises ConfigError when a wish cannot be met, CheckpointError when a file is missing or broken.
    """
    use_one_torch_thread()
    if leader is None:
        check_alone(config)
    way = way or ChosenWay(WayChoice(config))
    directory, machine = model_directory(config.model), way.machine or these_cpus()
    sampling_defaults(config, directory)  # what is wrong with them is said before anything is loaded
    if machine_refusals(config, machine):
        plan_of(config)  # raises them, with all else that stands in the way
    workers = planned_pool(plan_threads(*own_side(config, machine)))
    with (
        PackedStart(config, directory, workers, progress, RankShard(0, config.tensor_parallel_size)) as packed,
        ThreadPoolExecutor(1, "tandem-gpus") as asking,
    ):
        whole = asking.submit(lambda: machine if config.device == "cpu" or way.machine else machine.with_gpus())
        stored = way.stored or StoredModelFiles.at(config, directory)
        plan = way.plan or _planned(config, way.choice, stored, whole.result(), claims)
        model = ranked(config, stored.model, machine, stored.formats)[1]
        if planned is not None:
            planned(plan)
        meeting = None if leader is None else leader.start(config, plan)
        parts = _loaded(config, plan, model, stored, workers, packed, progress, meeting)
        if leader is not None:
            leader.loaded()
        return replace(parts, leader=leader)


def _machine_now() -> Machine:
    return these_cpus().with_gpus()


def _planned(
    config: EngineConfig, choice: WayChoice, stored: StoredModelFiles, machine: Machine, claims: MemoryClaims | None
) -> Plan:
    """On GPUs that nobody else is about to fill, as far as there are such."""

    def planned(machine: Machine) -> PlannedWay:
        return choice, choice.told(resolve(config, stored.model, machine, stored.formats))

    return undisputed_plan(config, machine, claims, planned, _machine_now)[1]


@for_loading()
def load_rank(start: StartRank, rank: int) -> EngineParts:
    """Another rank's part of the model, by the first one's plan. Raises as `load_parts`."""
    use_one_torch_thread()
    config, directory, machine = start.config, model_directory(start.config.model), these_cpus()
    stored = StoredModelFiles.at(config, directory)
    own, model, machine = ranked(config, stored.model, machine, stored.formats, rank)
    plan = rank_plan(start.plan, own, machine, rank)
    workers, meeting = planned_pool(plan), Meeting(rank, config.tensor_parallel_size, start.file)
    with PackedStart(config, directory, workers, None, model.shard) as packed:
        return _loaded(config, plan, model, stored, workers, packed, None, meeting)


def rank_plan(plan: Plan, config: EngineConfig, machine: Machine, rank: int) -> Plan:
    """The first rank's plan with another's threads and GPU. config, machine: that one's, of `ranked`. The first has
    chosen all GPUs: what is free now is another thing."""
    threads = plan_threads(config, machine)
    plan = replace(plan, cpus=threads.cpus, parts=threads.parts, part_nodes=threads.part_nodes)
    return plan if plan.gpu is None else replace(plan, gpu=replace(plan.gpu, uuid=plan.gpu.rank_uuids[rank]))


def _loaded(
    config: EngineConfig,
    plan: Plan,
    model: ModelConfig,
    stored: StoredModelFiles,
    workers: WorkerPool,
    packed: PackedStart,
    progress: models.Progress | None,
    meeting: Meeting | None,
) -> EngineParts:
    """model: this rank's part of it. meeting: with the other ranks; None: there are none."""
    checkpoint = stored.checkpoint
    ops = CpuOps(workers, plan.tier, plan.int8_activations, plan.experts_in_place, plan.deterministic)
    if meeting is not None and plan.gpu is None:
        ops.group = cpu_group(meeting)
    packed.open(plan, model, checkpoint, ops)
    if packed.cache is None or not packed.cache.mapped:
        models.check_headers(model, plan, checkpoint)
    if model.vision is not None:
        model = replace(model, vision=model.vision.capped(plan.image_tokens))
    tokenizer = stored.tokenizer(config) if meeting is None or meeting.rank == 0 else None
    start = Start(config, plan, model, checkpoint, tokenizer, ops, packed, progress, meeting)
    parts = start.cpu_parts() if plan.gpu is None else start.gpu_parts()
    if meeting is not None:  # however long one reads: a rank that captured graphs alone would give up
        meeting.share("loaded", b"-", math.inf)
    return parts


@dataclass(frozen=True, slots=True)
class Start:
    """Everything that is known when the first weight is read."""

    config: EngineConfig
    plan: Plan
    model_config: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    ops: CpuOps
    packed: PackedStart
    progress: models.Progress | None
    meeting: Meeting | None = None  # with the other ranks

    def cpu_parts(self) -> EngineParts:
        usage = expert_usage(self.config, self.plan, self.model_config)
        model = self.packed.built(lambda: self._model(self.ops, self.cpu_store(), usage))
        return self.parts(model, usage)

    def gpu_parts(self) -> EngineParts:
        if self.plan.gpu is not None and self.plan.gpu.stages:
            return self.staged_parts()
        from tandem.engine.start.gpu_side import (  # Triton is there only where a GPU is
            begin_step,
            expert_stream,
            gpu_side,
            live_experts,
            order_posts,
            registered,
            without_stream,
        )

        gpu = gpu_side(self.plan, self.model_config, self.ops)
        group = None if self.meeting is None else gpu_group(self.meeting, gpu.ops.device)
        gpu.ops.group = group
        gpu_experts = gpu.placement.gpu_experts
        usage = expert_usage(self.config, self.plan, self.model_config, gpu.ops.device, gpu_experts)
        self.packed.confirm()  # experts are copied to where they live
        parts = self.parts(self._model(gpu.ops, self.gpu_store(gpu.store, gpu.handoff), usage), usage)
        order_posts(self.plan, gpu)
        copies = registered(self.plan, gpu, self.progress)
        can_move = copies is not None or self.config.kt_enable_dynamic_expert_update
        live = live_experts(self.plan, gpu, usage, copies) if can_move else None
        stream = expert_stream(self.plan, gpu, copies, live, usage)
        if self.meeting is not None and not self.meeting.agree("streams", stream is not None):
            without_stream(gpu)  # steps are as long as all ranks take them
            stream = None
        parts = replace(
            parts, live=live, handoff=gpu.handoff, begin_step=begin_step(gpu, stream, live), group=group
        )
        if stream is None:
            return replace(parts, plan=without_streams(self.config, self.plan))
        return replace(parts, stream_seconds=stream.step_seconds)

    def staged_parts(self) -> EngineParts:
        """Likewise, of layers on several GPUs."""
        from tandem.engine.stages.sides import (  # which imports Triton
            staged_parts,
            staged_sides,
            staged_usage,
        )
        from tandem.engine.stages.streams import stage_streams, step_seconds
        from tandem.models.staged import StagedBuilder, StagedModel

        sides = staged_sides(self.plan, self.model_config, self.ops)
        usage = staged_usage(self.config, self.plan, self.model_config, sides)
        self.packed.confirm()
        whole: Any = sides.store  # which makes layers as one store does
        builder = StagedBuilder(
            sides.stages, self.model_config, self.plan, self.checkpoint, sides.stages[0].ops, self.progress,
            self.gpu_store(whole, sides.handoffs), self.packed.cache, usage,
        )  # fmt: skip
        parts = self.parts(StagedModel(builder), usage)
        streams = stage_streams(self.plan, sides, usage, self.progress)
        parts = staged_parts(parts, sides, streams)
        if not streams:
            return replace(parts, plan=without_streams(self.config, self.plan))
        return replace(parts, stream_seconds=step_seconds(streams))

    def cpu_store(self) -> ExpertStore | None:
        """Where routed experts live without a GPU; None: where the operations compute. Benches have their own."""
        return None

    def gpu_store(self, store: HybridStore, handoff: Handoff) -> ExpertStore:
        """Likewise beside a GPU."""
        return store

    def _model(self, ops: Ops, store: ExpertStore | None, usage: ExpertUsage | None) -> models.AnyModel:
        cache = self.packed.cache
        return models.build(
            self.model_config, self.plan, self.checkpoint, ops, self.progress, store, cache, usage
        )

    def parts(self, model: models.AnyModel, usage: ExpertUsage | None) -> EngineParts:
        """Parts that every engine has."""
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
