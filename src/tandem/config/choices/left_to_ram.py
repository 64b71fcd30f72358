"""`check_ram`: whether the experts that a GPU leaves fit into CPU memory, and what would help where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tandem.config.engine_config import EngineConfig
from tandem.config.host_memory import HostShare, host_memory
from tandem.config.memory import (
    DEFAULT_FRACTION,
    HOST_STEP_BYTES,
    LARGEST_FRACTION,
    MemoryRequest,
    gib,
    ram_fraction,
)
from tandem.config.model_config import FORMAT_BYTES, ModelConfig, draft_experts
from tandem.errors import GpuTooSmall

LARGER_FRACTIONS = (0.85, 0.9, LARGEST_FRACTION)
ROUNDED = ("int8", "int4")  # what --kt-method makes of experts that are stored larger


def check_ram(
    request: MemoryRequest, on_gpu: int, drafts_there: bool, would_fit: Callable[[MemoryRequest], bool] | None
) -> None:
    """Of experts: what steps need beside them is not known yet. The default fraction leaves enough for it. would_fit:
    the same request with other flags; None: nobody reads which would help. Raises GpuTooSmall."""
    fraction = ram_fraction(request.config)
    steps = HOST_STEP_BYTES if fraction > DEFAULT_FRACTION else 0
    budget = request.machine.available_memory * fraction - steps
    needed = _needed(request, on_gpu, drafts_there)
    if needed > budget:
        ways = "; ".join(_ways_out(request, on_gpu, would_fit)) if would_fit else "unexplained"
        beside = f", less {gib(steps)} for steps" if steps else ""
        raise GpuTooSmall(
            f"the experts that stay in CPU memory take {gib(needed)}, but {gib(budget)} may be used "
            f"({fraction:g} of what is free{beside}); {ways}"
        )


def _needed(request: MemoryRequest, on_gpu: int, drafts_there: bool) -> int:
    live, _ = live_placement(request.config, on_gpu, request.model)
    drafts = 0 if drafts_there else draft_experts(request.model)
    there = request.experts_are_there
    share = HostShare(on_gpu, expert_bytes(request), 0, 0, (), 0, 0, live, there, drafts=drafts)
    host = host_memory(request.model, share)
    return host.experts + host.spare


def _ways_out(request: MemoryRequest, on_gpu: int, would_fit: Callable[[MemoryRequest], bool]) -> Iterator[str]:
    """What loses nothing comes first. Each is tried."""
    asked, flag = asked_experts(request.config, request.model)
    places = f"{on_gpu} of {request.model.routed_experts} are on the GPU"
    if asked is None:
        yield f"{places}, as many as fit there"
    elif would_fit(_without_shares(request)):
        yield f"{places}: without {flag} there are more, and it fits"
    else:
        yield f"{places}, as {flag} says"
    for fraction in LARGER_FRACTIONS:
        larger = replace(request.config, mem_fraction_static=fraction)
        if fraction > ram_fraction(request.config) and would_fit(replace(request, config=larger)):
            yield f"--mem-fraction-static {fraction:g} fits without loss"
            break
    for fmt in ROUNDED:
        smaller = FORMAT_BYTES[fmt] * request.model.expert_params < expert_bytes(request)
        if smaller and would_fit(replace(request, expert_format=fmt)):
            yield f"--kt-method {fmt.upper()} fits (lossy)"
            return


def _without_shares(request: MemoryRequest) -> MemoryRequest:
    return replace(request, config=replace(request.config, kt_gpu_experts_ratio=None, kt_num_gpu_experts=None))


def expert_bytes(request: MemoryRequest) -> int:
    """Of one routed expert, as packed."""
    return request.model.expert_bytes(request.expert_format, request.stored.experts)


def asked_experts(config: EngineConfig, model: ModelConfig) -> tuple[int | None, str]:
    """How many (layer, expert) pairs the flags put on the GPU; None: they do not say."""
    everyone = model.routed_experts
    if config.kt_gpu_experts_ratio is not None:
        return round(config.kt_gpu_experts_ratio * everyone), "--kt-gpu-experts-ratio"
    if config.kt_num_gpu_experts is not None:
        return min(everyone, config.kt_num_gpu_experts * len(model.moe_layers)), "--kt-num-gpu-experts"
    return None, ""


def live_placement(config: EngineConfig, on_gpu: int, model: ModelConfig) -> tuple[bool, str]:
    """Whether experts move while serving, and why (not)."""
    if not config.kt_enable_dynamic_expert_update:
        return False, "--kt-enable-dynamic-expert-update is not given"
    if on_gpu == 0:
        return False, "no expert is on the GPU, so there is no slot to move into"
    if on_gpu >= model.routed_experts:
        return False, "every expert is on the GPU already"
    return True, "--kt-enable-dynamic-expert-update"
