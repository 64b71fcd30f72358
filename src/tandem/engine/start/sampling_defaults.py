"""What the model's authors recommend for sampling, used where a request leaves a field out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tandem.checkpoint import read_generation
from tandem.config import EngineConfig
from tandem.engine.limits import validate
from tandem.engine.protocol import SamplingParams
from tandem.errors import CheckpointError, RequestError

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling fields of `generation_config.json` (or a GGUF file); {} where there are none. Raises CheckpointError
    for one that no request could have."""
    content = read_generation(directory)
    given = {name: value for name in FIELDS if (value := content.get(name)) is not None}
    numbers: dict[str, Any] = {name: _number(directory, name, value) for name, value in given.items()}
    try:
        validate(SamplingParams(**numbers), vocab_size=0)
    except RequestError as error:
        raise _wrong(directory, str(error)) from error
    return numbers


def sampling_defaults(config: EngineConfig, directory: Path) -> dict[str, float]:
    """What fills the gaps of requests: `--sampling-defaults`. Raises as above."""
    return read_sampling_defaults(directory) if config.sampling_defaults == "model" else {}


def _number(directory: Path, name: str, value: object) -> float:
    whole = name == "top_k"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(directory, f"{name} is {value!r}, not a number")
    if whole and value != int(value):
        raise _wrong(directory, f"{name} is {value!r}, not a whole number")
    return int(value) if whole else value


def _wrong(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"sampling defaults of {directory} (generation_config.json): {what}; correct it, or take "
        "--sampling-defaults openai"
    )
