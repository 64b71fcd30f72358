"""Parts that an engine is put together from: the store of states, the pace of prompts, and the runner of its steps.
That runs on the CPU or on a GPU, alone or as the first of several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tandem.engine.cpu_runner import CpuRunner
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.pace import PrefillPace
from tandem.engine.stages.runner import StagedRunner
from tandem.engine.stages.states import allocate_stages
from tandem.engine.start.parts import EngineParts
from tandem.engine.state.arrays import SlotMemory, StateArrays, allocate
from tandem.engine.state.kv_cache import KVCache
from tandem.engine.state.slots import SlotPool
from tandem.engine.state.store import StateStore
from tandem.engine.state.windows import WindowPages
from tandem.engine.step.batch import StepShape
from tandem.engine.step.prefill import PausingModel
from tandem.spec.gpu_scratch import MOST_SHARED_SECONDS
from tandem.spec.state import StateLayout


def layout_of(parts: EngineParts) -> StateLayout:
    return parts.model_config.state_layout(parts.plan.dtype, parts.plan.page_size, parts.plan.draft_tokens)


def states_of(parts: EngineParts) -> StateArrays:
    plan, device = parts.plan, None if parts.handoff is None else parts.handoff.device
    if parts.stages:
        return allocate_stages(plan, parts.model_config, parts.stages)
    return allocate(layout_of(parts), plan.num_pages, device, plan.num_slots, plan.num_window_pages)


def store_of(parts: EngineParts, pages: KVCache, slots: SlotMemory) -> StateStore:
    layout, count = layout_of(parts), parts.plan.num_window_pages
    windows, pool = WindowPages(layout, count) if count else None, SlotPool(slots) if layout.slot_bytes else None
    if pool is not None and parts.leader is not None:
        pool.on_copy.append(parts.leader.lists.copied)
    if pool is not None and parts.begin_step is not None:
        pool.on_copy.append(parts.begin_step.slot_copied)
    return StateStore(layout, pages, pool, windows)


def pace_of(parts: EngineParts) -> PrefillPace:
    """Pace of prefill. Others wait for a step in which all experts are streamed, if it is short enough."""
    seconds, most = parts.stream_seconds, parts.plan.max_step_tokens
    pieces = parts.model.depth if _takes_turns(parts) and isinstance(parts.model, PausingModel) else 1
    whole = seconds is not None and seconds <= MOST_SHARED_SECONDS
    gpu = parts.plan.gpu  # with a ring, and without `seconds`, the CPU has a part in prompts
    rows = 0 if gpu is None or gpu.streams_experts else max(gpu.sizes.prompt_sizes, default=0)
    shared, pipelined = (0, 1) if gpu is None else (gpu.sizes.shared_tokens, gpu.pipelined_chunks)
    return PrefillPace(most, seconds is not None, whole, pieces, rows, shared, pipelined)


def _takes_turns(parts: EngineParts) -> bool:
    """True where a prompt's layers and decode steps share one stream, so they alternate."""
    if parts.handoff is None:
        return True
    return parts.group is not None and parts.begin_step is not None and parts.begin_step.pausable()


def runner_of(parts: EngineParts, states: list[tuple[Tensor, ...]]) -> CpuRunner | GpuRunner:
    """It tells the other ranks each step, where this is the first of several."""
    make: Any = CpuRunner if parts.handoff is None or parts.plan.gpu is None else GpuRunner
    if parts.stages:
        make = StagedRunner
    if parts.leader is not None:
        from tandem.engine.ranks.ranked_runner import ranked  # and sockets, which one rank has no use for

        make = ranked(make, parts.leader, parts.group)
    return _cpu_runner(make, parts, states) if parts.handoff is None else _gpu_runner(make, parts, states)


def _cpu_runner(make: Any, parts: EngineParts, states: list[tuple[Tensor, ...]]) -> CpuRunner:
    plan = parts.plan
    runner: CpuRunner = make(
        parts.model,
        states,
        page_size=plan.page_size,
        max_step_tokens=plan.max_step_tokens,
        usage=parts.usage,
        speculative=plan.draft_tokens > 0,
        windowed=plan.num_window_pages > 0,
        images_from=_images_from(parts),
    )
    return runner


def _images_from(parts: EngineParts) -> int:
    """Behind the positions of the context; 0 where no image is read."""
    return 0 if parts.model_config.vision is None else parts.plan.context_length


def _gpu_runner(make: Any, parts: EngineParts, states: list[tuple[Tensor, ...]]) -> GpuRunner:
    plan = parts.plan
    assert plan.gpu is not None
    graphs = GraphPlan(
        plan.gpu.graph_sizes, -(-plan.context_length // plan.page_size), plan.gpu.plain_graph_sizes,
        drafting=plan.drafts, windowed=plan.num_window_pages > 0, prompts=plan.gpu.sizes.prompt_sizes,
        no_decodes=parts.replays_without_decodes,
        splits=parts.split_prompts, each_row=plan.deterministic, speculative=plan.draft_tokens > 0,
        reserved_sms=plan.gpu.reserved_sms, one_stream=parts.group is not None or bool(parts.stages),
        turns=_takes_turns(parts), images_from=_images_from(parts),
    )  # fmt: skip
    runner: GpuRunner = make(
        parts.model, states, parts.handoff, graphs, StepShape(plan.page_size, plan.max_step_tokens),
        usage=parts.usage, live=parts.live, begin_step=parts.begin_step,
    )  # fmt: skip
    if parts.group is not None:  # all graphs are captured
        from tandem.kernels.gpu.ranks.gpu_group import STEP_SECONDS

        parts.group.check()
        parts.group.be_patient(STEP_SECONDS)
    return runner
