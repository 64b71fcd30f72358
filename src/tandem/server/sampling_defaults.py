"""What the model's authors recommend for sampling, used where an OpenAI request leaves a field out."""

from __future__ import annotations

from pathlib import Path

from tandem.config.json_keys import read_json

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling fields of `generation_config.json`; {} without that file or without such fields."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    content = read_json(path)
    numbers = {name: content.get(name) for name in FIELDS}
    return {name: value for name, value in numbers.items() if isinstance(value, int | float)}
