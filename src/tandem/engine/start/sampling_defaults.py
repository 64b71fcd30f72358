"""Sampling as the model's authors recommend it, used where a request leaves a field out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tandem.checkpoint import read_generation
from tandem.engine.limits import validate
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.parameters import recommended
from tandem.errors import CheckpointError, RequestError
from tandem.flags.engine_config import EngineConfig

FIELDS = recommended()

# What else generation_config.json may say of the choice of tokens, and its values that say nothing. Lengths
# (`max_length`, `max_new_tokens`, `max_time`) are a request's, and the rest is about how Transformers computes.
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty", "penalty_alpha", "min_length",
         "min_new_tokens", "epsilon_cutoff", "eta_cutoff", "token_healing"), (0,),
    ),
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id",
         "forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config", "top_h", "dola_layers",
         "constraints", "force_words_ids", "stop_strings"), ([], {}),
    ),
}  # fmt: skip


def read_sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling fields of `generation_config.json` (or a GGUF file); {} where there are none. `do_sample` false is
    temperature 0. Raises CheckpointError for one that no request could have, or that is not done here."""
    content = read_generation(directory)
    for name, neutral in NEUTRAL.items():
        if (value := content.get(name)) is not None and value not in neutral:
            raise _wrong(directory, f"{name} is {value!r:.80}, which is not supported")
    fields = {name: value for name in FIELDS if (value := content.get(name)) is not None}
    numbers: dict[str, Any] = {name: _number(directory, name, value) for name, value in fields.items()}
    samples = content.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise _wrong(directory, f"do_sample is {samples!r:.80}, neither true nor false")
    if samples is False:
        penalties = {name: value for name, value in numbers.items() if name == "repetition_penalty"}
        numbers = {"temperature": 0.0, **penalties}
    try:
        validate(SamplingSettings(**numbers), vocab_size=0)
    except RequestError as error:
        raise _wrong(directory, str(error)) from error
    return numbers


def sampling_defaults(config: EngineConfig, directory: Path) -> dict[str, float]:
    """Values for fields that requests leave out: `--sampling-defaults`. Raises as above."""
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
