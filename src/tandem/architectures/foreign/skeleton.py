"""A model of Transformers without memory: all modules, on PyTorch's meta device."""

from __future__ import annotations

import json
import logging
import re
import warnings
from typing import Any

import torch

from tandem.architectures.foreign.hooks import NAME, register
from tandem.architectures.foreign.registry import config_class, installed_version, model_class
from tandem.errors import ConfigError

NOT_FOR_MODULES = ("quantization_config", "auto_map", "dtype", "torch_dtype", "architectures")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def skeleton(config_json: str, dtype: torch.dtype = torch.float32, attention: str | None = NAME) -> Any:
    """config_json: as in the file. attention: an entry of Transformers' registry; None: what Transformers would take.

    No code of a checkpoint is run: only classes of the installed package. Raises ConfigError naming what it lacks.
    """
    register()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # nothing a user can change
    read = json.loads(config_json, object_hook=_special_float)
    values = {k: v for k, v in read.items() if k not in NOT_FOR_MODULES}
    try:
        config = config_class(values["model_type"]).from_dict(values)
        cls, part = model_class(config)
        chosen = {} if attention is None else {"attn_implementation": attention}
        with torch.device("meta"):
            model = cls._from_config(part, dtype=dtype, experts_implementation=NAME, **chosen)
    except ConfigError:
        raise
    except Exception as error:  # whatever a class makes of these keys
        raise ConfigError(_why_not_built(error)) from error
    return model.eval()


def _why_not_built(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args == (NAME,):
        return "a part of it computes attention in a way of its own, which has no place for Tandem's KV cache"
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, AttributeError) and type(error.obj).__name__.endswith("Config"):
        why = f"it asks {type(error.obj).__name__} for {error.name!r}, which is not there"
    return (
        "Tandem has no code for it, and Transformers "
        f"{installed_version()} cannot build its own from config.json: {why}"
    )


def _special_float(value: dict[str, Any]) -> Any:
    """Transformers writes what JSON has no number for as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def layer_of(name: str) -> int:
    """The decoder layer that a module or tensor belongs to, by its name; -1: none."""
    match = _NUMBER.search(name)
    return int(match[1]) if match else -1


def expert_modules(model: Any) -> dict[str, Any]:
    """By name: the modules whose experts Transformers lets others compute."""
    marks = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    return {name: m for name, m in model.named_modules() if all(hasattr(m, mark) for mark in marks)}
