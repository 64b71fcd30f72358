"""One data file per family: its keys of `config.json`, its Hugging Face names, its GGUF keys and names."""

from __future__ import annotations

from tandem.architectures import (
    deepseek,
    glm4_moe,
    gpt_oss,
    llama,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
)
from tandem.architectures.family import Family, Gguf
from tandem.errors import ConfigError

_ALL = (
    *deepseek.FAMILIES, glm4_moe.FAMILY, gpt_oss.FAMILY, llama.FAMILY, mixtral.FAMILY, olmoe.FAMILY, qwen2_moe.FAMILY,
    qwen3_moe.FAMILY, *qwen3_next.FAMILIES,
)  # fmt: skip
FAMILIES: dict[str, Family] = {name: family for family in _ALL for name in family.model_types}
"""By `model_type`."""

GGUF: dict[str, Gguf] = {family.gguf.architecture: family.gguf for family in _ALL if family.gguf is not None}
"""By GGUF architecture."""


def family_of(model_type: str) -> Family:
    """Raises ConfigError naming those that there are."""
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; these are: {known}")
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "GGUF", "Family", "Gguf", "family_of"]
