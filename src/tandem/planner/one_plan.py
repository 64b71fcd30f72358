"""`one_plan`: a plan for one device and for what is given up there: every choice with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
from tandem.machine.numa_binding import binding_notice
from tandem.planner.choices.beside_gpu import host_share
from tandem.planner.choices.cached import cached_notices, cached_text
from tandem.planner.choices.decision import Decision, Decisions
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
from tandem.planner.forecast.ledger import RAM, Ledger
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
    """The input of a plan. in_place: experts are used in the checkpoint's own pages; spare_places: in CPU memory, for
    experts that move though nobody asked for it."""

    config: EngineConfig
    model: ModelConfig
    machine: Machine
    stored: StoredFormats
    in_place: bool = False
    spare_places: bool = True


@dataclass(frozen=True, slots=True)
class NumberTypes:
    """Types of numbers, and the kernels that compute with them, by the fields' names in `Plan`."""

    dtype: str
    dense_codes: bool
    expert_format: str
    tier: str


def one_plan(wish: PlanRequest, device: Device, tight: Tight) -> Plan:
    """Raises ConfigError: of one reason or a few, DoesNotFit where memory is missing."""
    plan = _planned(wish, device, tight)
    moves_unasked = plan.gpu is not None and plan.gpu.live and not wish.config.kt_enable_dynamic_expert_update
    if moves_unasked and any(each.place == RAM and each.left_bytes < 0 for each in plan.ledgers):
        return _planned(replace(wish, spare_places=False), device, tight)  # what steps take is known only now
    return plan


def _planned(wish: PlanRequest, device: Device, tight: Tight) -> Plan:
    config, model, machine, gpu = tight.flags(wish.config), wish.model, wish.machine, device[0]
    numbers, about_numbers = _numbers(config, wish, device)
    threads = plan_threads(config, machine)
    usual = running_sequences(config, model, numbers.dtype)
    running, why_running = usual if tight.running is None else (tight.running, FOR_ROOM)
    most = _most_step_tokens(config, model, running, gpu is not None)
    request = MemoryRequest(
        config, model, machine, numbers.dtype, numbers.expert_format, running, wish.stored, wish.in_place, most,
        tight.embedding_in_ram, tight.gpu_fraction, spare_places=wish.spare_places,
    )  # fmt: skip
    request, tables, about_tables = _with_tables(request)
    gpu_plan, about_gpu = (None, ()) if gpu is None else gpu_choices(request, gpu)
    memory = size_memory(request) if gpu_plan is None else gpu_plan.sizes.memory
    pages, about_pages = _pages(request, memory, gpu is not None)
    step_tokens, about_steps = _step_tokens(config, tight, memory.context_length, running, gpu_plan)
    ledgers, about_host = _ledgers(request, memory, pages, device, gpu_plan, threads, step_tokens)
    radix, about_radix = _radix(config, model)
    fused, about_shared = _fuse_shared(request, gpu is not None)
    return Plan(
        dtype=numbers.dtype,
        expert_format=numbers.expert_format,
        tier=numbers.tier,
        cpus=threads.cpus,
        parts=threads.parts,
        part_nodes=threads.part_nodes,
        context_length=memory.context_length,
        page_size=request.page,
        num_pages=pages.whole,
        num_window_pages=pages.windows,
        num_slots=request.num_slots,
        max_running_requests=running,
        max_step_tokens=step_tokens,
        radix_cache=radix,
        fuse_shared_experts=fused,
        dense_codes=numbers.dense_codes,
        decisions=(
            *decisions(model.shard.ranks),
            Decision("device", "cpu" if gpu is None else "cuda", device[1]),
            *about_numbers,
            Decision("threads", str(len(threads.cpus)), threads.reason),
            Decision("running requests", str(running), why_running),
            *([Decision("experts", "not packed", _why_in_place(config))] if wish.in_place else []),
            *(*about_tables, *about_gpu, *about_pages, *about_steps, *about_host, *about_radix, *about_shared),
            *(Decision("speculation", *entry) for entry in speculation_texts(config, model)),
        ),
        notices=(*_notices(wish, device, gpu_plan), *_about_threads(threads, machine)),
        gpu=gpu_plan,
        int8_activations=config.kt_int8_activations,
        experts_in_place=wish.in_place,
        deterministic=config.enable_deterministic_inference,
        speculation=speculation(config, model),
        tables=tables,
        ledgers=ledgers,
        ranks=model.shard.ranks,
        idle=idle_gpus(machine.gpus, device[1]) if gpu is None and machine.gpus else "",
    )


def _numbers(config: EngineConfig, wish: PlanRequest, device: Device) -> tuple[NumberTypes, Decisions]:
    """Raises ConfigError where flags for rounding and order stand against each other."""
    model, stored = wish.model, wish.stored
    dtype, about_dtype = _dtype(config, model, device)
    dense_codes, *dense_text = dense_choice(dtype, stored, device[0] is not None)
    expert_format, about_experts = _expert_format(config, dtype, stored)
    tier, about_tier = kernel_tier(config, wish.machine)
    about = (
        *about_dtype,
        *([Decision("dense format", *dense_text)] if stored.dense_codes else []),
        *(about_experts if model.moe_layers else ()),
        about_tier,
        *_last_bits(config, model, expert_format, tier),
    )
    return NumberTypes(dtype, dense_codes, expert_format, tier), about


def _with_tables(request: MemoryRequest) -> tuple[MemoryRequest, str, Decisions]:
    """With what tables take of memory; and where they are."""
    where = where_tables(request)
    if not request.model.tables:
        return request, where, ()
    about = Decision("tables", *table_text(request, where))
    return replace(request, table_bytes=table_bytes(request) if where == IN_RAM else 0), where, (about,)


def _ledgers(
    request: MemoryRequest,
    memory: MemoryPlan,
    pages: PageCounts,
    device: Device,
    plan: GpuPlan | None,
    threads: ThreadPlan,
    step_tokens: int,
) -> tuple[tuple[Ledger, ...], Decisions]:
    """Ledgers of the device's memory, and of the CPU's beside a GPU."""
    gpu, kv_bytes = device[0], request.kv_bytes(pages.whole * request.page)
    if gpu is None or plan is None:
        return (memory_ledger(request, memory, kv_bytes),), ()
    longest, kinds = -(-memory.context_length // request.page), 2 if pages.windows else 1
    host = _beside_gpu(request, plan, len(threads.cpus), step_tokens, longest, kinds)
    ram = host_ledger(host, request.config, request.model, request.machine)
    return (gpu_ledger(request, gpu, plan, kv_bytes), ram), (Decision("CPU memory", *host.texts()),)


def _beside_gpu(
    request: MemoryRequest, gpu: GpuPlan, workers: int, step_tokens: int, pages: int, tables: int
) -> HostMemory:
    """pages: of the longest sequence; tables: kinds of pages."""
    fused, each = _fuse_shared(request, True)[0], expert_bytes(request)
    share = host_share(request.model, gpu, each, workers, step_tokens, pages, fused, request.experts_in_place)
    sizes = expert_sizes(request)
    share = replace(
        share,
        tables=tables,
        table_bytes=request.table_bytes,
        token_row_bytes=token_row_bytes(request.model, request.stored),
        routed_bytes=sizes.ram_bytes(gpu.sizes.experts),
        spare_bytes=sizes.spare_bytes(gpu.sizes.experts),
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


def _dtype(config: EngineConfig, model: ModelConfig, device: Device) -> tuple[str, Decisions]:
    """The type of activations; and that of keys and values, where it is another."""
    why = "what checkpoints are trained in, and half the memory traffic of float32"
    dtype = dtype_of(config)
    own = Decision("dtype", dtype, why if config.dtype == "auto" else "--dtype")
    cached = (Decision("KV cache dtype", *entry) for entry in cached_text(config, model, dtype, *device))
    return dtype, (own, *cached)


def _expert_format(config: EngineConfig, dtype: str, stored: StoredFormats) -> tuple[str, Decisions]:
    chosen, reason = stored_or_asked(config, dtype, stored)
    about = Decision("expert format", stored.experts.name if chosen == STORED else chosen, reason)
    if config.kt_weight_path is None:
        return chosen, (about,)
    weights = Path(config.kt_weight_path).name
    return chosen, (about, Decision("expert weights", weights, "--kt-weight-path; everything else is --model's"))


def _last_bits(config: EngineConfig, model: ModelConfig, expert_format: str, tier: str) -> Decisions:
    """Raises ConfigError where the flags for rounding and order cannot be met."""
    check_wish(config)
    activations = _expert_activations(config, expert_format)
    return (*activations, *(Decision("last bits", *entry) for entry in deterministic(config, model, tier)))


def _expert_activations(config: EngineConfig, expert_format: str) -> Decisions:
    if not config.kt_int8_activations:
        return ()
    if expert_format in ("bf16", "f32"):
        raise ConfigError(
            f"--kt-int8-activations: the experts are {expert_format}, and integer products need codes; "
            "add --kt-method INT8 or INT4, or leave the flag out",
            fields=("kt_int8_activations",),
        )
    why = "--kt-int8-activations, lossy: see docs/quality.md; AMX rounds for few rows only"
    return (Decision("expert activations", "int8", why),)


def kernel_tier(config: EngineConfig, machine: Machine) -> tuple[str, Decision]:
    usable = machine.tiers
    tier, reason = config.kernel_tier, "--kernel-tier"
    if tier == "auto":
        tier, reason = usable[-1], f"the widest that can run here ({', '.join(usable)})"
    if tier not in usable:
        raise ConfigError(
            f"--kernel-tier {tier}: this CPU cannot run it; it can: {', '.join(usable)}",
            fields=("kernel_tier",),
        )
    return tier, Decision(
        "kernel tier", tier, reason + tier_reason(tier, config.enable_deterministic_inference)
    )


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


class PageCounts(NamedTuple):
    """Numbers of pages. windows: of layers that see a window; 0: they keep all tokens."""

    whole: int
    windows: int


def _pages(request: MemoryRequest, memory: MemoryPlan, gpu: bool) -> tuple[PageCounts, Decisions]:
    pages = -(-memory.kv_tokens // (page := request.page))
    size, windows = request.kv_bytes(pages * page), request.window_pages
    where = "in GPU memory, where" if gpu else "in memory, where"
    weights = f"once loaded, {where} {gib(memory.budget_bytes)} may be used"
    text = f"{pages} pages × {page} tokens = {gib(size)}"
    about = (
        Decision("weights", gib(memory.weight_bytes), weights),
        Decision("context length", str(memory.context_length), memory.context_reason),
        Decision("KV cache", text, memory.kv_reason),
    )
    if not 0 < windows < pages:
        return PageCounts(pages, 0), about
    why = f"layers that see {request.model.state_layout(request.dtype).window} tokens keep no others"
    return PageCounts(pages, windows), (*about, Decision("windows", f"{windows} pages", why))


def _most_step_tokens(config: EngineConfig, model: ModelConfig, running: int, gpu: bool) -> int:
    """Most tokens of a step, whatever memory allows."""
    chunk = config.chunked_prefill_size
    usual = long_step_tokens(model) if gpu else prefill_tokens(gpu)
    most = usual if chunk is None else chunk if chunk > 0 else config.context_length or model.max_positions
    return max(running, min(most, config.max_prefill_tokens or most))


def _step_tokens(
    config: EngineConfig, tight: Tight, context: int, running: int, gpu: GpuPlan | None
) -> tuple[int, Decisions]:
    chunk = prefill_tokens(gpu is not None, config.enable_deterministic_inference)
    reason = "default; longer prompts are cut into chunks, so that others go on"
    if gpu is not None and not config.enable_deterministic_inference:
        chunk, reason = gpu.sizes.step_tokens, gpu.sizes.step_reason or reason
    if config.chunked_prefill_size is not None:
        chunk = config.chunked_prefill_size
        reason = "--chunked-prefill-size" if tight.chunk is None else FOR_ROOM
    if chunk < 0:
        chunk = context
    if config.max_prefill_tokens is not None and config.max_prefill_tokens < chunk:
        chunk, reason = config.max_prefill_tokens, "--max-prefill-tokens"
    if chunk < running:
        chunk, reason = running, f"every running request needs its token ({reason} is less)"
    return chunk, (Decision("tokens per step", str(chunk), reason),)


def _radix(config: EngineConfig, model: ModelConfig) -> tuple[bool, Decisions]:
    on = not config.disable_radix_cache and not why_alone(model)
    reason = "requests that begin alike share their KV pages" if on else "--disable-radix-cache"
    reason = "Transformers' own cache cannot be shared" if why_alone(model) else reason
    return on, (Decision("prefix cache", "on" if on else "off", reason),)


def _fuse_shared(request: MemoryRequest, gpu: bool) -> tuple[bool, Decisions]:
    if request.model.moe.shared is None:
        return False, ()
    if why := why_apart(request, gpu):
        return False, (Decision("shared experts", "apart", why),)
    return True, (Decision("shared experts", "fused", "computed with the routed ones in one parallel region"),)
