"""`in_stages`: sizes of a plan for the memory of several GPUs, divided so that each GPU's layers fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tandem.errors import GpuTooSmall
from tandem.machine.gpus import Gpu
from tandem.planner.choices.decision import Decision, Decisions
from tandem.planner.choices.expert_streaming import NO_STREAMS
from tandem.planner.choices.left_to_ram import asked_experts, expert_bytes, short_of_ram
from tandem.planner.forecast.speeds import GPU_GBPS, gpu_model
from tandem.planner.gpu_plan import GPU_FRACTION, GpuMemory, StagePlan, dense_bytes, step_rows
from tandem.planner.memory import MemoryRequest, gib
from tandem.planner.sizing import GpuRoom
from tandem.planner.stages.chunks import border_bytes
from tandem.planner.stages.pool import gpus_of_stages
from tandem.planner.stages.split import fits, shares, split
from tandem.spec.model_config import ModelConfig, embedding_bytes

CACHE_STEPS = 64  # that the KV cache may be shorter by, until layers fit
LESS_CACHE = "fewer where borders between stages would take experts off the GPUs"
LEFT_BY_BORDERS = "borders between stages left some in CPU memory; a smaller --kt-gpu-experts-ratio streams them"


@dataclass(frozen=True)
class StageSizes:
    """A request, the GPUs of its stages, and tokens of the KV cache. extra: bytes on each GPU beyond the workspace;
    border: on each but the first, for chunks that come from the stage before."""

    request: MemoryRequest
    gpus: tuple[Gpu, ...]
    kv_tokens: int
    extra: int = 0
    border: int = 0

    def rooms(self) -> list[int]:
        """Bytes for layers on each GPU."""
        request = self.request
        fraction = request.config.mem_fraction_static or request.gpu_fraction or GPU_FRACTION
        rooms = [int(gpu.free_bytes * fraction) - self._workspace for gpu in self.gpus]
        rooms[1:] = [room - self.border for room in rooms[1:]]
        rooms[0] -= 0 if request.embedding_in_ram else embedding_bytes(request.model, request.dtype)
        rooms[-1] -= self._head
        return rooms

    def weights(self, experts: int) -> list[int]:
        """Bytes of each layer, where so many experts are on the GPUs, as many in each layer that has some."""
        model = self.request.model
        each = -(-experts // max(1, len(model.moe_layers))) * expert_bytes(self.request)
        return [
            own + (each if layer.moe is not None else 0) for own, layer in zip(self._layers, model.layers, strict=True)
        ]

    @cached_property
    def _layers(self) -> list[int]:
        """Bytes of each layer without routed experts: weights, keys and values, a sequence's own state."""
        model, known = self.request.model, dict[object, int]()
        for index, layer in enumerate(model.layers):
            if layer not in known:
                part = replace(self.request, model=some_layers(model, index, index + 1))
                known[layer] = self._dense(part.model) - self._head + part.kv_bytes(self.kv_tokens) + part.slot_bytes
        return [known[layer] for layer in model.layers]

    @cached_property
    def _head(self) -> int:
        """Bytes of the last norm and the head: whatever the layers, a model has them once."""
        model = self.request.model
        one, other, both = (self._dense(some_layers(model, *each)) for each in ((0, 1), (1, 2), (0, 2)))
        return one + other - both

    @cached_property
    def _workspace(self) -> int:
        """Bytes of steps on each GPU, without sequences' own states."""
        stages = len(self.gpus)
        return GpuRoom(self.request, self.gpus[0]).workspace // stages - self.request.slot_bytes + self.extra

    def _dense(self, model: ModelConfig) -> int:
        """Without the embedding."""
        return dense_bytes(model, self.request.dtype, self.request.stored, embedding_in_ram=True)


def some_layers(model: ModelConfig, first: int, end: int) -> ModelConfig:
    """The model as if it had these layers alone."""
    return replace(model, layers=model.layers[first:end], drafts=None, drafter=None)


def in_stages(
    request: MemoryRequest, memory: GpuMemory
) -> tuple[GpuMemory, tuple[StagePlan, ...], Decisions]:
    """The sizes, with as many experts less as borders between layers cost; and the stages, () for one GPU. Raises
    GpuTooSmall."""
    if request.config.pipeline_parallel_size == 1:
        return memory, (), ()
    gpus = gpus_of_stages(request.config, request.machine)
    extra = memory.ring_bytes + GpuRoom(request, gpus[0]).scratch_beyond(memory.step_tokens)
    rows = step_rows(request, memory.step_tokens) if memory.experts == request.model.routed_experts else 0
    sizes = StageSizes(request, gpus, memory.memory.kv_tokens, extra, border_bytes(request.model, rows))
    sizes, memory = _shorter_cache(sizes, memory)
    experts = _most_experts(sizes, memory)
    if experts < memory.experts and (short := short_of_ram(request, experts, False)):
        raise GpuTooSmall(f"borders between stages leave more experts in CPU memory: {short}")
    weights = sizes.weights(experts)
    borders = split(weights, sizes.rooms(), [_gbps(gpu) for gpu in gpus])
    assert borders is not None, "the experts were chosen so that they fit"
    stages = _stages(gpus, borders, shares(borders, weights))
    about = (
        Decision("stages", str(len(stages)), "--pipeline-parallel-size; the fastest GPU is filled first"),
        *(
            Decision(f"stage {number}", f"layers {stage.first} to {stage.end - 1}", _why(stage, gpu))
            for number, (stage, gpu) in enumerate(zip(stages, gpus, strict=True))
        ),
    )
    less = (memory.experts - experts) * expert_bytes(request)
    plan = replace(memory.memory, weight_bytes=memory.memory.weight_bytes - less)
    fewer = replace(memory, experts=experts, memory=plan)
    return (fewer if experts == memory.experts else _with_reason(fewer, request)), stages, about


def _with_reason(memory: GpuMemory, request: MemoryRequest) -> GpuMemory:
    """Why experts that the borders between layers left in CPU memory are not streamed, if they are not."""
    if memory.ring_bytes:
        return memory
    threshold = request.config.kt_gpu_prefill_token_threshold
    return replace(memory, ring_reason=LEFT_BY_BORDERS if threshold else NO_STREAMS)


def _shorter_cache(sizes: StageSizes, memory: GpuMemory) -> tuple[StageSizes, GpuMemory]:
    """With fewer tokens of the KV cache, down to the context, where experts would lose their places otherwise: all of
    them, or those that were asked for."""
    request, planned = sizes.request, memory.memory
    flagged, _ = asked_experts(request.config, request.model)
    experts_first = flagged is not None or memory.experts == request.model.routed_experts
    if request.config.max_total_tokens is not None or not experts_first:
        return sizes, memory
    step = max(1, (planned.kv_tokens - planned.context_length) // CACHE_STEPS)
    for tokens in range(planned.kv_tokens, planned.context_length - 1, -step):
        shorter = replace(sizes, kv_tokens=tokens)
        if fits(shorter.weights(memory.experts), shorter.rooms()):
            break
    else:
        return sizes, memory
    reason = planned.kv_reason if tokens == planned.kv_tokens else f"{planned.kv_reason}; {LESS_CACHE}"
    return shorter, replace(memory, memory=replace(planned, kv_tokens=tokens, kv_reason=reason))


def _most_experts(sizes: StageSizes, memory: GpuMemory) -> int:
    """Up to the planned ones. Raises GpuTooSmall where so many were asked for, or not even the layers fit."""
    rooms = sizes.rooms()
    if fits(sizes.weights(memory.experts), rooms):
        return memory.experts
    wanted_experts, flag = asked_experts(sizes.request.config, sizes.request.model)
    low, high = -1, memory.experts
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes.weights(middle), rooms) else (low, middle)
    if low < 0 or wanted_experts is not None:
        has = " and ".join(gib(max(0, room)) for room in rooms)
        largest = gib(max(sizes.weights(max(0, wanted_experts or 0))))
        why = f"{flag}: " if wanted_experts is not None else ""
        raise GpuTooSmall(
            f"{why}the GPUs have room for {has} of layers, the largest of which takes {largest}; "
            "a smaller --max-total-tokens or --context-length leaves more room"
        )
    return low


def _stages(gpus: Sequence[Gpu], borders: Sequence[int], nbytes: Sequence[int]) -> tuple[StagePlan, ...]:
    each = zip(gpus, pairwise(borders), nbytes, strict=True)
    return tuple(StagePlan(gpu.name, gpu.uuid, first, end, nbytes) for gpu, (first, end), nbytes in each)


def _gbps(gpu: Gpu) -> float:
    known = gpu_model(gpu.name)
    return GPU_GBPS if known is None else known.gbps


def _why(stage: StagePlan, gpu: Gpu) -> str:
    return f"GPU {gpu.number}, {stage.name}: {gib(stage.nbytes)} of {gib(gpu.free_bytes)} free"
