"""What the model's authors recommend for sampling, used where an OpenAI request leaves a field out."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoint import read_generation

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling fields of `generation_config.json` (or a GGUF file); {} where there are none."""
    content = read_generation(directory)
    numbers = {name: content.get(name) for name in FIELDS}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}
