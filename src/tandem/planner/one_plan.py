"""`one_plan`: a plan for one device and for what is given up there: every choice with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
from tandem.machine.numa_binding import binding_notice
from tandem.planner.choices.beside_gpu import host_share
from tandem.planner.choices.cached import cached_notices, cached_text
from tandem.planner.choices.decision import Decision
from tandem.planner.choices.deferral import deferral_notices
from tandem.planner.choices.deterministic import deterministic, tier_reason
from tandem.planner.choices.gpu_choices import gpu_choices
from tandem.planner.choices.left_to_ram import expert_bytes
from tandem.planner.choices.live_placement import check_wish
from tandem.planner.choices.shared_experts import why_apart
from tandem.planner.choices.speculation import most_draft_tokens, speculation, speculation_texts
from tandem.planner.choices.tables import IN_RAM, table_bytes, table_text, token_row_bytes, where_tables
from tandem.planner.choices.threads import ThreadPlan, plan_threads
from tandem.planner.expert_format import dense_choice, dtype_of, stored_or_asked
from tandem.planner.expert_sizes import expert_sizes
from tandem.planner.forecast.ledger import Ledger
from tandem.planner.gpu_plan import GpuPlan, gpu_ledger
from tandem.planner.host_memory import HostMemory, host_ledger, host_memory
from tandem.planner.memory import (
    MemoryPlan,
    MemoryRequest,
    gib,
    long_step_tokens,
    memory_ledger,
    prefill_tokens,
    size_memory,
)
from tandem.planner.notices import idle_gpus, notices
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import decisions
from tandem.planner.tight import Tight
from tandem.spec.model_config import STORED, ModelConfig, why_alone
from tandem.spec.stored import StoredFormats

# Of running sequences' own state, where no number was asked for, and how many there are at least.
DEFAULT_SLOT_BYTES, LEAST_RUNNING = 1 << 30, 4
DEFAULT_RUNNING_REQUESTS = 64  # decoded together; more would only slow each other down on a CPU
FOR_ROOM = "fewer than usual, for room: see made to fit"

Device = tuple[Gpu | None, str]
"""The GPU, None for none, and why."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of a plan. in_place: experts are used in the checkpoint's own pages."""

    config: EngineConfig
    model: ModelConfig
    machine: Machine
    stored: StoredFormats
    in_place: bool = False


def one_plan(wish: PlanRequest, device: Device, tight: Tight) -> Plan:
    """Raises ConfigError: of one reason or a few, DoesNotFit where memory is missing."""
    config, model, machine, stored = tight.flags(wish.config), wish.model, wish.machine, wish.stored
    gpu, in_place, log = device[0], wish.in_place, decisions(wish.model.shard.ranks)
    log.append(Decision("device", "cpu" if gpu is None else "cuda", device[1]))
    dtype = _dtype(config, model, device, log)
    dense_codes = _dense_codes(dtype, stored, gpu, log)
    expert_format = _expert_format(config, dtype, stored, log if model.moe_layers else [])
    tier = kernel_tier(config, machine, log)
    _check_last_bits(config, model, expert_format, tier, log)
    threads = _threads(config, machine, log)
    usual = running_sequences(config, model, dtype)
    running, why = usual if tight.running is None else (tight.running, FOR_ROOM)
    log.append(Decision("running requests", str(running), why))
    log += [Decision("experts", "not packed", _why_in_place(config))] if in_place else []
    most = _most_step_tokens(config, model, running, gpu is not None)
    request = MemoryRequest(
        config, model, machine, dtype, expert_format, running, stored, in_place, most, tight.embedding_in_ram,
        tight.gpu_fraction,
    )  # fmt: skip
    request, tables = _with_tables(request, log)
    memory, gpu_plan = (size_memory(request), None) if gpu is None else gpu_choices(request, gpu, log)
    page, num_pages, window_pages = _pages(request, memory, log)
    step_tokens = _step_tokens(config, tight, memory.context_length, running, gpu_plan, log)
    kv_bytes = request.kv_bytes(num_pages * page)
    ledgers: tuple[Ledger, ...] = (memory_ledger(request, memory, kv_bytes),)
    if gpu is not None and gpu_plan is not None:
        pages = -(-memory.context_length // page)
        host = _beside_gpu(request, gpu_plan, len(threads.cpus), step_tokens, pages, 2 if window_pages else 1)
        log.append(Decision("CPU memory", *host.texts()))
        ledgers = (gpu_ledger(request, gpu, gpu_plan, memory, kv_bytes), host_ledger(host, config, model, machine))
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
        decisions=(*log, *(Decision("speculation", *entry) for entry in speculation_texts(config, model))),
        notices=(*_notices(wish, device, gpu_plan), *_about_threads(threads, machine)),
        gpu=gpu_plan,
        int8_activations=config.kt_int8_activations,
        experts_in_place=in_place,
        deterministic=config.enable_deterministic_inference,
        speculation=speculation(config, model),
        tables=tables,
        ledgers=ledgers,
        ranks=model.shard.ranks,
        idle=idle_gpus(machine.gpus, device[1]) if gpu is None and machine.gpus else "",
    )


def _dense_codes(dtype: str, stored: StoredFormats, gpu: Gpu | None, log: list[Decision]) -> bool:
    codes, *shown = dense_choice(dtype, stored, gpu is not None)
    log += [Decision("dense format", *shown)] if stored.dense_codes else []
    return codes


def _threads(config: EngineConfig, machine: Machine, log: list[Decision]) -> ThreadPlan:
    threads = plan_threads(config, machine)
    log.append(Decision("threads", str(len(threads.cpus)), threads.reason))
    return threads


def _with_tables(request: MemoryRequest, log: list[Decision]) -> tuple[MemoryRequest, str]:
    """With what tables take of memory; and where they are."""
    where = where_tables(request)
    if not request.model.tables:
        return request, where
    log.append(Decision("tables", *table_text(request, where)))
    return replace(request, table_bytes=table_bytes(request) if where == IN_RAM else 0), where


def _beside_gpu(
    request: MemoryRequest, gpu: GpuPlan, workers: int, step_tokens: int, pages: int, tables: int
) -> HostMemory:
    """pages: of the longest sequence; tables: kinds of pages."""
    fused, each = _fuse_shared(request, True, []), expert_bytes(request)
    share = host_share(request.model, gpu, each, workers, step_tokens, pages, fused, request.experts_in_place)
    rows, routed_bytes = token_row_bytes(request.model, request.stored), expert_sizes(request).ram_bytes(gpu.experts)
    share = replace(
        share, tables=tables, table_bytes=request.table_bytes, token_row_bytes=rows, routed_bytes=routed_bytes,
        handoffs=max(1, len(gpu.stages)),
    )
    return host_memory(request.model, share)


def _notices(wish: PlanRequest, device: Device, gpu: GpuPlan | None) -> list[str]:
    config, model = wish.config, wish.model
    lossy = *deferral_notices(config, model, gpu), *cached_notices(config, device[0])
    return [*notices(config, model, wish.machine, *device), *lossy]


def _about_threads(threads: ThreadPlan, machine: Machine) -> Iterator[str]:
    yield from filter(None, (threads.notice, binding_notice(machine.mbind_error, threads.part_nodes)))


def _why_in_place(config: EngineConfig) -> str:
    if config.map_experts == "always":
        return "--map-experts always"
    return "the checkpoint lies in memory, and beside it there is no room for a packed copy and the whole context"


def _dtype(config: EngineConfig, model: ModelConfig, device: Device, log: list[Decision]) -> str:
    """The type of activations; and that of keys and values, where it is another."""
    why = "what checkpoints are trained in, and half the memory traffic of float32"
    dtype = dtype_of(config)
    log.append(Decision("dtype", dtype, why if config.dtype == "auto" else "--dtype"))
    log += [Decision("KV cache dtype", *entry) for entry in cached_text(config, model, dtype, *device)]
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
    """Checks the flags for rounding and order."""
    check_wish(config)
    _check_activations(config, expert_format, log)
    log += [Decision("last bits", *entry) for entry in deterministic(config, model, tier)]


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


def kernel_tier(config: EngineConfig, machine: Machine, log: list[Decision]) -> str:
    usable = machine.tiers
    tier, reason = config.kernel_tier, "--kernel-tier"
    if tier == "auto":
        tier, reason = usable[-1], f"the widest that can run here ({', '.join(usable)})"
    if tier not in usable:
        raise ConfigError(
            f"--kernel-tier {tier}: this CPU cannot run it; it can: {', '.join(usable)}",
            fields=("kernel_tier",),
        )
    log.append(
        Decision("kernel tier", tier, reason + tier_reason(tier, config.enable_deterministic_inference))
    )
    return tier


def running_sequences(config: EngineConfig, model: ModelConfig, dtype: str) -> tuple[int, str]:
    """How many are decoded together where nothing is given up for room, and why."""
    slot_bytes = model.state_layout(
        dtype, draft_tokens=most_draft_tokens(config, model)
    ).slot_bytes  # of each, beside its pages
    if why := why_alone(model):
        return 1, f"Transformers' own cache holds one sequence: {why}"
    if config.max_running_requests is not None:
        return config.max_running_requests, "--max-running-requests"
    if slot_bytes:
        fitting = min(DEFAULT_RUNNING_REQUESTS, max(LEAST_RUNNING, DEFAULT_SLOT_BYTES // slot_bytes))
        return fitting, f"each keeps {gib(slot_bytes)} of state, and as much again for its newest page border"
    return DEFAULT_RUNNING_REQUESTS, "default; later requests wait"


def _pages(request: MemoryRequest, memory: MemoryPlan, log: list[Decision]) -> tuple[int, int, int]:
    """Tokens of a page, how many there are, and how many of layers that see a window; 0: they keep all tokens."""
    pages = -(-memory.kv_tokens // (page := request.page))
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


def _most_step_tokens(config: EngineConfig, model: ModelConfig, running: int, gpu: bool) -> int:
    """Most tokens of a step, whatever memory allows."""
    chunk = config.chunked_prefill_size
    usual = long_step_tokens(model) if gpu else prefill_tokens(gpu)
    return max(running, usual if chunk is None else chunk if chunk > 0 else model.max_positions)


def _step_tokens(
    config: EngineConfig, tight: Tight, context: int, running: int, gpu: GpuPlan | None, log: list[Decision]
) -> int:
    chunk = prefill_tokens(gpu is not None, config.enable_deterministic_inference)
    reason = "default; longer prompts are cut into chunks, so that others go on"
    if gpu is not None and not config.enable_deterministic_inference:
        chunk, reason = gpu.step_tokens, gpu.step_reason or reason
    if config.chunked_prefill_size is not None:
        chunk = config.chunked_prefill_size
        reason = "--chunked-prefill-size" if tight.chunk is None else FOR_ROOM
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


def _fuse_shared(request: MemoryRequest, gpu: bool, log: list[Decision]) -> bool:
    if request.model.moe.shared is None:
        return False
    why = why_apart(request, gpu)
    if why:
        log.append(Decision("shared experts", "apart", why))
    else:
        log.append(
            Decision("shared experts", "fused", "computed with the routed ones in one parallel region")
        )
    return not why
