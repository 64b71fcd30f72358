"""Which of a token's experts may be deferred: computed in CPU memory while the GPU goes on, and added one layer
later."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.flags.engine_config import EngineConfig
from tandem.planner.gpu_plan import GpuPlan
from tandem.spec.model_config import ModelConfig

FLAG = "--kt-max-deferred-experts-per-token"
NEVER_DEFERRED = "each layer's experts have a projection of their own behind them"


def deferred_experts(
    config: EngineConfig, model: ModelConfig, gpu_experts: int, graph_sizes: tuple[int, ...]
) -> tuple[int, str]:
    """How many, at most, of each token, and why (not). gpu_experts: (layer, expert) pairs there."""
    limit = config.kt_max_deferred_experts_per_token or 0
    if not limit:
        return 0, f"{FLAG} is not given"
    if model.moe.experts.latent:
        return 0, NEVER_DEFERRED
    if gpu_experts >= model.routed_experts:
        return 0, "every expert is on the GPU"
    if len(model.moe_layers) < 2:
        return 0, "the last layer with experts never defers, and there is one"
    if not graph_sizes:
        return 0, "only decode steps that are CUDA graphs defer, and there are none"
    return min(limit, model.moe.router.top_k), f"{FLAG}, lossy: in decode steps; kt quality measures it"


def deferral_notices(config: EngineConfig, model: ModelConfig, gpu: GpuPlan | None) -> Iterator[str]:
    """Start-up's notice on deferred experts: lossy, or without effect and why; none where they were not asked for."""
    limit = config.kt_max_deferred_experts_per_token
    if not limit:
        return
    if gpu is None:
        yield f"{FLAG} {limit} changes nothing: it fills the time in which the CPU waits for a GPU, and none is used"
    elif not gpu.deferred:
        why = deferred_experts(config, model, gpu.sizes.experts, gpu.graph_sizes)[1]
        yield f"{FLAG} {limit} changes nothing: {why}"
    else:
        share = f" --kt-gpu-experts-ratio {gpu.sizes.experts / model.routed_experts:.3g}" if gpu.sizes.experts else ""
        yield (
            f"{FLAG} {limit} is lossy: up to {gpu.deferred} of a token's {model.moe.router.top_k} experts are added "
            f"one layer late; what that does to answers says: kt quality {config.model} {FLAG} {limit}{share}"
        )
