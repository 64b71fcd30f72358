"""How much memory the weights need, and what is left for the KV cache: the only place that does this sum.

Free memory × fraction − packed weights − workspace is what the KV cache may take. Without a flag it takes a quarter
of that, at most 4 GiB, but always one full context if that fits: a laptop is not filled for a chat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tandem.errors import ConfigError, DoesNotFit
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS, most_draft_tokens
from tandem.planner.forecast.ledger import RAM, Ledger, LedgerEntry, ledger
from tandem.planner.vision_costs import image_entries, pixel_entries
from tandem.spec.model_config import STORED, ModelConfig, rope_bytes, why_alone
from tandem.spec.state import page_tokens
from tandem.spec.stored import UNQUANTISED, StoredFormats

GIB = 1 << 30
DEFAULT_FRACTION = 0.8  # of free memory; the rest is left to the other programs and the page cache
WORKSPACE_BYTES = GIB // 4  # activations and scratch of one step, the tokenizer, Python itself
# Of one step: enough rows per expert for full speed, short enough for others' decode.
DEFAULT_PREFILL_TOKENS = 512
GPU_PREFILL_TOKENS = 2048  # the same on a GPU
LONG_PREFILL_TOKENS, WIDE = 8192, 4096  # ... alone, or where each step brings experts; half for a larger hidden size
DETERMINISTIC_PREFILL_TOKENS = 256
# Of the experts' results, and of tokens at once, at most: csrc/experts/run/down.cc, task_sizes.h.
RESULT_BYTES, RESULT_TOKENS = 3 * GIB // 8, 4096
DEFAULT_KV_SHARE = 4  # the KV cache takes 1/4 of what is left ...
DEFAULT_KV_BYTES = 4 * GIB  # ... and no more than this
GRAMMAR_BYTES = GIB // 8  # compiled grammars of structured output, kept or in use; more are refused
GRAMMAR_WORDS = "of structured output, at most"
ROPE_WORDS = "for every position"
PAGE_TABLE_SHARE = 512  # of a mapping's bytes, which takes 8 bytes for every 4 KiB
LARGEST_FRACTION = 0.95  # that is advised: the rest is the system's
HOST_STEP_BYTES = 3 * GIB // 2  # what steps beside a GPU take of CPU memory, with grammars, at most
WANTED_CONTEXT = 16384  # tokens: before a context is shorter, experts make room and tighter plans are tried
LEAST_CONTEXT = 256  # tokens; with less than this the model counts as not fitting


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes and tokens, with the reasons that the plan shows."""

    weight_bytes: int
    budget_bytes: int
    context_length: int
    kv_tokens: int
    context_reason: str
    kv_reason: str


@dataclass(frozen=True)
class MemoryRequest:
    """The input of `size_memory` and `size_gpu`."""

    config: EngineConfig
    model: ModelConfig
    machine: Machine
    dtype: str
    expert_format: str
    max_running_requests: int
    stored: StoredFormats = UNQUANTISED
    experts_in_place: bool = False  # used where the checkpoint has them
    step_tokens: int = 0  # at most; 0: layers that see a window keep all tokens, too
    embedding_in_ram: bool = False  # beside a GPU, which reads its rows there
    gpu_fraction: float = 0.0  # of free GPU memory; 0.0: as the flag says, or GPU_FRACTION
    table_bytes: int = 0  # of tables that are read by row, in memory
    spare_places: bool = True  # in CPU memory, for experts that move where nobody asked for it

    @cached_property
    def page(self) -> int:
        """Tokens."""
        return page_tokens(self.model.states, self.config.page_size)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return max(1, self.model.state_layout(self.dtype).token_bytes)  # where all state is in slots

    @cached_property
    def window_pages(self) -> int:
        """Pages of layers that see a window, at most; 0: they keep all tokens."""
        layout = self.model.state_layout(self.dtype, self.page, self.draft_tokens)
        if not layout.window or not self.step_tokens or keeps_all_tokens(self.config):
            return 0
        return layout.window_pages(self.max_running_requests, self.step_tokens)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of a KV cache of `tokens` tokens."""
        return self.kv_bytes_per_token * tokens - self._windows[1] * max(0, tokens - self._windows[0])

    def kv_tokens(self, nbytes: int) -> int:
        """Tokens that a KV cache of `nbytes` bytes holds."""
        (most, saved_bytes), each = self._windows, self.kv_bytes_per_token
        if not saved_bytes or nbytes <= most * each:
            return nbytes // each
        return most + (nbytes - most * each) // max(1, each - saved_bytes)

    @cached_property
    def _windows(self) -> tuple[int, int]:
        """Tokens from which on a cache has no more pages of windows, and the bytes of a token that this spares."""
        pages = self.window_pages
        return pages * self.page, self.model.state_layout(self.dtype).window_token_bytes if pages else 0

    @cached_property
    def draft_tokens(self) -> int:
        """Draft tokens of a sequence in a step, at most."""
        return most_draft_tokens(self.config, self.model)

    @property
    def num_slots(self) -> int:
        """Slots of state outside pages: nobody's, each running sequence's, its copy at the newest page border, and as
        many snapshots of prefixes."""
        if not self._each_slot_bytes:
            return 0
        return 1 + self.max_running_requests * (1 if self.config.disable_radix_cache or why_alone(self.model) else 3)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self._each_slot_bytes

    @cached_property
    def _each_slot_bytes(self) -> int:
        return self.model.state_layout(self.dtype, draft_tokens=self.draft_tokens).slot_bytes

    @cached_property
    def rope_bytes(self) -> int:
        """Bytes of rotary tables, at most: for every position of the planned context."""
        return rope_bytes(self.model, self.longest_sequence)

    @cached_property
    def longest_sequence(self) -> int:
        """Tokens of a sequence, at most: no more than all sequences may have together."""
        context, max_tokens = wanted_context(self)[0], self.config.max_total_tokens
        return context if max_tokens is None else min(context, max_tokens)

    @cached_property
    def weight_bytes(self) -> int:
        if not self.experts_are_there:
            return self.table_bytes + self.bytes_with(self.expert_format)
        dense = self.model.dense_bytes(self.dtype, self.stored)
        return self.table_bytes + dense + (self.bytes_with(self.expert_format) - dense) // PAGE_TABLE_SHARE

    @property
    def experts_are_there(self) -> bool:
        """Whether they are in memory already, where they will be used."""
        return self.experts_in_place and self.stored.in_memory

    def bytes_with(self, expert_format: str) -> int:
        """Bytes of all packed weights, with experts in `expert_format`."""
        return self.model.weight_bytes(self.dtype, expert_format, self.stored)

    @property
    def keeps_codes(self) -> bool:
        """Whether experts are as the checkpoint has them."""
        return self.expert_format == STORED

    @property
    def experts_text(self) -> str:
        return self.stored.experts.name if self.keeps_codes else self.expert_format

    @property
    def fraction(self) -> float:
        return self.config.mem_fraction_static or DEFAULT_FRACTION

    @property
    def budget_bytes(self) -> int:
        return int(self.machine.available_memory * self.fraction)

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of a step in addition to weights and KV cache, compiled grammars included. Experts' outputs stay until
        they are added up."""
        chunk = self.config.chunked_prefill_size or DEFAULT_PREFILL_TOKENS
        tokens = min(chunk, RESULT_TOKENS) if chunk > 0 else RESULT_TOKENS
        results = min(RESULT_BYTES, 4 * tokens * self.model.moe.router.top_k * self.model.expert_channels)
        images = sum(entry.nbytes for entry in self.image_entries(gpu=False))
        streams = max(0, self._stream_bytes - WORKSPACE_BYTES)
        return WORKSPACE_BYTES + GRAMMAR_BYTES + self.slot_bytes + results + self.rope_bytes + images + streams

    @property
    def _stream_bytes(self) -> int:
        """Rows of a step in several residual streams, mixed, normed and before and after a block."""
        hyper = self.model.layers[0].hyper
        return 0 if hyper is None else 5 * self.step_tokens * hyper.streams * self.model.hidden * 2

    def image_entries(self, gpu: bool) -> list[LedgerEntry]:
        """Ledger entries of images, on the device that computes steps. Their pixels lie in CPU memory."""
        pixels = [] if gpu else pixel_entries(self.model, self.machine.available_memory)
        return image_entries(self.config, self.model, self.dtype, self.step_tokens, gpu) + pixels

    @property
    def kv_room_bytes(self) -> int:
        return self.budget_bytes - self.weight_bytes - self.workspace_bytes


def changed(request: MemoryRequest, **changes: Any) -> MemoryRequest:
    """The same with other values of its fields, or of these flags."""
    own = {name: value for name, value in changes.items() if name in MemoryRequest.__dataclass_fields__}
    flags = {name: value for name, value in changes.items() if name not in own}
    return replace(request, **own, config=replace(request.config, **flags)) if flags else replace(request, **own)


def ram_fraction(config: EngineConfig) -> float:
    """Share of free CPU memory that a model on a GPU may use. A smaller share that was asked for is only the GPU's."""
    return min(LARGEST_FRACTION, max(DEFAULT_FRACTION, config.mem_fraction_static or 0.0))


def keeps_all_tokens(config: EngineConfig) -> bool:
    """Whether layers that see a window keep all tokens: some readers of pages know one table only."""
    return config.attention_backend not in ("auto", "triton") or config.speculative_algorithm in DRAFT_ALGORITHMS


def prefill_tokens(gpu: bool, deterministic: bool = False) -> int:
    """Prompt tokens of a step, where no chunk size was asked for."""
    if gpu and deterministic:  # rows are computed as if they decoded, and keep as much meanwhile
        return DETERMINISTIC_PREFILL_TOKENS
    return GPU_PREFILL_TOKENS if gpu else DEFAULT_PREFILL_TOKENS


def long_step_tokens(model: ModelConfig) -> int:
    """Tokens of a GPU's step that nobody waits for, or in which experts are streamed."""
    return LONG_PREFILL_TOKENS if model.hidden <= WIDE else LONG_PREFILL_TOKENS // 2


def size_memory(request: MemoryRequest) -> MemoryPlan:
    """Context length and KV tokens that fit. Raises ConfigError with the numbers when they do not."""
    context, context_reason = wanted_context(request)
    room = request.kv_tokens(max(0, request.kv_room_bytes))
    _check_fits(request, room, min(context, LEAST_CONTEXT))
    tokens, kv_reason = _kv_tokens(request, context, room)
    if tokens < context:
        if request.config.context_length is not None:
            raise DoesNotFit(_too_long(request, context, tokens), fields=("context_length",))
        context, context_reason = tokens, f"what the KV cache holds (the model could do {context})"
    return MemoryPlan(request.weight_bytes, request.budget_bytes, context, tokens, context_reason, kv_reason)


def memory_ledger(request: MemoryRequest, memory: MemoryPlan, kv_bytes: int) -> Ledger:
    """Ledger of CPU memory for a model without a GPU."""
    dense = request.model.dense_bytes(request.dtype, request.stored)
    experts = (
        "page tables of experts in the file"
        if request.experts_are_there
        else f"{request.experts_text}, packed"
    )
    images = request.image_entries(gpu=False)
    others = request.slot_bytes + GRAMMAR_BYTES + request.rope_bytes + sum(entry.nbytes for entry in images)
    entries = [
        LedgerEntry("dense weights", dense, "attention, shared and dense layers, head"),
        LedgerEntry("experts", memory.weight_bytes - dense - request.table_bytes, experts),
        LedgerEntry("tables", request.table_bytes, "of n-grams, read by row"),
        LedgerEntry("KV cache", kv_bytes, f"{memory.kv_tokens} tokens"),
        LedgerEntry("states", request.slot_bytes, "of sequences, whatever their length"),
        LedgerEntry("rotary tables", rope_bytes(request.model, memory.context_length), ROPE_WORDS),
        LedgerEntry("compiled grammars", GRAMMAR_BYTES, GRAMMAR_WORDS),
        *images,
        LedgerEntry("workspace", request.workspace_bytes - others, "of one step, Python, the tokenizer"),
    ]
    return ledger(RAM, entries, memory.budget_bytes, request.machine.available_memory)


def wanted_context(request: MemoryRequest) -> tuple[int, str]:
    length, limit = request.config.context_length, request.model.max_positions
    if length is None:
        return limit, "the model's own limit"
    if length > limit:
        raise ConfigError(
            f"--context-length is {length}, but the model goes to {limit}; give at most that",
            fields=("context_length",),
        )
    return length, "--context-length"


def _kv_tokens(request: MemoryRequest, context: int, room: int) -> tuple[int, str]:
    config = request.config
    if config.max_total_tokens is not None:
        return _asked_tokens(request, config.max_total_tokens, room), "--max-total-tokens"
    useful = request.max_running_requests * context
    if config.mem_fraction_static is not None:
        return min(
            room, useful
        ), f"--mem-fraction-static {request.fraction:g} of free memory, less the weights"
    share = request.kv_tokens(min(request.kv_room_bytes // DEFAULT_KV_SHARE, DEFAULT_KV_BYTES))
    reason = "a quarter of the memory left after the weights, at most 4 GiB, at least one full context"
    return min(room, useful, max(share, context)), reason


def _asked_tokens(request: MemoryRequest, tokens: int, room: int) -> int:
    if tokens > room:
        raise DoesNotFit(
            f"--max-total-tokens {tokens} needs {gib(request.kv_bytes(tokens))} for the KV cache, "
            f"but {gib(request.kv_bytes(room))} are left after the weights; give at most {room}",
            fields=("max_total_tokens",),
        )
    return tokens


def _check_fits(request: MemoryRequest, room: int, least: int) -> None:
    if room >= least:
        return
    needed = request.weight_bytes + request.workspace_bytes + request.kv_bytes(least)
    which = (
        "without its experts, which stay where they are,"
        if request.experts_are_there
        else f"with {request.experts_text} experts"
    )
    raise DoesNotFit(
        f"the model does not fit: its weights {which} take {gib(request.weight_bytes)}, "
        f"{gib(needed)} with workspace and the smallest KV cache; {gib(request.budget_bytes)} may be used "
        f"({request.fraction:g} of the {gib(request.machine.available_memory)} that are free of "
        f"{gib(request.machine.total_memory)}). {_way_out(request, least)}"
    )


def _way_out(request: MemoryRequest, least: int) -> str:
    """Advice for a model that does not fit, lossless ways first.

    least: tokens of the smallest KV cache; one that was asked for may be larger.
    """
    tokens = max(least, request.config.max_total_tokens or 0, request.config.context_length or 0)
    ways = list(_ways_out(request, request.weight_bytes + request.workspace_bytes + request.kv_bytes(tokens)))
    if ways:
        return "; ".join(ways)
    least = request.bytes_with("int4") + request.table_bytes
    if request.weight_bytes <= least:
        return "Free some memory or use a larger machine"
    return f"Even with --kt-method INT4 it takes {gib(least)}: free some memory or use a larger machine"


def _ways_out(request: MemoryRequest, needed: int) -> Iterator[str]:
    if share := _share(request, needed):
        yield f"{share} fits without loss"
    if request.table_bytes:
        yield "--tables map leaves tables in their files"
    smaller = {method: request.bytes_with(method.lower()) + request.table_bytes for method in ("INT8", "INT4")}
    lossy = {method: nbytes for method, nbytes in smaller.items() if nbytes < request.weight_bytes}
    for method, nbytes in lossy.items():
        if needed - request.weight_bytes + nbytes <= request.budget_bytes:
            yield f"--kt-method {method} fits: it takes {gib(nbytes)} (lossy)"
            return
    for method, nbytes in lossy.items():
        if share := _share(request, needed - request.weight_bytes + nbytes):
            yield f"--kt-method {method} {share} fits: it takes {gib(nbytes)} (lossy)"
            return


def _share(request: MemoryRequest, needed: int) -> str:
    """The flag that lets so many bytes be used; "": not even the largest share that is advised does."""
    fraction = needed / max(1, request.machine.available_memory) + 0.005
    if not request.fraction < fraction <= LARGEST_FRACTION:
        return ""
    return f"--mem-fraction-static {math.ceil(fraction * 100) / 100:.2f}"


def _too_long(request: MemoryRequest, context: int, tokens: int) -> str:
    return (
        f"--context-length {context} needs {gib(request.kv_bytes(context))} of KV cache, but it holds "
        f"{tokens} tokens ({gib(request.kv_bytes(tokens))}); "
        f"give at most {tokens}, or more with --max-total-tokens or --mem-fraction-static"
    )


def gib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / (1 << 20):.0f} MiB"
