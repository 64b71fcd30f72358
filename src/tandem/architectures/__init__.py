"""One data file per family: its keys of `config.json`, its Hugging Face names, its GGUF keys and names."""

from __future__ import annotations

from tandem.architectures import (
    deepseek,
    deepseek_v4,
    deepseek_v32,
    dots1,
    ernie4_5_moe,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    hy_v3,
    laguna,
    llama,
    mimo_v2_flash,
    minimax_m2,
    mistral4,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
)
from tandem.architectures.family import Family, Gguf
from tandem.config.json_keys import JsonKeys
from tandem.config.model_config import ModelConfig
from tandem.errors import ConfigError

_ALL = (
    *deepseek.FAMILIES, deepseek_v4.FAMILY, *deepseek_v32.FAMILIES, dots1.FAMILY, ernie4_5_moe.FAMILY,
    *gemma4.FAMILIES, glm4_moe.FAMILY, glm4_moe_lite.FAMILY, gpt_oss.FAMILY, hy_v3.FAMILY, laguna.FAMILY, llama.FAMILY,
    mimo_v2_flash.FAMILY, minimax_m2.FAMILY, *mistral4.FAMILIES, mixtral.FAMILY, olmoe.FAMILY,
    qwen2_moe.FAMILY, qwen3_moe.FAMILY, *qwen3_next.FAMILIES,
)  # fmt: skip
FAMILIES: dict[str, Family] = {name: family for family in _ALL for name in family.model_types}
"""By `model_type`."""

GGUF: dict[str, Gguf] = {family.gguf.architecture: family.gguf for family in _ALL if family.gguf is not None}
"""By GGUF architecture."""


def config_of(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    """Of a family of ours, else of one that Transformers' modules run. Raises ConfigError where neither can."""
    model_type = keys.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(_unsupported(str(model_type)))
    if model_type in FAMILIES:
        return FAMILIES[model_type].config(keys, generation)
    from tandem.architectures.foreign import foreign_config  # which imports transformers

    try:
        return foreign_config(dict(keys), generation)
    except ConfigError as error:
        raise ConfigError(f"{_unsupported(model_type)}; {error}") from error


def family_of(model_type: str) -> Family:
    """Raises ConfigError naming those that there are."""
    if model_type not in FAMILIES:
        raise ConfigError(_unsupported(model_type))
    return FAMILIES[model_type]


def _unsupported(model_type: str) -> str:
    known = ", ".join(sorted(FAMILIES))
    return f"config.json: model_type {model_type!r} is not supported; these are: {known}"


__all__ = ["FAMILIES", "GGUF", "Family", "Gguf", "config_of", "family_of"]
