"""Fusion of shared experts: computed as routed ones that every token chooses. The only place that decides it."""

from __future__ import annotations

from tandem.planner.choices.expert_streaming import experts_kept_off
from tandem.planner.expert_format import unrounded_format
from tandem.planner.memory import MemoryRequest
from tandem.spec.model_config import STORED, ModelConfig
from tandem.spec.stored import StoredFormats


def why_apart(request: MemoryRequest, gpu: bool) -> str:
    """Reason that shared experts are not fused with routed ones; "": they are.

    Shared experts that count as routed ones are where every token is computed: on the GPU, if there is one.
    """
    model, fmt, stored = request.model, request.expert_format, request.stored
    if request.config.disable_shared_experts_fusion:
        return "--disable-shared-experts-fusion"
    if request.experts_in_place:
        return "they are packed, which the routed ones are not"
    if not _alike(model, fmt, request.dtype, stored):
        return "routed experts have a format of their own"
    if model.moe.fusible_shared == 0:
        differs = model.moe.separate_shared or model.moe.experts.latent > 0
        other = "differs from routed ones" if differs else "is no multiple of a routed one"
        why = "has its own gate" if model.moe.shared_gate else other
        return f"the shared expert {why}"
    return experts_kept_off(model, fmt, stored) if gpu else ""


def _alike(model: ModelConfig, expert_format: str, dtype: str, stored: StoredFormats) -> bool:
    """Whether routed and shared experts keep their own values in one and the same format."""
    if expert_format != STORED:
        return expert_format == unrounded_format(dtype) and (
            dtype == "float32" or not stored.shared.quantised
        )
    experts = stored.experts
    return stored.shared == experts and experts.group > 0 and model.moe.experts.width % experts.group == 0
