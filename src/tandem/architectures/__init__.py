"""One data file per family: its keys of `config.json`, its Hugging Face names, its GGUF keys and names."""

from __future__ import annotations

from tandem.architectures import (
    bailing_moe,
    deepseek,
    deepseek_v4,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    hunyuan_v1_moe,
    hy_v3,
    minimax_m2,
    mistral4,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from tandem.architectures.family import Family, Gguf
from tandem.architectures.recurrent import (
    bailing_hybrid,
    glm5_next,
    granite,
    kimi_linear,
    lfm2_moe,
    nemotron_h,
    qwen3_next,
    qwen4_exp,
)
from tandem.architectures.shared import text_part
from tandem.architectures.windows import afmoe, exaone_moe, laguna, mimo_v2_flash, step3p7
from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig
from tandem.spec.rope import one_rope

_ALL = (
    afmoe.FAMILY, bailing_hybrid.FAMILY, bailing_moe.FAMILY, *deepseek.FAMILIES, deepseek_v4.FAMILY,
    *deepseek_v32.FAMILIES, dots1.FAMILY, ernie4_5_moe.FAMILY, exaone_moe.FAMILY, *gemma4.FAMILIES,
    *glm4_moe.FAMILIES, glm4_moe_lite.FAMILY, glm5_next.FAMILY, gpt_oss.FAMILY, *granite.FAMILIES,
    hunyuan_v1_moe.FAMILY, hy_v3.FAMILY, kimi_linear.FAMILY, laguna.FAMILY, lfm2_moe.FAMILY, mimo_v2_flash.FAMILY,
    minimax_m2.FAMILY, *mistral4.FAMILIES, *mixtral.FAMILIES, nemotron_h.FAMILY, olmoe.FAMILY, qwen2_moe.FAMILY,
    *qwen3_moe.FAMILIES, *qwen3_next.FAMILIES, qwen4_exp.FAMILY, step3p7.FAMILY,
)  # fmt: skip
FAMILIES: dict[str, Family] = {name: family for family in _ALL for name in family.model_types}
"""By `model_type`."""

GGUF: dict[str, Gguf] = {family.gguf.architecture: family.gguf for family in _ALL if family.gguf is not None}
"""By GGUF architecture."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where a model that reads images or sound, too, has the keys of its text."""


def config_of(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """Model configuration by a family of ours, else by one that Transformers' modules run. Raises ConfigError where
    neither can."""
    model_type = keys.get("model_type")
    if model_type is None:
        raise ConfigError("config.json names no model_type, so nobody knows what it is: copy the model's own file")
    if not isinstance(model_type, str):
        raise ConfigError(_unsupported(str(model_type)))
    if model_type in FAMILIES:
        return FAMILIES[model_type].config(one_rope(keys), generation)
    if (text := _native_text(keys)) is not None:
        return FAMILIES[text["model_type"]].config(text, generation)
    from tandem.architectures.foreign import foreign_config  # which imports transformers

    try:
        return foreign_config(dict(keys), generation)
    except ConfigError as error:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported: {error}. `kt models` lists the types that run"
        ) from error


def _native_text(keys: JsonKeys) -> JsonKeys | None:
    """The keys of a multimodal model's text, if a family of ours is its text."""
    for part in TEXT_PARTS:
        kind = keys[part].get("model_type") if isinstance(keys.get(part), dict) else None
        if isinstance(kind, str) and kind in FAMILIES:
            return text_part(keys, part).overlaid({"model_type": kind})
    return None


def family_of(model_type: str) -> Family:
    """Raises ConfigError naming those that there are."""
    if model_type not in FAMILIES:
        raise ConfigError(_unsupported(model_type))
    return FAMILIES[model_type]


def _unsupported(model_type: str) -> str:
    known = ", ".join(sorted(FAMILIES))
    return f"config.json: model_type {model_type!r} is not supported; these are: {known}"


__all__ = ["FAMILIES", "GGUF", "Family", "Gguf", "config_of", "family_of"]
