"""`GpuPlan`: what the GPU gets and how it is used; whether one can be used; and the sums of its memory.

What goes there is divided in `planner/sizing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu, is_new_enough, too_old
from tandem.machine.machine import Machine
from tandem.mechanisms.cost import cost_of
from tandem.planner.attention_backend import why_unread
from tandem.planner.choices.deterministic import depends_on_others
from tandem.planner.choices.expert_streaming import graph_bytes
from tandem.planner.choices.left_to_ram import expert_bytes
from tandem.planner.cuda_graphs import captured_sizes, fed_bytes, plain_graph_sizes
from tandem.planner.expert_sizes import expert_sizes, unpacked_experts
from tandem.planner.forecast.ledger import VRAM, Ledger, LedgerEntry, ledger
from tandem.planner.memory import (
    GPU_PREFILL_TOKENS,
    ROPE_WORDS,
    MemoryPlan,
    MemoryRequest,
    gib,
)
from tandem.planner.stages.chunks import border_bytes
from tandem.planner.stages.pool import FIELD as STAGE_FIELD
from tandem.planner.stages.pool import pool_of
from tandem.spec.gpu_scratch import StepSize, expert_row_bytes, expert_scratch_bytes
from tandem.spec.model_config import ModelConfig, draft_experts, embedding_bytes, rope_bytes
from tandem.spec.stored import UNQUANTISED, StoredFormats

MAX_HEAD = 256  # channels of a key
GPU_FRACTION = 0.9  # of free GPU memory
GPU_WORKSPACE_BYTES = 3 << 28  # activations, sums of attention, libraries, CUDA graphs but for their logits
MAX_PATIENCE_SECONDS = 30.0
SHARE_FIELDS = ("kt_gpu_experts_ratio", "kt_num_gpu_experts")
# Wishes that only a GPU can meet.
GPU_FIELDS = ("device", *SHARE_FIELDS, "kt_enable_dynamic_expert_update", *STAGE_FIELD)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers `first` to `end` - 1 on one GPU. nbytes: that they take of its memory."""

    name: str
    uuid: str
    first: int
    end: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Division of one GPU's memory. memory: of all that is there, experts included."""

    experts: int  # (layer, expert) pairs there
    expert_reason: str
    memory: MemoryPlan
    ring_bytes: int = 0  # that experts in CPU memory are brought to
    ring_reason: str = "every expert is on the GPU"
    exchange_bytes: int = 0  # that experts on their way to slots are in; 0: experts stay where they are
    exchange_reason: str = ""  # why they move, or stay
    prompt_sizes: tuple[int, ...] = ()  # rows of chunks of prompts that are CUDA graphs, too
    draft_experts: bool = False  # those of a draft layer are there, too: all or none
    step_tokens: int = GPU_PREFILL_TOKENS  # of a step, where nothing was asked; scratch is counted for so many
    step_reason: str = ""  # where it is not the usual one
    shared_tokens: int = 0  # prompt tokens of a step that others wait in, at most; 0: as many as of any step
    cramped: str = ""  # what there is no room for; "": nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Plan of one GPU: its memory, its CUDA graphs, and the kernels that it runs."""

    name: str
    sizes: GpuMemory
    placement: str
    statistics: str | None  # file of activation counts
    graph_sizes: tuple[int, ...]  # rows of CUDA graphs, () for none
    patience_seconds: float  # that a kernel waits for the CPU's experts
    live: bool = False  # experts move while serving
    uuid: str = ""  # "": any GPU
    rank_uuids: tuple[str, ...] = ()  # of every rank's GPU; (): there is one rank
    no_nvlink: bool = False  # between these, as the machine says
    attention: str = "triton"  # whose kernels compute it: or "torch", "flashinfer"
    foresight: bool = True  # in small batches the CPU prefetches the next layer's probable experts
    stream_from: int | None = 0  # rows of a step that brings the CPU's experts; 0: never, None: where that is faster
    deferred: int = 0  # of a token's experts in CPU memory, at most so many are added one layer late; lossy
    plain_graph_sizes: tuple[int, ...] = ()  # of graph_sizes, those with a second graph for steps without drafts
    reserved_sms: int = 0  # multiprocessors that graphs of prompts leave to steps
    embedding_in_ram: bool = False  # in pinned CPU memory, whose rows the GPU reads
    stages: tuple[StagePlan, ...] = ()  # whose layers are on several GPUs; (): one GPU has all of them
    has_wgmma: bool = False  # whole warpgroups multiply experts' codes in prompts
    pipelined_chunks: int = 1  # of one prompt, at most, that stages compute one behind the other in a step

    @property
    def streams_experts(self) -> bool:
        """Some steps bring experts out of CPU memory."""
        return self.sizes.ring_bytes > 0


def usable_gpu(config: EngineConfig, model: ModelConfig, machine: Machine) -> tuple[Gpu | None, str]:
    """The GPU to use and why, or None and why not. Raises ConfigError when one was asked for in vain."""
    pool = pool_of(config, model, machine)
    if config.device == "cpu":
        return None, "--device cpu"
    gpu = pool or next(filter(is_new_enough, machine.gpus), None)
    why_not = _why_no_gpu(config, model, machine)
    if why_not and config.device == "cuda":
        raise ConfigError(f"--device cuda: {why_not}; take --device cpu or auto", fields=("device",))
    if pool is not None and why_not:
        raise ConfigError(
            f"--pipeline-parallel-size {config.pipeline_parallel_size}: {why_not}; leave it out", fields=STAGE_FIELD
        )
    if gpu is None or why_not:
        return None, why_not
    if pool is not None:
        return pool, f"{pool.name}, {gib(pool.free_bytes)} free together"
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
    streams = (block.hyper for layer in model.layers for block in layer.blocks if block.hyper is not None)
    parts = dict.fromkeys([*model.mixers, *model.bodies, *streams])
    return next(filter(None, (cost_of(part).why_no_gpu() for part in parts)), "") or why_unread(model, MAX_HEAD)


def needs_gpu(config: EngineConfig) -> str:
    """The first flag that only a GPU can meet; "" where none was given."""
    wishes = {
        "--device cuda": config.device == "cuda",
        "--kt-num-gpu-experts": config.kt_num_gpu_experts,
        "--kt-gpu-experts-ratio": config.kt_gpu_experts_ratio,
        "--kt-enable-dynamic-expert-update": config.kt_enable_dynamic_expert_update,
        "--pipeline-parallel-size": config.pipeline_parallel_size > 1,
    }
    return next((flag for flag, wish in wishes.items() if wish), "")


def gpu_ledger(request: MemoryRequest, gpu: Gpu, plan: GpuPlan, kv_bytes: int) -> Ledger:
    """Ledger of the GPU's memory."""
    memory, step_tokens, ring_bytes = plan.sizes.memory, plan.sizes.step_tokens, plan.sizes.ring_bytes
    experts, each, scratch = plan.sizes.experts, expert_bytes(request), scratch_bytes(request, step_tokens)
    images, sizes = request.image_entries(gpu=True), expert_sizes(request)
    fixed = GPU_WORKSPACE_BYTES + request.slot_bytes + request.rope_bytes + scratch_bytes(request)
    fixed += sum(entry.nbytes for entry in images)
    logits = workspace_bytes(request) - fixed
    dense = dense_bytes(request.model, request.dtype, request.stored, request.embedding_in_ram)
    prompts = graph_bytes(request, gpu, plan.sizes.prompt_sizes, plan.streams_experts, plan.reserved_sms)
    sums = min(GPU_WORKSPACE_BYTES, decode_sums_bytes(request.model, max(plan.graph_sizes, default=1)))
    unpacking = unpacking_bytes(gpu, request.model, step_rows(request, step_tokens))
    others, stages = GPU_WORKSPACE_BYTES - sums + unpacking, max(1, len(plan.stages))
    pipelined = plan.pipelined_chunks > 1
    borders = (stages - 1) * border_bytes(request.model, step_rows(request, step_tokens)) * pipelined
    each_stage = workspace_bytes(request) + unpacking + scratch - scratch_bytes(request) + ring_bytes
    entries = [
        LedgerEntry(
            "dense weights", dense, "without the embedding" if request.embedding_in_ram else "embedding included"
        ),
        LedgerEntry(
            "experts", sizes.gpu_bytes(experts), f"{experts} of {request.model.routed_experts}, {sizes.text()}"
        ),
        LedgerEntry(
            "draft experts", draft_experts(request.model) * plan.sizes.draft_experts * each, "of the draft layer"
        ),
        LedgerEntry("KV cache", kv_bytes, f"{memory.kv_tokens} tokens"),
        LedgerEntry("states", request.slot_bytes, "of sequences, whatever their length"),
        LedgerEntry("rotary tables", rope_bytes(request.model, memory.context_length), ROPE_WORDS),
        *images,
        LedgerEntry("prompt scratch", scratch, "of attention in long prompts; layers share it"),
        LedgerEntry("graph logits", logits, "results that each CUDA graph keeps, float32"),
        LedgerEntry("prompt graphs", prompts, "themselves, rows between their kernels, and logits"),
        LedgerEntry("attention sums", sums, "partial results of attention while decoding"),
        LedgerEntry("workspace", others, "of one step, libraries, CUDA graphs"),
        LedgerEntry("other stages", (stages - 1) * each_stage, "of each further GPU"),
        LedgerEntry("borders", borders, "two chunks of a prompt, on their way to each further GPU"),
        LedgerEntry("ring", ring_bytes, "buffers for experts that come from CPU memory for long prompts"),
        LedgerEntry("exchanges", plan.sizes.exchange_bytes, "buffers for experts that change places"),
    ]
    return ledger(VRAM, entries, memory.budget_bytes, gpu.free_bytes)


def dense_bytes(
    model: ModelConfig, dtype: str, stored: StoredFormats = UNQUANTISED, embedding_in_ram: bool = False
) -> int:
    """Weights that are always on the GPU, the embedding included unless it is in CPU memory."""
    embedding = 0 if embedding_in_ram else embedding_bytes(model, dtype)
    return model.dense_bytes(dtype, stored, for_gpu=True) + embedding


def workspace_bytes(request: MemoryRequest) -> int:
    """GPU bytes of steps, and of the float32 logits that every graph keeps."""
    arguments = request.config, request.model, request.max_running_requests, request.draft_tokens
    sizes = captured_sizes(*arguments, request.step_tokens)
    rows = sum(sizes) + sum(plain_graph_sizes(*arguments))
    if request.model.shard.ranks > 1:  # ranks' columns as they come, and side by side
        rows += 2 * max(sizes, default=1)
    shared = request.slot_bytes + request.rope_bytes + scratch_bytes(request)
    shared += sum(entry.nbytes for entry in request.image_entries(gpu=True))
    return GPU_WORKSPACE_BYTES + rows * request.model.vocab * 4 + shared


def unpacking_bytes(gpu: Gpu, model: ModelConfig, tokens: int) -> int:
    """For unpacked experts of steps of so many tokens, and for rows between the matrices of feed-forwards."""
    rows = fed_bytes(model, tokens, expert_row_bytes(gpu.memory_bytes))
    return expert_scratch_bytes(gpu.memory_bytes, *unpacked_experts(model)) + rows


def step_rows(request: MemoryRequest, tokens: int) -> int:
    """Rows of a step, at most. tokens: the default where no chunk size was asked for."""
    chunk = request.config.chunked_prefill_size
    return tokens if chunk is None else chunk if chunk > 0 else request.longest_sequence


def scratch_bytes(request: MemoryRequest, tokens: int = GPU_PREFILL_TOKENS) -> int:
    """That layers share. tokens: of a step, if nothing was asked."""
    context, rows = request.longest_sequence, step_rows(request, tokens)
    hyper, hidden, kinds = request.model.layers[0].hyper, request.model.hidden, set(request.model.bodies)
    size, streams = StepSize(rows, context, request.max_running_requests), 0 if hyper is None else hyper.streams
    mixed = 0 if hyper is None else cost_of(hyper).scratch_bytes(size, hidden, streams)
    return mixed + max((cost_of(each).scratch_bytes(size, hidden, streams) for each in kinds), default=0)


def decode_sums_bytes(model: ModelConfig, rows: int) -> int:
    """GPU bytes of attention's partial sums for `rows` decoding rows, which layers share."""
    return max((cost_of(mixer).decode_sums_bytes(rows) for mixer in model.mixers), default=0)
