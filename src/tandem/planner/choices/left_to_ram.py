"""`short_of_ram`: whether the experts that a GPU leaves fit into CPU memory, and what would help where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from tandem.flags.engine_config import EngineConfig
from tandem.planner.expert_sizes import expert_sizes
from tandem.planner.host_memory import HostShare, host_memory
from tandem.planner.memory import (
    DEFAULT_FRACTION,
    HOST_STEP_BYTES,
    LARGEST_FRACTION,
    MemoryRequest,
    gib,
    ram_fraction,
)
from tandem.planner.vision_costs import pixel_entries
from tandem.spec.model_config import FORMAT_BYTES, ModelConfig, draft_experts, embedding_bytes

LARGER_FRACTIONS = (0.85, 0.9, LARGEST_FRACTION)
ROUNDED = ("int8", "int4")  # what --kt-method makes of experts that are stored larger


def short_of_ram(request: MemoryRequest, gpu_experts: int, drafts_there: bool) -> str:
    """Why the experts that stay in CPU memory do not fit there; "": they do. Of experts and an embedding: what steps
    need beside them is not known yet. The default fraction leaves enough for it."""
    moves = request.config.kt_enable_dynamic_expert_update and 0 < gpu_experts < request.model.routed_experts
    needed, budget = ram_needed(request, gpu_experts, drafts_there, moves), ram_budget(request)
    if needed <= budget:
        return ""
    steps = _step_bytes(request)
    reserve = f", less {gib(steps)} for steps and images" if steps else ""
    return (
        f"the experts that stay in CPU memory take {gib(needed)}, but {gib(int(budget))} may be used "
        f"({ram_fraction(request.config):g} of what is free{reserve})"
    )


def ram_budget(request: MemoryRequest) -> float:
    """Bytes of CPU memory for experts and an embedding."""
    return request.machine.available_memory * ram_fraction(request.config) - _step_bytes(request)


def _step_bytes(request: MemoryRequest) -> int:
    """Bytes that neither experts nor the embedding may have: of steps, and of images that wait."""
    steps = HOST_STEP_BYTES if ram_fraction(request.config) > DEFAULT_FRACTION else 0
    return steps + sum(entry.nbytes for entry in pixel_entries(request.model, request.machine.available_memory))


def ram_needed(request: MemoryRequest, gpu_experts: int, drafts_there: bool, live: bool) -> int:
    """Bytes that `ram_budget` is for. live: experts move, for which layers have spare places."""
    drafts = 0 if drafts_there else draft_experts(request.model)
    embedding = embedding_bytes(request.model, request.dtype) if request.embedding_in_ram else 0
    sizes = expert_sizes(request)
    share = HostShare(
        gpu_experts, expert_bytes(request), 0, 0, (), 0, 0, live, request.experts_are_there, drafts=drafts,
        routed_bytes=sizes.ram_bytes(gpu_experts), spare_bytes=sizes.spare_bytes(gpu_experts),
        embedding_bytes=embedding,
    )  # fmt: skip
    host = host_memory(request.model, share)
    return host.experts + host.spare + host.embedding + request.table_bytes


class WouldFit(Protocol):
    def __call__(self, **changes: Any) -> bool:
        """The same request with these changes, of it or of its flags."""
        ...


def ways_out(request: MemoryRequest, gpu_experts: int, would_fit: WouldFit) -> Iterator[str]:
    """Changes of flags that would fit, lossless ones first. Each is tried."""
    experts, flag = asked_experts(request.config, request.model)
    places = f"{gpu_experts} of {request.model.routed_experts} are on the GPU"
    if experts is None:
        yield f"{places}, as many as fit there"
    elif would_fit(kt_gpu_experts_ratio=None, kt_num_gpu_experts=None):
        yield f"{places}: without {flag} there are more, and it fits"
    else:
        yield f"{places}, as {flag} says"
    larger = [each for each in LARGER_FRACTIONS if each > ram_fraction(request.config)]
    if fraction := next((each for each in larger if would_fit(mem_fraction_static=each)), None):
        yield f"--mem-fraction-static {fraction:g} fits without loss"
    for fmt in ROUNDED:
        if FORMAT_BYTES[fmt] * request.model.expert_params >= expert_bytes(request):
            continue
        fractions: list[dict[str, float]] = [{}, *({"mem_fraction_static": each} for each in larger)]
        for more in fractions:
            if would_fit(expert_format=fmt, **more):
                also = "".join(f" --mem-fraction-static {each:g}" for each in more.values())
                yield f"--kt-method {fmt.upper()}{also} fits (lossy)"
                return


def expert_bytes(request: MemoryRequest) -> int:
    """Bytes of one routed expert, as packed."""
    return request.model.expert_bytes(request.expert_format, request.stored.experts)


def asked_experts(config: EngineConfig, model: ModelConfig) -> tuple[int | None, str]:
    """How many (layer, expert) pairs the flags put on the GPU; None: they do not say."""
    everyone = model.routed_experts
    if config.kt_gpu_experts_ratio is not None:
        return round(config.kt_gpu_experts_ratio * everyone), "--kt-gpu-experts-ratio"
    if config.kt_num_gpu_experts is not None:
        return min(everyone, config.kt_num_gpu_experts * len(model.moe_layers)), "--kt-num-gpu-experts"
    return None, ""

