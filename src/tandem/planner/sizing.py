"""Sizes of a model's parts on the GPU: the only place that divides GPU memory between weights, KV cache and experts.

Dense weights are always there, and the embedding unless it is in CPU memory. Then come the experts that were asked for.
The KV cache takes the rest.

Where nothing was asked, the KV cache takes a quarter of the room. It takes more for one request of 32768 tokens: up to
half, and whatever 16384 tokens need. Experts take the rest, and the KV cache what they leave. Buffers for experts that
change places come out of the experts' part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tandem.errors import ConfigError, DoesNotFit, GpuTooSmall
from tandem.machine.gpus import Gpu
from tandem.planner.choices.expert_streaming import experts_kept_off, graph_bytes, ring_for, streams_not
from tandem.planner.choices.left_to_ram import asked_experts, expert_bytes, short_of_ram, ways_out
from tandem.planner.choices.live_placement import live_placement
from tandem.planner.choices.speculation import check_gpu_drafts
from tandem.planner.cuda_graphs import prompt_sizes
from tandem.planner.expert_sizes import ExpertSizes, expert_sizes
from tandem.planner.gpu_plan import (
    GPU_FRACTION,
    SHARE_FIELDS,
    GpuMemory,
    dense_bytes,
    scratch_bytes,
    step_rows,
    unpacking_bytes,
    workspace_bytes,
)
from tandem.planner.memory import (
    GPU_PREFILL_TOKENS,
    LEAST_CONTEXT,
    WANTED_CONTEXT,
    MemoryPlan,
    MemoryRequest,
    changed,
    gib,
    long_step_tokens,
    wanted_context,
)
from tandem.planner.stages.chunks import border_bytes
from tandem.spec.gpu_scratch import LEAST_EXCHANGE_BUFFERS, SLOTS_OF_EXCHANGE_BUFFER, exchange_buffers
from tandem.spec.model_config import draft_experts
from tandem.spec.shard import ALONE

KV_SHARE = 4  # the KV cache takes 1/4 of the room by default
DEFAULT_CONTEXT = 32768  # tokens: experts do not make room for more unless --context-length asks for it
LEAST_KV_KEPT = 0.95  # of the KV cache, if nobody asked for live placement and a flag fixes the number of experts


@dataclass(frozen=True)
class GpuRoom:
    """A request and a GPU: what is there, and what is taken before experts and KV cache. Bytes. exchange_buffers: of
    experts that change places."""

    request: MemoryRequest
    gpu: Gpu
    exchange_buffers: int = 0

    @cached_property
    def budget(self) -> int:
        request = self.request
        fraction = request.config.mem_fraction_static or request.gpu_fraction or GPU_FRACTION
        return int(self.gpu.free_bytes * fraction)

    @cached_property
    def dense(self) -> int:
        request = self.request
        return dense_bytes(request.model, request.dtype, request.stored, request.embedding_in_ram)

    @cached_property
    def workspace(self) -> int:
        """Bytes of the workspace, in long steps where no chunk size was asked for; of all stages."""
        each = workspace_bytes(self.request) + self._unpacking(long_step_tokens(self.request.model))
        return each * self.request.config.pipeline_parallel_size

    @cached_property
    def scratch(self) -> int:
        """Bytes of the workspace, in steps of the usual length."""
        return scratch_bytes(self.request)

    @cached_property
    def sizes(self) -> ExpertSizes:
        return expert_sizes(self.request)

    @cached_property
    def exchanges(self) -> int:
        """Bytes for experts on their way to slots."""
        return self.exchange_buffers * self.sizes.largest

    @cached_property
    def left_by_short_steps(self) -> int:
        """Bytes of the workspace: steps of the usual length have fewer experts' rows."""
        less = self._unpacking(long_step_tokens(self.request.model)) - self._unpacking(GPU_PREFILL_TOKENS)
        return less * self.request.config.pipeline_parallel_size

    def _unpacking(self, tokens: int) -> int:
        return unpacking_bytes(self.gpu, self.request.model, step_rows(self.request, tokens))

    def borders(self, tokens: int) -> int:
        """Bytes between all stages, in steps of so many tokens, or as long as they were asked for."""
        further = self.request.config.pipeline_parallel_size - 1
        return further * border_bytes(self.request.model, step_rows(self.request, tokens))

    def scratch_beyond(self, tokens: int) -> int:
        """That steps of so many tokens take beyond the workspace."""
        return scratch_bytes(self.request, tokens) - self.scratch


def fits(room: GpuRoom, reserved: int = 0, **changes: Any) -> GpuMemory | None:
    """Bytes for experts and KV cache with these changes of the request or its flags, where so many are reserved
    already; None: they do not fit, or experts that stay in CPU memory do not fit there."""
    if changes:
        room = replace(room, request=changed(room.request, **changes))
    try:
        return _divided(room, reserved)
    except ConfigError:
        return None


def size_gpu(request: MemoryRequest, gpu: Gpu) -> GpuMemory:
    """Raises GpuTooSmall with the numbers when the GPU or the CPU memory beside it is too small."""
    room = GpuRoom(request, gpu)
    still = _sized(room)
    moves, why = live_placement(request, still)
    if not moves:
        return replace(still, exchange_reason=why)
    buffers = exchange_buffers(room.sizes.largest, still.experts)
    return _with_exchanges(replace(room, exchange_buffers=buffers), still)


def _with_exchanges(room: GpuRoom, still: GpuMemory) -> GpuMemory:
    """With buffers for experts that change places, if they leave slots to move into. Where nobody asked for moving,
    all else has to stay, too."""
    requested = room.request.config.kt_enable_dynamic_expert_update
    try:
        memory = _sized(room)
    except RamTooSmall:
        return _resting(still, "CPU memory has no room for the experts that their buffers displace", requested)
    except ConfigError:
        memory = replace(still, experts=0)
    if memory.experts == 0 or not (requested or _kept(still, memory)):
        lack = "there" if requested else "to spare"
        why = f"{room.exchanges >> 20} MiB of GPU memory for experts that change places are not {lack}"
        return _resting(still, why, requested)
    moves, why = live_placement(room.request, memory)
    if not moves:
        return replace(still, exchange_reason=why)
    return replace(memory, exchange_bytes=room.exchanges, exchange_reason=why)


def _resting(still: GpuMemory, why: str, requested: bool) -> GpuMemory:
    """Memory without buffers; where a flag asked for them, the plan may give up something else for their room."""
    return replace(still, exchange_reason=why, cramped=why if requested else still.cramped)


def _kept(still: GpuMemory, moving: GpuMemory) -> bool:
    """True where buffers leave all but a few experts as they were in `still`: the default takes nothing else. Of very
    few experts two buffers would take more than an eighth."""
    many = still.experts >= LEAST_EXCHANGE_BUFFERS * SLOTS_OF_EXCHANGE_BUFFER
    cached = moving.memory.kv_tokens >= LEAST_KV_KEPT * still.memory.kv_tokens
    return many and cached and _fixed(moving) == _fixed(still)


def _fixed(memory: GpuMemory) -> tuple[object, ...]:
    context = min(memory.memory.context_length, DEFAULT_CONTEXT)
    return context, memory.ring_bytes, memory.prompt_sizes, memory.draft_experts


def _sized(room: GpuRoom) -> GpuMemory:
    """Raises GpuTooSmall."""
    request, gpu = room.request, room.gpu
    memory = fits(room) or _short_steps(room)
    check_gpu_drafts(request.config, request.model)
    if memory.experts >= request.model.routed_experts:
        return _with_long_steps(room, memory)
    if why_not := streams_not(request, gpu):
        return replace(_short_steps(room), ring_reason=why_not)
    return _with_ring(room)


def _short_steps(room: GpuRoom, reserved: int = 0) -> GpuMemory:
    """In steps of the usual length. Raises ConfigError where not even they fit."""
    return _divided(room, reserved - room.left_by_short_steps)


def _with_ring(room: GpuRoom) -> GpuMemory:
    """With a ring for streamed experts, if it fits; and graphs of the prompts that bring them."""
    ring, tokens = ring_for(room.request, room.gpu).nbytes, long_step_tokens(room.request.model)
    extra = (ring + room.scratch_beyond(tokens)) * room.request.config.pipeline_parallel_size  # on each GPU
    memory = fits(room, extra)
    if memory is None:
        why = f"{gib(ring)} of GPU memory for streamed experts are not there"
        return replace(_short_steps(room), ring_reason=why, cramped=why)
    with_ring = replace(memory, ring_bytes=ring, ring_reason="", step_tokens=tokens)
    return _with_prompt_graphs(room, with_ring, extra, tokens)


def _with_long_steps(room: GpuRoom, usual: GpuMemory) -> GpuMemory:
    """For prompts that are alone, if experts, context and graphs of prompts keep their room. Not where prompts can be
    no graphs: steps are not cut there, and who comes would wait for a whole one. Ranks and stages have none, and take
    long steps: they start kernel by kernel what then takes longer than starting it."""
    request = room.request
    ranks, whole = request.model.shard.ranks, replace(request.model, shard=ALONE)
    tokens, left = long_step_tokens(request.model), room.left_by_short_steps
    stages, borders = request.config.pipeline_parallel_size, room.borders(GPU_PREFILL_TOKENS)
    plain = _short_steps(room, borders)
    if plain.experts < usual.experts:  # nothing is pipelined then; or a shorter cache makes room for borders
        plain, borders = _short_steps(room), 0
    short = _with_prompt_graphs(room, plain, borders - left)
    graphs = stages > 1 or prompt_sizes(request.config, whole)
    if request.config.chunked_prefill_size is not None or not graphs:
        return short
    more = room.scratch_beyond(tokens) * stages + room.borders(tokens)
    long = _undisturbed(fits(room, more), usual)
    if long is not None:
        why = f"default, for a prompt alone; {GPU_PREFILL_TOKENS} of prompts that others wait for"
        long = replace(long, step_tokens=tokens, step_reason=why, shared_tokens=GPU_PREFILL_TOKENS)
        long = _with_prompt_graphs(room, long, more)
        if long.prompt_sizes or max(ranks, stages) > 1:
            return long
    why = (
        f"default; {tokens} for a prompt alone would take {gib(more + left)} from experts, context or prompt graphs"
    )
    return replace(short, step_reason=why)


def _with_prompt_graphs(room: GpuRoom, memory: GpuMemory, extra: int = 0, streamed: int = 0) -> GpuMemory:
    """And graphs of prompts, if they fit. streamed: rows of steps that bring experts."""
    config = room.request.config
    sizes, reserved_sms = prompt_sizes(config, room.request.model, streamed), config.prefill_reserved_sms
    graphs = graph_bytes(room.request, room.gpu, sizes, streamed > 0, reserved_sms)
    smaller = _undisturbed(fits(room, extra + graphs), memory)
    return memory if smaller is None else replace(smaller, prompt_sizes=sizes)


def _undisturbed(smaller: GpuMemory | None, larger: GpuMemory) -> GpuMemory | None:
    """The larger plan in the smaller memory; None: experts lose their places there, or the context is shorter."""
    if smaller is None or smaller.experts < larger.experts:
        return None
    shorter = smaller.memory.context_length < larger.memory.context_length
    return None if shorter else replace(larger, memory=smaller.memory)


class RamTooSmall(GpuTooSmall):
    """The experts that a GPU leaves do not fit into CPU memory. gpu_experts: experts that would be there."""

    def __init__(self, reason: str, room: GpuRoom, gpu_experts: int) -> None:
        super().__init__(reason)
        self.room, self.gpu_experts = room, gpu_experts


def explained(error: DoesNotFit) -> DoesNotFit:
    """With what would help. Each is tried, so whoever reads no reasons does not ask for it."""
    if not isinstance(error, RamTooSmall):
        return error
    room = error.room
    ways = ways_out(room.request, error.gpu_experts, lambda **changes: fits(room, **changes) is not None)
    return GpuTooSmall("; ".join([str(error), *ways]))


def _divided(room: GpuRoom, extra: int) -> GpuMemory:
    """Raises ConfigError where something does not fit, or was asked for in vain."""
    request = room.request
    extra += room.exchanges
    left = room.budget - room.dense - room.workspace - extra
    context, context_reason = wanted_context(request)
    experts, expert_reason = _experts_asked(request)
    kv_room = left - room.sizes.gpu_bytes(experts or 0)
    drafts = _draft_bytes(request, kv_room)
    kv_room -= drafts
    if kv_room < request.kv_bytes(min(context, LEAST_CONTEXT)):
        raise GpuTooSmall(_too_small(room, extra, left, experts or 0))
    least, way_out = _least_tokens(request, context, kv_room, room.exchanges), ""
    if experts is None:
        way_out = "; --context-length takes it from experts"
        experts = room.sizes.fitting(kv_room - request.kv_bytes(least))
        expert_reason = "what fits beside dense weights and KV cache"
        kv_room -= room.sizes.gpu_bytes(experts)
    tokens, kv_reason = _kv_tokens(request, context, kv_room, least)
    if tokens < context:
        context, context_reason = tokens, _shortened(request, context, tokens) + way_out
    if short := short_of_ram(request, experts, bool(drafts)):
        raise RamTooSmall(short, room, experts)
    weights = room.dense + room.sizes.gpu_bytes(experts) + drafts
    memory = MemoryPlan(weights, room.budget, context, tokens, context_reason, kv_reason)
    return GpuMemory(
        experts=experts, expert_reason=expert_reason, memory=memory, draft_experts=bool(drafts)
    )


def _draft_bytes(request: MemoryRequest, room: int) -> int:
    """Bytes of a draft layer's experts, if they are to be on the GPU: each draft token uses them. They leave room for
    one request, or for what was asked for."""
    max_tokens, context = request.config.max_total_tokens, wanted_context(request)[0]
    nbytes = draft_experts(request.model) * expert_bytes(request)
    least = min(context, DEFAULT_CONTEXT) if max_tokens is None else max_tokens
    has_room = nbytes + request.kv_bytes(least) <= room
    return (
        nbytes if has_room and not experts_kept_off(request.model, request.expert_format, request.stored) else 0
    )


def _experts_asked(request: MemoryRequest) -> tuple[int | None, str]:
    """0 where the GPU cannot have any. Raises ConfigError if it should."""
    experts, reason = asked_experts(request.config, request.model)
    why_not = experts_kept_off(request.model, request.expert_format, request.stored)
    if why_not and experts:
        raise ConfigError(
            f"{reason}: {why_not}; leave the flag out to have the experts computed on the CPU, or convert them while "
            "loading with --kt-method INT8 or INT4",
            fields=SHARE_FIELDS,
        )
    return (0, f"{why_not}, so the CPU computes them") if why_not else (experts, reason)


def _least_tokens(request: MemoryRequest, context: int, room: int, exchanges: int) -> int:
    """Least tokens of the KV cache, before there are experts. exchanges: bytes beside `room` that experts take on their
    way, for which they alone make room. Raises ConfigError if a flag asks for more than fits."""
    max_tokens = request.config.max_total_tokens
    if max_tokens is not None:
        if request.kv_bytes(max_tokens) > room:
            raise DoesNotFit(
                f"--max-total-tokens {max_tokens} needs {gib(request.kv_bytes(max_tokens))} of GPU memory; "
                f"give at most {request.kv_tokens(room)}",
                fields=("max_total_tokens",),
            )
        return max_tokens
    one, shared = context, room + exchanges
    if request.config.context_length is None:
        one = max(request.kv_tokens(shared // 2), min(WANTED_CONTEXT, request.kv_tokens(shared)))
        one = min(context, DEFAULT_CONTEXT, one)
    share = max(request.kv_tokens(shared // KV_SHARE), one)
    return min(request.kv_tokens(room), request.max_running_requests * context, share)


def _kv_tokens(request: MemoryRequest, context: int, room: int, least: int) -> tuple[int, str]:
    """Tokens in what experts left: up to one full context, if `least` is not that much."""
    if request.config.max_total_tokens is not None:
        return least, "--max-total-tokens"
    reason = (
        "a quarter of the GPU memory beside the dense weights, or one request; more where experts leave it"
    )
    return min(request.kv_tokens(room), request.max_running_requests * context, max(least, context)), reason


def _shortened(request: MemoryRequest, context: int, tokens: int) -> str:
    """Why a context is only `tokens` long. Raises ConfigError if more was asked for."""
    if request.config.context_length is not None:
        raise DoesNotFit(
            f"--context-length {context} needs more KV cache than the {tokens} tokens that fit; give at most that",
            fields=("context_length",),
        )
    return f"what the KV cache holds (the model could do {context})"


def _too_small(room: GpuRoom, extra: int, left: int, experts: int) -> str:
    none = "no KV cache fits beside them"
    most = f"at most {room.sizes.fitting(max(0, left))} experts fit without a KV cache"
    rest = f", {experts} experts {gib(room.sizes.gpu_bytes(experts))}; {most}" if experts else f"; {none}"
    return (
        f"{room.gpu.name} is too small: {gib(room.budget)} may be used, dense weights take {gib(room.dense)}, "
        f"workspace {gib(room.workspace + extra)}{rest}"
    )
