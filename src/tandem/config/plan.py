"""`Plan`: the outcome of `resolve(config, model, machine)`. What `kt serve --plan-only` prints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.config.choices.beside_gpu import host_share
from tandem.config.choices.cached import cached_as, cached_notices, cached_text
from tandem.config.choices.decision import Decision
from tandem.config.choices.deferral import deferral_notices
from tandem.config.choices.deterministic import deterministic, tier_reason
from tandem.config.choices.left_to_ram import expert_bytes
from tandem.config.choices.on_gpu import on_gpu
from tandem.config.choices.shared_experts import why_apart
from tandem.config.choices.threads import plan_threads
from tandem.config.engine_config import EngineConfig
from tandem.config.expert_format import (
    dense_choice,
    dtype_of,
    expert_format_of,
    stored_or_asked,
)
from tandem.config.forecast.ledger import Ledger
from tandem.config.gpu_plan import GPU_FIELDS, GpuPlan, gpu_ledger, needs_gpu, usable_gpu
from tandem.config.gpus import Gpu
from tandem.config.host_memory import HostMemory, host_ledger, host_memory
from tandem.config.in_place import against_in_place
from tandem.config.machine import Machine
from tandem.config.memory import (
    MemoryPlan,
    MemoryRequest,
    gib,
    long_step_tokens,
    memory_ledger,
    prefill_tokens,
    size_memory,
)
from tandem.config.model_config import STORED, ModelConfig, why_alone
from tandem.config.notices import notices
from tandem.config.ranks.ranked import decisions, ranked
from tandem.config.speculation.choice import (
    DRAFT_ALGORITHMS,
    SpeculationPlan,
    drafting,
    most_guesses,
    speculation,
    speculation_texts,
)
from tandem.config.state import page_tokens
from tandem.config.stored import UNQUANTISED, StoredFormats
from tandem.errors import ConfigError, DoesNotFit, GpuTooSmall

DEFAULT_SLOT_BYTES, LEAST_RUNNING = (
    1 << 30,
    4,
)  # of running sequences' own state, where no number was asked for
DEFAULT_RUNNING_REQUESTS = 64  # decoded together; more would only slow each other down on a CPU

@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the engine needs to know that the user may or may not have said. Immutable."""

    dtype: str  # "bfloat16" | "float32": activations, KV cache and dense weights
    expert_format: str  # of packed routed experts: "bf16" | "f32" | "int8" | "int4" | "stored": as they are
    tier: str  # kernel tier: "scalar" | "avx2" | "avx512" | "avx512_bf16" | "amx"
    cpus: tuple[int, ...]  # logical CPU of each pool thread, -1: not pinned; its length is the thread count
    context_length: int  # longest prompt + answer of one request, tokens
    page_size: int  # tokens per KV page
    num_pages: int  # KV pages of the whole cache
    max_running_requests: int  # sequences decoded together
    max_step_tokens: int  # token budget of one step: decode tokens + prefill chunks
    radix_cache: bool  # share KV pages of equal prefixes
    fuse_shared_experts: bool  # compute shared experts as extra always-chosen routed experts
    dense_codes: bool = False  # dense matrices stored as codes are computed from them, not from numbers
    parts: tuple[int, ...] = ()  # which part of the weights each pool thread reads; (): they are not divided
    part_nodes: tuple[int, ...] = ()  # the NUMA node whose memory each part is in; (): any
    decisions: tuple[Decision, ...] = field(default=())
    notices: tuple[str, ...] = field(default=())  # flags and keys that change nothing; start-up prints them
    num_window_pages: int = 0  # of layers that see a window; 0: they keep all tokens, as the others
    num_slots: int = 0  # for what models keep of a sequence beside pages; 0: this one keeps nothing
    gpu: GpuPlan | None = None  # None: everything runs on the CPU
    int8_activations: bool = False  # of CPU experts: rounded before each product
    experts_in_place: bool = False  # those in CPU memory are used in the checkpoint's own pages, not packed
    deterministic: bool = False  # a row has the same bits in every batch
    speculation: SpeculationPlan | None = None  # None: each step decodes one token per sequence
    ledgers: tuple[Ledger, ...] = field(default=())  # what it takes of each memory

    @property
    def guesses(self) -> int:
        """Of a sequence in a step, at most."""
        return 0 if self.speculation is None else self.speculation.most_guesses

    @property
    def drafts(self) -> bool:
        """Whether a draft layer guesses."""
        return self.speculation is not None and self.speculation.algorithm in DRAFT_ALGORITHMS


def resolve(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats = UNQUANTISED
) -> Plan:
    """What was asked + what the checkpoint is + what the machine has → what will be done.

    Raises ConfigError with every reason: each names its flag, and a model that does not fit its numbers.
    """
    refused, model = list[ConfigError](), cached_as(config, drafting(config, model))
    while True:
        try:
            plan = _resolve(config, model, machine, stored)
            break
        except ConfigError as error:
            refused.append(error)
            left = config.without(error.fields)
            if left == config:
                break
            config = left
    if refused:
        kind = DoesNotFit if isinstance(refused[-1], DoesNotFit) else ConfigError
        raise kind(*(reason for error in refused for reason in error.reasons))
    return plan


def machine_refusals(config: EngineConfig, machine: Machine) -> tuple[str, ...]:
    """What cannot be met on this machine, whatever the model."""
    reasons: list[str] = []
    for check in (lambda: plan_threads(config, machine), lambda: _tier(config, machine, [])):
        try:
            check()
        except ConfigError as error:
            reasons += error.reasons
    return tuple(reasons)


def _resolve(config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats) -> Plan:
    """With experts packed or where they lie. Raises ConfigError with one reason or a few."""
    config, model, machine = ranked(config, model, machine, stored)
    mode = config.map_experts
    against = against_in_place(config, model, expert_format_of(config, stored), stored)
    if mode == "always" and against:
        raise ConfigError(f"--map-experts always: {against}", fields=("map_experts",))
    if mode == "always" or not stored.in_memory:
        return _on_best_device(config, model, machine, stored, mode == "always")
    if mode == "never":
        against = "--map-experts never was given"
    try:
        packed = _on_best_device(config, model, machine, stored, False)
    except DoesNotFit as error:
        if against:
            raise DoesNotFit(
                f"{error}. Its experts lie in memory and could be used there, but {against}",
                fields=error.fields,
            ) from error
        return _on_best_device(config, model, machine, stored, True)
    if against or config.context_length is not None or packed.context_length >= model.max_positions:
        return packed
    there = _on_best_device(config, model, machine, stored, True)
    return there if there.context_length > packed.context_length else packed


def _on_best_device(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats, in_place: bool
) -> Plan:
    gpu, why = usable_gpu(config, model, machine)
    try:
        return _resolved(config, model, machine, stored, (gpu, why), in_place)
    except GpuTooSmall as error:
        if flag := needs_gpu(config):
            raise DoesNotFit(
                f"{flag}: {error}; ask for less, or take --device cpu", fields=GPU_FIELDS
            ) from error
        why = str(error)
    try:
        return _resolved(config, model, machine, stored, (None, why), in_place)
    except ConfigError as error:
        raise type(error)(f"{why}. Without the GPU: {error}", fields=error.fields) from error


def _resolved(
    config: EngineConfig,
    model: ModelConfig,
    machine: Machine,
    stored: StoredFormats,
    device: tuple[Gpu | None, str],
    in_place: bool,
) -> Plan:
    """device: the GPU, None for none, and why."""
    log = decisions(model.shard.ranks)
    gpu = _device(config, *device, log)
    dtype = _dtype(config, model, device, log)
    dense_codes, *shown = dense_choice(dtype, stored, gpu is not None)
    log += [Decision("dense format", *shown)] if stored.dense_codes else []
    expert_format = _expert_format(config, dtype, stored, log if model.moe_layers else [])
    tier = _tier(config, machine, log)
    _check_last_bits(config, model, expert_format, tier, log)
    threads = plan_threads(config, machine)
    log.append(Decision("threads", str(len(threads.cpus)), threads.reason))
    running = _running(config, model, dtype, log)
    log += [Decision("experts", "not packed", _why_in_place(config))] if in_place else []
    most = _most_step_tokens(config, model, running, gpu is not None)
    request = MemoryRequest(config, model, machine, dtype, expert_format, running, stored, in_place, most)
    memory, gpu_plan = (size_memory(request), None) if gpu is None else on_gpu(request, gpu, log)
    page, num_pages, window_pages = _pages(request, memory, log)
    step_tokens = _step_tokens(config, memory.context_length, running, gpu_plan, log)
    kv_bytes = request.kv_bytes(num_pages * page)
    ledgers: tuple[Ledger, ...] = (memory_ledger(request, memory, kv_bytes),)
    if gpu is not None and gpu_plan is not None:
        pages = -(-memory.context_length // page)
        host = _beside_gpu(request, gpu_plan, len(threads.cpus), step_tokens, pages, 2 if window_pages else 1)
        log.append(Decision("CPU memory", *host.texts()))
        ledgers = (gpu_ledger(request, gpu, gpu_plan, memory, kv_bytes), host_ledger(host, config, machine))
    return Plan(
        dtype=dtype,
        expert_format=expert_format,
        tier=tier,
        cpus=threads.cpus,
        parts=threads.parts,
        part_nodes=threads.part_nodes,
        context_length=memory.context_length,
        page_size=page,
        num_pages=num_pages,
        num_window_pages=window_pages,
        num_slots=request.num_slots,
        max_running_requests=running,
        max_step_tokens=step_tokens,
        radix_cache=_radix(config, model, log),
        fuse_shared_experts=_fuse_shared(request, gpu is not None, log),
        dense_codes=dense_codes,
        decisions=(*log, *(Decision("speculation", *said) for said in speculation_texts(config, model))),
        notices=(*_notices(request, device, gpu_plan), *filter(None, [threads.notice])),
        gpu=gpu_plan,
        int8_activations=config.kt_int8_activations,
        experts_in_place=in_place,
        deterministic=config.enable_deterministic_inference,
        speculation=speculation(config, model),
        ledgers=ledgers,
    )


def _beside_gpu(
    request: MemoryRequest, gpu: GpuPlan, workers: int, step_tokens: int, pages: int, tables: int
) -> HostMemory:
    """pages: of the longest sequence; tables: kinds of pages."""
    fused, each = _fuse_shared(request, True, []), expert_bytes(request)
    share = host_share(request.model, gpu, each, workers, step_tokens, pages, fused, request.experts_in_place)
    return host_memory(request.model, replace(share, tables=tables))


def _notices(request: MemoryRequest, device: tuple[Gpu | None, str], gpu: GpuPlan | None) -> list[str]:
    config, model = request.config, request.model
    said = *deferral_notices(config, model, gpu), *cached_notices(config, device[0])
    return [*notices(config, model, request.machine, *device), *said]


def _why_in_place(config: EngineConfig) -> str:
    if config.map_experts == "always":
        return "--map-experts always"
    return "the checkpoint lies in memory, and beside it there is no room for a packed copy and the whole context"


def _device(config: EngineConfig, gpu: Gpu | None, reason: str, log: list[Decision]) -> Gpu | None:
    log.append(Decision("device", "cpu" if gpu is None else "cuda", reason))
    return gpu


def _dtype(
    config: EngineConfig, model: ModelConfig, device: tuple[Gpu | None, str], log: list[Decision]
) -> str:
    """Of activations; and of keys and values, where it is another."""
    why = "what checkpoints are trained in, and half the memory traffic of float32"
    dtype = dtype_of(config)
    log.append(Decision("dtype", dtype, why if config.dtype == "auto" else "--dtype"))
    log += [Decision("KV cache dtype", *said) for said in cached_text(config, model, dtype, *device)]
    return dtype


def _expert_format(config: EngineConfig, dtype: str, stored: StoredFormats, log: list[Decision]) -> str:
    chosen, reason = stored_or_asked(config, dtype, stored)
    log.append(Decision("expert format", stored.experts.name if chosen == STORED else chosen, reason))
    if config.kt_weight_path is not None:
        name = Path(config.kt_weight_path).name
        log.append(Decision("expert weights", name, "--kt-weight-path; everything else is --model's"))
    return chosen


def _check_last_bits(
    config: EngineConfig, model: ModelConfig, expert_format: str, tier: str, log: list[Decision]
) -> None:
    """What flags say of rounding and order."""
    _check_activations(config, expert_format, log)
    log += [Decision("last bits", *said) for said in deterministic(config, model, tier)]


def _check_activations(config: EngineConfig, expert_format: str, log: list[Decision]) -> None:
    if not config.kt_int8_activations:
        return
    if expert_format in ("bf16", "f32"):
        raise ConfigError(
            f"--kt-int8-activations: the experts are {expert_format}, and integer products need codes; "
            "add --kt-method INT8 or INT4, or leave the flag out",
            fields=("kt_int8_activations",),
        )
    log.append(
        Decision(
            "expert activations",
            "int8",
            "--kt-int8-activations, lossy: see docs/quality.md; AMX rounds for few rows only",
        )
    )


def _tier(config: EngineConfig, machine: Machine, log: list[Decision]) -> str:
    usable = machine.tiers
    tier, reason = config.kernel_tier, "--kernel-tier"
    if tier == "auto":
        tier, reason = usable[-1], f"the widest that can run here ({', '.join(usable)})"
    if tier not in usable:
        raise ConfigError(
            f"--kernel-tier {tier}: this CPU cannot run it; it can: {', '.join(usable)}",
            fields=("kernel_tier",),
        )
    log.append(Decision("kernel tier", tier, reason + tier_reason(tier, config.enable_deterministic_inference)))
    return tier


def _running(config: EngineConfig, model: ModelConfig, dtype: str, log: list[Decision]) -> int:
    asked, fitting = config.max_running_requests, DEFAULT_RUNNING_REQUESTS
    slot_bytes = model.state_layout(dtype, guesses=most_guesses(config, model)).slot_bytes  # of each, beside its pages
    reason = "default; later requests wait"
    if why_alone(model):
        fitting, reason = 1, f"Transformers' own cache holds one sequence: {why_alone(model)}"
    elif asked is not None:
        fitting, reason = asked, "--max-running-requests"
    elif slot_bytes:
        fitting = min(fitting, max(LEAST_RUNNING, DEFAULT_SLOT_BYTES // slot_bytes))
        reason = f"each keeps {gib(slot_bytes)} of state, and as much again for its newest page border"
    log.append(Decision("running requests", str(fitting), reason))
    return fitting


def _pages(request: MemoryRequest, memory: MemoryPlan, log: list[Decision]) -> tuple[int, int, int]:
    """Tokens of a page, how many there are, and how many of layers that see a window; 0: they keep all tokens."""
    pages = -(-memory.kv_tokens // (page := page_tokens(request.model.states, request.config.page_size)))
    size, windows = request.kv_bytes(pages * page), request.window_pages
    weights = f"{gib(memory.weight_bytes)} of the {gib(memory.budget_bytes)} that may be used"
    log.append(Decision("weights", gib(memory.weight_bytes), f"once loaded; {weights}"))
    log.append(Decision("context length", str(memory.context_length), memory.context_reason))
    text = f"{pages} pages × {page} tokens = {gib(size)}"
    log.append(Decision("KV cache", text, memory.kv_reason))
    if not 0 < windows < pages:
        return page, pages, 0
    why = f"layers that see {request.model.state_layout(request.dtype).window} tokens keep no others"
    log.append(Decision("windows", f"{windows} pages", why))
    return page, pages, windows


def _most_step_tokens(config: EngineConfig, model: ModelConfig, running: int, on_gpu: bool) -> int:
    """Of a step, whatever memory allows."""
    chunk = config.chunked_prefill_size
    usual = long_step_tokens(model) if on_gpu else prefill_tokens(on_gpu)
    return max(running, usual if chunk is None else chunk if chunk > 0 else model.max_positions)


def _step_tokens(
    config: EngineConfig, context: int, running: int, gpu: GpuPlan | None, log: list[Decision]
) -> int:
    chunk = prefill_tokens(gpu is not None, config.enable_deterministic_inference)
    reason = "default; longer prompts are cut into chunks, so that others go on"
    if gpu is not None and not config.enable_deterministic_inference:
        chunk, reason = gpu.step_tokens, gpu.step_reason or reason
    if config.chunked_prefill_size is not None:
        chunk, reason = config.chunked_prefill_size, "--chunked-prefill-size"
    if chunk < 0:
        chunk = context
    if config.max_prefill_tokens is not None and config.max_prefill_tokens < chunk:
        chunk, reason = config.max_prefill_tokens, "--max-prefill-tokens"
    if chunk < running:
        chunk, reason = running, f"every running request needs its token ({reason} is less)"
    log.append(Decision("tokens per step", str(chunk), reason))
    return chunk


def _radix(config: EngineConfig, model: ModelConfig, log: list[Decision]) -> bool:
    on = not config.disable_radix_cache and not why_alone(model)
    reason = "requests that begin alike share their KV pages" if on else "--disable-radix-cache"
    reason = "Transformers' own cache cannot be shared" if why_alone(model) else reason
    log.append(Decision("prefix cache", "on" if on else "off", reason))
    return on


def _fuse_shared(request: MemoryRequest, on_gpu: bool, log: list[Decision]) -> bool:
    if request.model.moe.shared is None:
        return False
    why = why_apart(request, on_gpu)
    if why:
        log.append(Decision("shared experts", "apart", why))
    else:
        log.append(Decision("shared experts", "fused", "computed with the routed ones in one parallel region"))
    return not why
