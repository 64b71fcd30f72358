"""`--enable-deterministic-inference`: a row has the same bits whatever else is in its step, wherever chunks begin."""

from __future__ import annotations

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.mechanisms.cost import cost_of
from tandem.spec.model_config import ModelConfig

FLAG = "--enable-deterministic-inference"


def tier_reason(tier: str, deterministic: bool) -> str:
    """Reason in the plan that names a kernel tier's effect on an answer's last bits; "": it has none."""
    if tier != "amx":
        return ""
    if deterministic:
        return f"; tiles for any number of rows, and no digits, for {FLAG}"
    return f"; an answer's last bits may depend on what else is in the batch, {FLAG} keeps them the same"


def deterministic(config: EngineConfig, model: ModelConfig, tier: str) -> list[tuple[str, str]]:
    """The plan's line on deterministic answers; [] where none were asked for.

    Raises ConfigError where they cannot be kept.
    """
    if not config.enable_deterministic_inference:
        return []
    if config.kt_enable_dynamic_expert_update:
        why = "experts that move would be computed in other places, with other last bits"
        raise _refused(why, "kt_enable_dynamic_expert_update")
    if config.kt_max_deferred_experts_per_token:
        raise _refused("experts are deferred in some steps and not in others", "kt_max_deferred_experts_per_token")
    if config.kt_int8_activations and tier == "amx":
        raise _refused(
            "AMX rounds activations of experts with few rows only, and how many there are depends on the batch; "
            "--kernel-tier avx512_bf16 rounds them all",
            "kt_int8_activations",
        )
    if why := _why_not(model):
        raise ConfigError(f"{FLAG}: {why}; leave it out", fields=("enable_deterministic_inference",))
    return [("deterministic", f"{FLAG}: the same alone, beside others, in any chunks, after a prefix hit")]


def depends_on_others(config: EngineConfig, model: ModelConfig) -> str:
    """Why a row's last bits on a GPU depend on what else is in its step; "": they do not. Each row is computed as if it
    decoded, in tiles of one shape."""
    if not model.mixers or not all(cost_of(mixer).each_row for mixer in model.mixers):
        return "on a GPU prompts have kernels of their own for this model's attention"
    if config.attention_backend not in ("auto", "triton"):
        return f"--attention-backend {config.attention_backend} computes a row as its neighbours ask for"
    return ""


def _refused(why: str, field: str) -> ConfigError:
    other = "--" + field.replace("_", "-")
    return ConfigError(
        f"{FLAG} beside {other}: {why}; leave out one of the two", fields=("enable_deterministic_inference", field)
    )


def _why_not(model: ModelConfig) -> str:
    if model.foreign is not None:
        return "Transformers' modules are PyTorch's products, whose sums depend on the rows beside them"
    return next(filter(None, (cost_of(mixer).depends_on_others for mixer in model.mixers)), "")
