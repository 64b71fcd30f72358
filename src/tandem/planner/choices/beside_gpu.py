"""`host_share`: what a plan's GPU leaves to CPU memory."""

from __future__ import annotations

from tandem.planner.gpu_plan import GpuPlan
from tandem.planner.host_memory import HostShare
from tandem.spec.model_config import ModelConfig, draft_experts, embedding_bytes


def host_share(
    model: ModelConfig,
    gpu: GpuPlan,
    expert_bytes: int,
    workers: int,
    step_tokens: int,
    pages: int,
    fused: bool,
    in_place: bool,
) -> HostShare:
    """pages: of the longest sequence; fused: shared experts are computed as routed ones."""
    top_k = model.moe.router.top_k + (model.moe.fusible_shared if fused else 0)
    sizes, has_deferred = gpu.graph_sizes, gpu.deferred > 0
    drafts = 0 if gpu.sizes.draft_experts else draft_experts(model)
    return HostShare(
        gpu.sizes.experts, expert_bytes, workers, step_tokens, sizes, pages, top_k, gpu.live, in_place, has_deferred,
        drafts=drafts,
        embedding_bytes=embedding_bytes(model, "bfloat16") if gpu.embedding_in_ram else 0,
    )  # fmt: skip
