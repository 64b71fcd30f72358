"""Experts streamed to the GPU for steps of many rows: whether, where to, and what their graphs take."""

from __future__ import annotations

from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.planner.cuda_graphs import prompt_graph_bytes
from tandem.planner.expert_sizes import expert_sizes, unpacked_experts
from tandem.planner.memory import MemoryRequest, long_step_tokens
from tandem.spec.gpu_scratch import StagingRing, expert_row_bytes, experts_at_once, ring_of
from tandem.spec.model_config import STORED, ModelConfig
from tandem.spec.stored import StoredFormats

NO_STREAMS = "stages stream only where --kt-gpu-prefill-token-threshold says from how many rows"


def experts_kept_off(model: ModelConfig, expert_format: str, stored: StoredFormats) -> str:
    """Why no expert can be on the GPU; "" where they can."""
    if expert_format == STORED and stored.experts.unread_by_gpu:
        return f"the GPU kernels do not read {stored.experts.unread_by_gpu}"
    if model.moe.experts.width % 2:
        return f"the GPU kernels need experts of an even width, not {model.moe.experts.width}"
    return ""


def streams_not(request: MemoryRequest, gpu: Gpu) -> str:
    """Why experts in CPU memory are not streamed to the GPU for steps of many rows; "" where they can be."""
    experts, channels = request.model.moe.experts, request.model.expert_channels
    if request.config.pipeline_parallel_size > 1 and not request.config.kt_gpu_prefill_token_threshold:
        return NO_STREAMS
    if request.config.enable_deterministic_inference:
        return "an expert's place decides its last bits"
    if request.config.kt_gpu_prefill_token_threshold == 0:
        return "--kt-gpu-prefill-token-threshold 0"
    if why_not := threshold_not_reached(request.config, request.model):
        return why_not
    if why_not := experts_kept_off(request.model, request.expert_format, request.stored):
        return why_not
    if request.experts_in_place:
        return "experts are used in the mapped file, which DMA cannot read"
    uneven = channels % 8 or experts.width % 8
    return f"grouped products need multiples of 8, not {channels} and {experts.width}" if uneven else ""


def threshold_not_reached(config: EngineConfig, model: ModelConfig) -> str:
    """Why no step has as many rows as `--kt-gpu-prefill-token-threshold` wants; "": some have, or nothing was asked."""
    least, chunk = config.kt_gpu_prefill_token_threshold, config.chunked_prefill_size
    rows = long_step_tokens(model) if chunk is None else chunk if chunk > 0 else model.max_positions
    most = min(rows, config.max_prefill_tokens or rows)
    flags = " and ".join(config.given_flags(("chunked_prefill_size", "max_prefill_tokens"))) or "the default"
    if not least or least <= most:
        return ""
    return f"--kt-gpu-prefill-token-threshold {least} is never reached: a step has at most {most} rows ({flags})"


def ring_for(request: MemoryRequest, gpu: Gpu) -> StagingRing:
    """Staging that experts are streamed to."""
    return ring_of(expert_sizes(request).largest, experts_at_once(gpu.memory_bytes, *unpacked_experts(request.model)))


def graph_bytes(request: MemoryRequest, gpu: Gpu, sizes: tuple[int, ...], streamed: bool, reserved_sms: int) -> int:
    """GPU bytes of CUDA graphs of prompts. streamed: experts are streamed."""
    parts = 0
    if streamed:
        ring, places = ring_for(request, gpu), request.model.moe.router.num_experts
        parts = 1 if ring.holds(places) else -(-places // ring.experts)
    return prompt_graph_bytes(request.model, sizes, parts, reserved_sms, expert_row_bytes(gpu.memory_bytes))
