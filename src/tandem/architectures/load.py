"""A model's configuration, from its directory or from the keys of its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.architectures import config_of
from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys, read_json
from tandem.spec.model_config import ModelConfig
from tandem.spec.vision import with_processor


def load_config(path: str | Path) -> ModelConfig:
    """From a model directory: `config.json`, and `generation_config.json` for the eos ids.

    Raises ConfigError naming the key and a value to try, CheckpointError when a file is missing or broken.
    """
    directory = Path(path)
    generation = directory / "generation_config.json"
    keys, more = read_json(directory / "config.json"), read_json(generation) if generation.exists() else {}
    config = config_from_dict(keys, more)
    if config.tower is None:
        return config
    try:
        return replace(config, tower=with_processor(config.tower, directory))
    except ConfigError as error:  # text is served anyway
        return replace(config, tower=None, blind=str(error))


def config_from_dict(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """From the keys of both files. Raises ConfigError as `load_config` does."""
    return config_of(JsonKeys(config), JsonKeys(generation or {}, "generation_config.json"))
