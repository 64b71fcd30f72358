"""Formats of a made-up checkpoint's matrices, by names of `bench.formats`; names alone, no weights."""

from __future__ import annotations

from tandem.checkpoint.survey import stored_formats
from tandem.errors import ConfigError
from tandem.formats.quant_format import QuantFormat
from tandem.planner.expert_format import EXPERT_FORMATS
from tandem.spec.model_config import STORED, ModelConfig, number_params
from tandem.spec.stored import StoredFormats

FORMATS = {
    "bf16": QuantFormat("bf16"),
    "fp8": QuantFormat("fp8", "fp8", 128, 128, "F32"),
    "int4-g128": QuantFormat("int4", "compressed-tensors", 128, 1, "BF16"),
    "mxfp4": QuantFormat("mxfp4", "mxfp4", 32, 1, "U8"),
}
"""Formats that dense projections and experts may be stored as."""

STORED_METHODS = {"FP8": "fp8", "MXFP4": "mxfp4"}
"""Values of --kt-method that say what the checkpoint has."""

METHODS = ("BF16", "INT8", "INT4", *STORED_METHODS)


def experts_of(method: str) -> str:
    """Format, of FORMATS, of the experts of a checkpoint that is served with this --kt-method."""
    return STORED_METHODS.get(method, "bf16")


def format_name(method: str) -> str:
    """As rows have it."""
    return STORED_METHODS.get(method) or EXPERT_FORMATS[method]


def expert_bytes(config: ModelConfig, method: str) -> int:
    """Packed bytes of one routed expert."""
    if method not in STORED_METHODS:
        return config.expert_bytes(EXPERT_FORMATS[method])
    return config.expert_bytes(STORED, stored_as(config, "bf16", experts_of(method)).experts)


def stored_as(config: ModelConfig, dense: str, experts: str = "bf16") -> StoredFormats:
    """Formats of such a checkpoint: projections in the format `dense`, router and head in bfloat16, but for what is
    never computed from codes. Raises ConfigError."""
    if dense not in FORMATS:
        raise ConfigError(f"--dense-format {dense!r} is not known; these are: {', '.join(FORMATS)}")
    head = 0 if config.tied_embeddings else config.vocab * config.hidden
    plain = head + config.hidden * config.moe.router.num_experts * len(config.moe_layers)
    tied = config.vocab * config.hidden - head
    layer, fmt = "model.layers.0.", FORMATS[dense]
    others = config.dense_params - config.shared_params - plain - tied - number_params(config)
    routed = [(layer + "mlp.experts.0.up_proj", FORMATS[experts], config.routed_params)]
    return stored_formats(
        [
            (layer + "self_attn.q_proj", fmt, others),
            (layer + "mlp.shared_experts.up_proj", fmt, config.shared_params),
            ("lm_head", QuantFormat("bf16"), plain),
            *(routed if experts != "bf16" else []),
        ]
    )
