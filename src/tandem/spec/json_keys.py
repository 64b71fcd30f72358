"""`JsonKeys`: `config.json`, read key by key with errors that name the key and a value to try."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import CheckpointError, ConfigError
from tandem.spec.small_files import CONFIG_BYTES, read_text

T = TypeVar("T", int, float, bool, str)

# Keys that say nothing about what is computed. All others that nobody read are reported (`unread`).
HARMLESS = frozenset((
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range",
    "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id",
    "max_window_layers", "model_type", "mtp_transformer_layers", "num_mtp_layers", "num_mtp_modules",
    "num_nextn_predict_layers", "use_mtp",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "problem_type", "quantization_config", "return_dict", "rope_theta", "router_aux_loss_coef", "router_jitter_noise",
    "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux", "torch_dtype", "transformers_version", "use_cache",
))  # fmt: skip


DRAFT_LAYERS = ("num_mtp_layers", "num_mtp_modules", "num_nextn_predict_layers")
"""How many layers a checkpoint has for speculative decoding."""

VISION = "vision_config"
TOWERS = (VISION, "audio_config")
"""Parts of multimodal models that text does not pass through."""


# Integers of files size lists, tables and loops before a tensor's shape can contradict them. So each is bounded where
# it is read: of config.json, and of a GGUF file's metadata.
LEAST = -1  # some keys have it for "none"
LARGEST = 1 << 31
LAYERS = 10_000
CHOICES = 1 << 16
WIDTH = 1 << 24
MOST_SIZE = 1e19  # of a real number, and of its inverse

_MOST = (
    (re.compile(r"layers$|block_count$"), LAYERS),
    (re.compile(r"heads|head_count|experts|expert_\w*count|time_step_rank|ssm\.group_count"), CHOICES),
    (re.compile(r"hidden_size|intermediate_size|_length$|inner_size|state_size|_(dim|rank)$|l_cache|kernel"), WIDTH),
)
_POSITIONS = re.compile(r"context_length$")


def outside(key: str, value: int) -> str:
    """Why `key` cannot have this value; "" where it can."""
    fitting = (most for pattern, most in _MOST if pattern.search(key) and not _POSITIONS.search(key))
    most = next(fitting, LARGEST)
    return f"is {value}, and must be at most {most}" if value > most else f"is {value}; try 1" if value < LEAST else ""


def read_json(path: Path, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError when it is missing or is not one."""
    try:
        value = json.loads(read_text(path, most_bytes))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is {path.parent} a model directory?") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply; fetch the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


class JsonKeys(Mapping[str, Any]):
    """A read-only view of `config.json` that checks types and remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values, self.where, self._read = values, where, set[str]()

    def overlaid(self, values: Mapping[str, Any]) -> JsonKeys:
        """The same keys, with those of `values` in front; what is read of it counts as read here."""
        merged = JsonKeys({**self._values, **values}, self.where)
        merged._read = self._read
        return merged

    def inside(self, key: str) -> JsonKeys:
        """The keys of the object `key`, before those of the whole; the whole where it is absent."""
        nested = self.mapping(key)
        if not nested:
            return self
        inner = JsonKeys({**self._values, **nested, "model_type": self._values["model_type"]}, self.where)
        inner._read |= set(self._values) - set(nested) - set(TOWERS)
        return inner

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys that may matter and that no one has asked for, sorted. A key that is null says nothing."""
        set_keys = {key for key, value in self._values.items() if value is not None}
        draft = {key for key in DRAFT_LAYERS if self._values.get(key)}
        return tuple(sorted((set_keys - self._read - HARMLESS) | (draft - self._read)))

    def need(self, key: str, example: T, *aliases: str) -> T:
        """The value of the first of `key, *aliases` that is present, as `example`'s type."""
        for name in (key, *aliases):
            if self.get(name) is not None:
                return self._typed(name, example)
        raise ConfigError(f"{self.where} lacks {key!r}: add it, for example {json.dumps({key: example})}")

    def optional(self, key: str, default: T) -> T:
        """The value of `key` as `default`'s type, or `default` when it is absent or null."""
        return default if self.get(key) is None else self._typed(key, default)

    def size(self, key: str, example: int, *aliases: str, most: int = 1 << 31) -> int:
        """A whole number from 1 to `most`."""
        value = self.need(key, example, *aliases)
        if not 1 <= value <= most:
            name = next(each for each in (key, *aliases) if self.get(each) is not None)
            raise ConfigError(f"{self.where}: {name} is {value}, and must be 1 to {most}; try {example}")
        return value

    def count(self, key: str, default: int, most: int = 1 << 16) -> int:
        """A whole number from 0 to `most`, or `default` when it is absent or null."""
        value = self.optional(key, default)
        if not 0 <= value <= most:
            raise ConfigError(f"{self.where}: {key} is {value}, and must be 0 to {most}; try {default}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """A JSON object; {} when absent or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(
                f"{self.where}: {key} is {value!r}, not an object; remove it to use the default"
            )
        return value or {}

    def integers(self, key: str) -> tuple[int, ...]:
        """A whole number or a list of them; () when absent or null."""
        value = self.get(key)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int for number in numbers):
            raise ConfigError(
                f"{self.where}: {key} is {value!r}, not a whole number or a list of them; try 2"
            )
        for number in numbers:
            self._check_bounds(key, number)
        return tuple(numbers)

    def only(self, key: str, supported: Any, why: str) -> None:
        """Refuses any value but `supported` or an absent key."""
        value = self.get(key)
        if value is not None and value != supported:
            raise ConfigError(f"{self.where}: {key} = {value!r} is not supported ({why}); {supported!r} is")

    def _typed(self, key: str, example: T) -> T:
        value = self[key]
        if isinstance(example, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not type(example) or (isinstance(value, float) and not math.isfinite(value)):
            kind = type(example).__name__
            raise ConfigError(f"{self.where}: {key} is {value!r}, not a {kind}; try {json.dumps(example)}")
        self._check_bounds(key, value)
        return value

    def _check_bounds(self, key: str, value: T) -> None:
        if type(value) is int and (why := outside(key, value)):
            raise ConfigError(f"{self.where}: {key} {why}")
        if type(value) is float and value and not 1 / MOST_SIZE <= abs(value) <= MOST_SIZE:
            raise ConfigError(f"{self.where}: {key} is {value}, whose square float32 does not have; try 1.0")
