"""Format that experts are packed in, and the reason for it."""

from __future__ import annotations

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.spec.model_config import STORED
from tandem.spec.stored import StoredFormat, StoredFormats

EXPERT_FORMATS = {"BF16": "bf16", "INT8": "int8", "INT4": "int4", "AMXINT8": "int8", "AMXINT4": "int4"}


def dtype_of(config: EngineConfig) -> str:
    """Dtype of activations, KV cache and dense weights."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def expert_format_of(config: EngineConfig, stored: StoredFormats) -> str:
    return stored_or_asked(config, dtype_of(config), stored)[0]


def unrounded_format(dtype: str) -> str:
    """The expert format that keeps weights as the dense ones are kept."""
    return "f32" if dtype == "float32" else "bf16"


def stored_or_asked(config: EngineConfig, dtype: str, stored: StoredFormats) -> tuple[str, str]:
    """And why. Raises ConfigError where --kt-method means another checkpoint's format."""
    method, experts = config.kt_method, stored.experts
    if method is None:
        if not experts.quantised:
            return unrounded_format(dtype), "nothing is rounded beyond the dtype"
        if dtype == "float32":
            return "f32", f"{experts.name} in the checkpoint, decoded for --dtype float32"
        return STORED, as_stored(experts, dtype)
    if experts.quantised and method in experts.methods:
        return STORED, f"--kt-method {method}: {as_stored(experts, dtype)}"
    if method not in EXPERT_FORMATS:
        raise ConfigError(
            f"--kt-method {method}: the checkpoint's experts are {experts.name}; leave the flag out to take them as "
            "they are, or give BF16, INT8 or INT4 to convert them while loading",
            fields=("kt_method",),
        )
    chosen, reason = EXPERT_FORMATS[method], f"--kt-method {method}"
    reason += f"; the checkpoint's {experts.name} is decoded and rounded again" if experts.quantised else ""
    if chosen in ("int8", "int4"):
        reason += "; weights are rounded in groups of 32, activations are not"
    return chosen, reason


def as_stored(stored: StoredFormat, dtype: str) -> str:
    rounded = (
        f"{stored.decoded} is decoded and rounded to {dtype}" if stored.decoded else "nothing is rounded"
    )
    return f"as the checkpoint has it; {rounded}"


def dense_choice(dtype: str, stored: StoredFormats, gpu: bool) -> tuple[bool, str, str]:
    """Whether dense matrices stay codes, what they are then, and why."""
    name = stored.dense.name
    if stored.shared.quantised and stored.shared.name != name:
        name += f", shared experts {stored.shared.name}"
    if dtype == "float32":
        return False, "f32", f"{name} in the checkpoint, decoded for --dtype float32"
    unread = ", ".join(dict.fromkeys(f.unread_by_gpu for f in (stored.dense, stored.shared) if f.unread_by_gpu))
    reason = as_stored(stored.dense, dtype)
    if gpu and unread:
        reason += f"; the GPU kernels do not read {unread}, which is decoded to {dtype}"
    return stored.dense_codes, name, reason
