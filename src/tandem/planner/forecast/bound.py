"""Least time of a decode step, by the bytes it must read: one bound, of plans and of benchmarks.

Experts on both sides are read at the same time, each as fast as its memory.
"""

from __future__ import annotations

from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import UNQUANTISED, StoredFormats


def experts_seconds(cpu_reads: float, gpu_reads: float, nbytes: int, dram_gbps: float, gpu_gbps: float) -> float:
    """The least that reading so many experts of `nbytes` takes."""
    gpu_seconds = gpu_reads * nbytes / gpu_gbps if gpu_reads else 0.0
    return max(cpu_reads * nbytes / dram_gbps, gpu_seconds) / 1e9


def distinct_experts(model: ModelConfig, tokens: int) -> float:
    """How many of a layer's experts `tokens` tokens are expected to choose between them, if routing is uniform:
    E (1 - (1 - k/E)^tokens)."""
    router = model.moe.router
    if not router.num_experts:
        return 0.0
    return router.num_experts * float(1 - (1 - router.top_k / router.num_experts) ** tokens)


def bytes_per_step(
    model: ModelConfig, dtype: str, expert_format: str, batch: int, stored: StoredFormats = UNQUANTISED
) -> float:
    """Weight bytes that a step of `batch` sequences must read: the dense ones, and the experts they choose."""
    chosen = distinct_experts(model, batch) * len(model.moe_layers)
    return model.dense_bytes(dtype, stored) + chosen * model.expert_bytes(expert_format, stored.experts)
