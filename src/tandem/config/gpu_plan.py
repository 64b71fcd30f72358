"""What of a model goes to the GPU: the only place that divides GPU memory between weights, KV cache and experts.

Dense weights and the embedding are always there. Then come the experts that were asked for. The KV cache takes the
rest.

Where nothing was asked, the KV cache takes a quarter of the room. It takes more, up to half, for one request of 32768
tokens (or of --context-length). Experts take the rest, and the KV cache what they leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.config.attention_backend import why_unread
from tandem.config.choices.deterministic import depends_on_others
from tandem.config.choices.left_to_ram import asked_experts, check_ram, expert_bytes
from tandem.config.choices.travelling import experts_kept_off, graph_bytes, ring_for, streams_not
from tandem.config.cuda_graphs import captured_sizes, prompt_sizes, settled_sizes
from tandem.config.engine_config import EngineConfig
from tandem.config.forecast.ledger import VRAM, Entry, Ledger, ledger
from tandem.config.gpu_scratch import (
    LEAST_ROW_BYTES,
    StepSize,
    decode_sums_bytes,
    expert_row_bytes,
    expert_scratch_bytes,
    mixer_scratch_bytes,
    pair_bytes,
)
from tandem.config.gpus import Gpu, is_new_enough, too_old
from tandem.config.layers import DeltaRule, Gqa, Mixer
from tandem.config.machine import Machine
from tandem.config.memory import (
    GPU_PREFILL_TOKENS,
    LEAST_CONTEXT,
    ROPE_WORDS,
    MemoryPlan,
    MemoryRequest,
    gib,
    long_step_tokens,
    wanted_context,
)
from tandem.config.model_config import ModelConfig, draft_experts, rope_bytes
from tandem.config.speculation.choice import check_drafts_on_gpu
from tandem.config.state import DTYPE_BYTES
from tandem.config.stored import UNQUANTISED, StoredFormats
from tandem.errors import ConfigError, GpuTooSmall

MAX_HEAD = 256  # channels of a key: several blocks of them lie in shared memory at a time
MAX_DELTA_HEAD = 1 << 15  # elements of a delta net's head that a program holds, padded to powers of two
GPU_FRACTION = 0.9  # of free GPU memory
GPU_WORKSPACE_BYTES = 2 << 30  # activations, sums of attention, libraries, CUDA graphs but for their logits
EXPERT_WORKSPACE_BYTES = 512 << 20  # of it, for unpacked experts
KV_SHARE = 4  # the KV cache takes 1/4 of the room by default
DEFAULT_CONTEXT = 32768  # tokens: experts do not make room for more unless --context-length asks for it
MAX_PATIENCE_SECONDS = 30.0
SHARE_FIELDS = ("kt_gpu_experts_ratio", "kt_num_gpu_experts")
GPU_FIELDS = ("device", *SHARE_FIELDS, "kt_enable_dynamic_expert_update")  # wishes that only a GPU can meet


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What the GPU gets and how it is used."""

    name: str
    experts: int  # (layer, expert) pairs there
    placement: str
    statistics: str | None  # file of activation counts
    graph_sizes: tuple[int, ...]  # rows of CUDA graphs, () for none
    patience_seconds: float  # that a kernel waits for the CPU's experts
    live: bool = False  # experts move while serving
    uuid: str = ""  # "": any GPU
    attention: str = "triton"  # whose kernels compute it: or "torch", "flashinfer"
    foresight: bool = True  # in small batches the CPU prefetches the next layer's probable experts
    stream_from: int | None = 0  # rows of a step that brings the CPU's experts; 0: never, None: where that is faster
    ring_bytes: int = 0  # of GPU memory that they are brought to
    deferred: int = 0  # of a token's experts in CPU memory, at most so many are added one layer late; lossy
    prompt_sizes: tuple[int, ...] = ()  # rows of chunks of prompts that are CUDA graphs, too
    draft_experts: bool = False  # those of a draft layer are there, too: all or none
    settled_sizes: tuple[int, ...] = ()  # of graph_sizes, those with a second graph for steps without guesses
    spared: int = 0  # multiprocessors that graphs of prompts leave to steps
    step_tokens: int = GPU_PREFILL_TOKENS  # of a step, where nothing was asked; scratch is counted for so many
    step_reason: str = ""
    shared_tokens: int = 0  # prompt tokens of a step that others wait in, at most; 0: as many as of any step


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """experts: (layer, expert) pairs on the GPU; memory: its own, these included; ring_bytes: for those that travel."""

    experts: int
    expert_reason: str
    memory: MemoryPlan
    ring_bytes: int = 0
    ring_reason: str = "every expert is on the GPU"
    prompt_sizes: tuple[int, ...] = ()
    draft_experts: bool = False
    step_tokens: int = GPU_PREFILL_TOKENS
    step_reason: str = ""  # where it is not the usual one
    shared_tokens: int = 0


def usable_gpu(config: EngineConfig, model: ModelConfig, machine: Machine) -> tuple[Gpu | None, str]:
    """The GPU to use and why, or None and why not. Raises ConfigError when one was asked for in vain."""
    if config.device == "cpu":
        return None, "--device cpu"
    gpu = next(filter(is_new_enough, machine.gpus), None)
    why_not = _why_no_gpu(config, model, machine)
    if why_not and config.device == "cuda":
        raise ConfigError(f"--device cuda: {why_not}; take --device cpu or auto", fields=("device",))
    if gpu is None or why_not:
        return None, why_not
    number = f"GPU {gpu.number}, " if gpu.number or len(machine.gpus) > 1 else ""
    return gpu, f"{number}{gpu.name}, {gib(gpu.free_bytes)} free"


def _why_no_gpu(config: EngineConfig, model: ModelConfig, machine: Machine) -> str:
    if not machine.gpus:
        return machine.no_gpu
    if not any(map(is_new_enough, machine.gpus)):
        return too_old(machine.gpus[0])
    if missing := [name for name in machine.gpu_missing if name != "cuda-core"]:
        return f"{machine.gpus[0].name} cannot be used: {' and '.join(missing)} is missing"
    if config.enable_deterministic_inference and (why := depends_on_others(config, model)):
        return f"{why}, against --enable-deterministic-inference"
    if config.dtype == "float32":
        return "the GPU kernels compute in bfloat16, not float32"
    if uneven := [size for size in (model.hidden, model.expert_channels) if size % 8]:
        # rows are handed to the CPU 16 bytes at a time
        return f"the GPU kernels need a hidden size that is a multiple of 8, not {uneven[0]}"
    return without_kernels(model)


def without_kernels(model: ModelConfig) -> str:
    """Why there are no GPU kernels for it, whatever the machine; "": there are."""
    return next(filter(None, map(_without_kernels, model.mixers)), "") or why_unread(model, MAX_HEAD)


def _without_kernels(mixer: Mixer) -> str:
    """Why there are no kernels for it: a head's memory fits in no registers, or its keys in no shared memory."""
    if isinstance(mixer, Gqa) and mixer.head_dim > MAX_HEAD:
        return f"the GPU kernels read heads of at most {MAX_HEAD} channels, not {mixer.head_dim}"
    if not isinstance(mixer, DeltaRule) or mixer.padded_head <= MAX_DELTA_HEAD:
        return ""
    return f"heads of gated delta nets may have 128 x 256 channels on a GPU, not {mixer.k_dim} x {mixer.v_dim}"


def needs_gpu(config: EngineConfig) -> str:
    """The first flag that only a GPU can meet; "" where none was given."""
    wishes = {
        "--device cuda": config.device == "cuda",
        "--kt-num-gpu-experts": config.kt_num_gpu_experts,
        "--kt-gpu-experts-ratio": config.kt_gpu_experts_ratio,
        "--kt-enable-dynamic-expert-update": config.kt_enable_dynamic_expert_update,
    }
    return next((flag for flag, wish in wishes.items() if wish), "")


def size_gpu(request: MemoryRequest, gpu: Gpu) -> GpuMemory:
    """Raises GpuTooSmall with the numbers when the GPU or the CPU memory beside it is too small."""
    found = _sized(request, gpu, 0)
    check_drafts_on_gpu(request.config, request.model)
    if found.experts >= request.model.routed_experts:
        return _with_long_steps(request, gpu, found)
    if why_not := streams_not(request, gpu):
        return replace(found, ring_reason=why_not)
    ring = ring_for(request, gpu).nbytes
    tokens = long_step_tokens(request.model)
    more = _scratch_bytes(request, tokens) - _scratch_bytes(request)
    try:
        found = replace(_sized(request, gpu, ring + more), ring_bytes=ring, ring_reason="", step_tokens=tokens)
    except ConfigError as error:
        return replace(found, ring_reason=f"{gib(ring)} of GPU memory for experts that travel: {error}")
    return _with_prompts(request, gpu, found, ring + more, tokens)


def _with_long_steps(request: MemoryRequest, gpu: Gpu, found: GpuMemory) -> GpuMemory:
    """For prompts that are alone, if experts, context and graphs of prompts keep their room. Not where prompts can be
    no graphs: steps are not cut there, and who comes would wait for a whole one."""
    tokens, short = long_step_tokens(request.model), _with_prompts(request, gpu, found)
    if request.config.chunked_prefill_size is not None or not prompt_sizes(request.config, request.model):
        return short
    more = _scratch_bytes(request, tokens) - _scratch_bytes(request)
    memory = _memory_without(request, gpu, found, more)
    if memory is not None:
        why = f"default, for a prompt alone; {GPU_PREFILL_TOKENS} of prompts that others wait for"
        found = replace(found, memory=memory, step_tokens=tokens, step_reason=why, shared_tokens=GPU_PREFILL_TOKENS)
        found = _with_prompts(request, gpu, found, more)
        if found.prompt_sizes:
            return found
    why = f"default; {tokens} for a prompt alone would take {gib(more)} from experts, context or prompt graphs"
    return replace(short, step_reason=why)


def _memory_without(request: MemoryRequest, gpu: Gpu, found: GpuMemory, nbytes: int) -> MemoryPlan | None:
    """The memory with so many bytes less; None: experts lose their places then, or the context is shorter."""
    if not _fits(request, gpu, nbytes):
        return None
    smaller = _sized(request, gpu, nbytes)
    worse = smaller.experts < found.experts or smaller.memory.context_length < found.memory.context_length
    return None if worse else smaller.memory


def _with_prompts(request: MemoryRequest, gpu: Gpu, found: GpuMemory, ring: int = 0, streamed: int = 0) -> GpuMemory:
    """And graphs of prompts, if they fit. ring: bytes taken already; streamed: rows of steps that bring experts."""
    sizes, spared = prompt_sizes(request.config, request.model, streamed), request.config.spared_multiprocessors
    graphs = graph_bytes(request, gpu, sizes, streamed > 0, spared)
    memory = _memory_without(request, gpu, found, ring + graphs)
    return found if memory is None else replace(found, memory=memory, prompt_sizes=sizes)


def _sized(request: MemoryRequest, gpu: Gpu, ring: int, explains: bool = True) -> GpuMemory:
    """explains: an error says which flags would help. Each of them is tried."""
    config, model = request.config, request.model
    budget = int(gpu.free_bytes * (config.mem_fraction_static or GPU_FRACTION))
    dense = dense_bytes(model, request.dtype, request.stored)
    workspace = workspace_bytes(request) + unpacking_bytes(gpu, model, config.chunked_prefill_size) + ring
    room = budget - dense - workspace
    context, context_reason = wanted_context(request)
    asked, expert_reason = _experts_asked(request)
    per_expert = max(1, expert_bytes(request))
    kv_room = room - (asked or 0) * per_expert
    drafts = _draft_bytes(request, kv_room)
    kv_room -= drafts
    if kv_room < request.kv_bytes(min(context, LEAST_CONTEXT)):
        raise GpuTooSmall(_too_small(gpu, budget, (dense, workspace, room), asked or 0, per_expert))
    least, way_out = _least_tokens(request, context, kv_room), ""
    if asked is None:
        way_out = "; --context-length takes it from experts"
        asked = min(model.routed_experts, (kv_room - request.kv_bytes(least)) // per_expert)
        expert_reason = "what fits beside dense weights and KV cache"
        kv_room -= asked * per_expert
    tokens, kv_reason = _kv_tokens(request, context, kv_room, least)
    if tokens < context:
        context, context_reason = tokens, _shortened(request, context, tokens) + way_out
    check_ram(request, asked, bool(drafts), (lambda other: _fits(other, gpu, ring)) if explains else None)
    weights = dense + asked * expert_bytes(request) + drafts
    memory = MemoryPlan(weights, budget, context, tokens, context_reason, kv_reason)
    return GpuMemory(asked, expert_reason, memory, draft_experts=bool(drafts))


def _fits(request: MemoryRequest, gpu: Gpu, ring: int) -> bool:
    try:
        _sized(request, gpu, ring, explains=False)
    except ConfigError:
        return False
    return True


def _draft_bytes(request: MemoryRequest, room: int) -> int:
    """Of a draft layer's experts, if they are to be on the GPU: each guess uses them. They leave room for one request,
    or for what was asked for."""
    asked, context = request.config.max_total_tokens, wanted_context(request)[0]
    nbytes = draft_experts(request.model) * expert_bytes(request)
    least = min(context, DEFAULT_CONTEXT) if asked is None else asked
    fits = nbytes + request.kv_bytes(least) <= room
    return nbytes if fits and not experts_kept_off(request.model, request.expert_format, request.stored) else 0


def gpu_ledger(request: MemoryRequest, gpu: Gpu, plan: GpuPlan, memory: MemoryPlan, kv_bytes: int) -> Ledger:
    """Of the GPU's memory."""
    experts, each, scratch = plan.experts, expert_bytes(request), _scratch_bytes(request, plan.step_tokens)
    fixed = GPU_WORKSPACE_BYTES + request.slot_bytes + request.rope_bytes + _scratch_bytes(request)
    logits = workspace_bytes(request) - fixed
    dense = dense_bytes(request.model, request.dtype, request.stored)
    prompts = graph_bytes(request, gpu, plan.prompt_sizes, plan.ring_bytes > 0, plan.spared)
    sums = min(GPU_WORKSPACE_BYTES, decode_sums_bytes(request.model.mixers, max(plan.graph_sizes, default=1)))
    unpacking = unpacking_bytes(gpu, request.model, request.config.chunked_prefill_size)
    others = GPU_WORKSPACE_BYTES - sums + unpacking
    entries = [
        Entry("dense weights", dense, "embedding included"),
        Entry("experts", experts * each, f"{experts} of {request.model.routed_experts}, {gib(each)} each"),
        Entry("draft experts", draft_experts(request.model) * plan.draft_experts * each, "of the layer that guesses"),
        Entry("KV cache", kv_bytes, f"{memory.kv_tokens} tokens"),
        Entry("states", request.slot_bytes, "of sequences, whatever their length"),
        Entry("rotary tables", rope_bytes(request.model, memory.context_length), ROPE_WORDS),
        Entry("prompt scratch", scratch, "that layers share"),
        Entry("graph logits", logits, "float32, of every CUDA graph"),
        Entry("prompt graphs", prompts, "themselves, rows between their kernels, and logits"),
        Entry("attention sums", sums, "of rows that decode, a part of their keys each"),
        Entry("workspace", others, "of one step, libraries, CUDA graphs"),
        Entry("ring", plan.ring_bytes, "of experts that travel to the GPU for a step"),
    ]
    return ledger(VRAM, entries, memory.budget_bytes, gpu.free_bytes)


def dense_bytes(model: ModelConfig, dtype: str, stored: StoredFormats = UNQUANTISED) -> int:
    """Weights that are always on the GPU, the embedding included."""
    embedding = model.vocab * model.hidden * DTYPE_BYTES[dtype]
    return model.dense_bytes(dtype, stored, on_gpu=True) + embedding


def workspace_bytes(request: MemoryRequest) -> int:
    """Of steps, and the float32 logits that every graph keeps."""
    asked = request.config, request.model, request.max_running_requests, request.guesses
    rows = sum(captured_sizes(*asked)) + sum(settled_sizes(*asked))
    shared = request.slot_bytes + request.rope_bytes + _scratch_bytes(request)
    return GPU_WORKSPACE_BYTES + rows * request.model.vocab * 4 + shared


def unpacking_bytes(gpu: Gpu, model: ModelConfig, chunk: int | None = None) -> int:
    """For experts of long prompts and their rows, beyond what any GPU's workspace has for them."""
    experts = max(0, expert_scratch_bytes(gpu.memory_bytes) - EXPERT_WORKSPACE_BYTES)
    tokens = long_step_tokens(model) if chunk is None else chunk if chunk > 0 else model.max_positions
    pairs = tokens * (model.moe.router.top_k + model.moe.fusible_shared)
    rows = pairs * pair_bytes(model.expert_channels, model.moe.experts.width)
    return experts + max(0, min(rows, expert_row_bytes(gpu.memory_bytes)) - LEAST_ROW_BYTES)


def _scratch_bytes(request: MemoryRequest, tokens: int = GPU_PREFILL_TOKENS) -> int:
    """That layers share. tokens: of a step, if nothing was asked."""
    context, chunk = wanted_context(request)[0], request.config.chunked_prefill_size
    rows = tokens if chunk is None else chunk if chunk > 0 else context
    hyper, hidden = request.model.layers[0].hyper, request.model.hidden
    kinds = set(request.model.mixers)
    size = StepSize(rows, context, request.max_running_requests)
    return max((mixer_scratch_bytes(each, hyper, hidden, size) for each in kinds), default=0)


def _experts_asked(request: MemoryRequest) -> tuple[int | None, str]:
    """0 where the GPU cannot have any. Raises ConfigError if it should."""
    asked, reason = asked_experts(request.config, request.model)
    why_not = experts_kept_off(request.model, request.expert_format, request.stored)
    if why_not and asked:
        raise ConfigError(
            f"{reason}: {why_not}; leave the flag out to have the experts computed on the CPU, or convert them while "
            "loading with --kt-method INT8 or INT4",
            fields=SHARE_FIELDS,
        )
    return (0, f"{why_not}, so the CPU computes them") if why_not else (asked, reason)


def _least_tokens(request: MemoryRequest, context: int, room: int) -> int:
    """Of the KV cache, before there are experts. Raises ConfigError when it was asked for and does not fit."""
    asked = request.config.max_total_tokens
    if asked is not None:
        if request.kv_bytes(asked) > room:
            raise ConfigError(
                f"--max-total-tokens {asked} needs {gib(request.kv_bytes(asked))} of GPU memory; "
                f"give at most {request.kv_tokens(room)}",
                fields=("max_total_tokens",),
            )
        return asked
    one = context
    if request.config.context_length is None:
        one = min(context, DEFAULT_CONTEXT, request.kv_tokens(room // 2))
    share = max(request.kv_tokens(room // KV_SHARE), one)
    return min(request.kv_tokens(room), request.max_running_requests * context, share)


def _kv_tokens(request: MemoryRequest, context: int, room: int, least: int) -> tuple[int, str]:
    """What experts left: up to one full context, if `least` is not that much."""
    if request.config.max_total_tokens is not None:
        return least, "--max-total-tokens"
    reason = (
        "a quarter of the GPU memory beside the dense weights, or one request; more where experts leave it"
    )
    return min(request.kv_tokens(room), request.max_running_requests * context, max(least, context)), reason


def _shortened(request: MemoryRequest, context: int, tokens: int) -> str:
    """Why a context is only `tokens` long. Raises ConfigError if more was asked for."""
    if request.config.context_length is not None:
        raise ConfigError(
            f"--context-length {context} needs more KV cache than the {tokens} tokens that fit; give at most that",
            fields=("context_length",),
        )
    return f"what the KV cache holds (the model could do {context})"


def _too_small(gpu: Gpu, budget: int, sizes: tuple[int, int, int], experts: int, per_expert: int) -> str:
    dense, workspace, room = sizes
    most = max(0, room) // per_expert
    asked = f", {experts} experts {gib(experts * per_expert)}; at most {most} experts fit without a KV cache"
    return (
        f"{gpu.name} is too small: {gib(budget)} may be used, dense weights take {gib(dense)}, workspace "
        f"{gib(workspace)}{asked if experts else '; no KV cache fits beside them'}"
    )
