"""`Plan`: the outcome of `resolve(config, model, machine)`. What `kt serve --plan-only` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.config import memory
from tandem.config.engine_config import EngineConfig
from tandem.config.machine import Machine
from tandem.config.model_config import ModelConfig
from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Decision:
    """One resolved choice: what was chosen, and why (a measured fact, a flag, a limit)."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the engine needs to know that the user may or may not have said. Immutable."""

    device: str  # "cpu" (later "cuda")
    dtype: str  # "bfloat16" | "float32": activations, KV cache and dense weights
    expert_format: str  # "bf16" | "f32" | "int8" | "int4": packed routed experts
    dense_backend: str  # "packed" | "torch": who multiplies the dense linears
    tier: str  # kernel tier: "scalar" | "avx2" | "avx512" | "avx512_bf16" | "amx"
    cpus: tuple[int, ...]  # logical CPU of each pool thread, -1: not pinned; its length is the thread count
    context_length: int  # longest prompt + answer of one request, tokens
    page_size: int  # tokens per KV page
    num_pages: int  # KV pages of the whole cache
    max_running_requests: int  # sequences decoded together
    max_step_tokens: int  # token budget of one step: decode tokens + prefill chunks
    radix_cache: bool  # share KV pages of equal prefixes
    fuse_shared_experts: bool  # compute shared experts as extra always-chosen routed experts
    decisions: tuple[Decision, ...] = field(default=())
    notices: tuple[str, ...] = field(default=())  # given flags that change nothing, said at start-up


class _Choice[T](NamedTuple):
    value: T
    reason: str
