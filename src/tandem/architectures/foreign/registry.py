"""Registry of the installed Transformers: its version and its families."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from tandem.errors import ConfigError

LEAST = (5, 10)
INSTALL = "pip install 'transformers>=5.10'"


def installed_version() -> str:
    """ "" where it is not installed."""
    try:
        return version("transformers") if find_spec("transformers") is not None else ""
    except PackageNotFoundError:
        return ""


def why_not_installed() -> str:
    """Reason that no Transformers can be used, and the way out; "": one can."""
    installed = installed_version()
    if not installed:
        return f"other families run through Transformers, which is not installed: {INSTALL}"
    if tuple(int(part) for part in installed.split(".")[:2]) < LEAST:
        return f"other families run through Transformers 5.10 or newer, this is {installed}: {INSTALL}"
    return ""


def config_class(model_type: str) -> Any:
    """Raises ConfigError where Transformers has no such family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"Transformers {installed_version()} has no {model_type!r} either")
    return CONFIG_MAPPING[model_type]


def model_class(config: Any) -> tuple[Any, Any]:
    """The class that makes text, and its part of the configuration. Raises ConfigError where there is none."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    text = config.get_text_config()
    for part, mapping in (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING),
        (config, MODEL_FOR_CAUSAL_LM_MAPPING),
        (config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    ):
        if type(part) in mapping:
            return mapping[type(part)], part
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("it reads with an encoder and answers with a decoder; only models that go on with a text run")
    raise ConfigError(
        f"Transformers {installed_version()} has no class of {config.model_type!r} that makes text"
    )
