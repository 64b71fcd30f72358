"""Rotary positions: which channels turn, how fast, and how their speed is scaled for long contexts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys

MOST_DIMS = 1 << 16  # a list has as many frequencies
KINDS = "default, linear, yarn, llama3 and proportional"


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All channels turn `factor` times slower (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, plain: list[float], theta: float) -> list[float]:
        return [f / self.factor for f in plain]


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (arXiv 2309.00071): fast channels turn as trained, slow ones `factor` times slower, a ramp between."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp's ends are rounded to whole channels

    def frequencies(self, plain: list[float], theta: float) -> list[float]:
        dims = 2 * len(plain)
        low, high = self._channel(self.beta_fast, theta, dims), self._channel(self.beta_slow, theta, dims)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        high += 0.001 if low == high else 0
        slow = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(len(plain))]
        return [f * (1 - s) + f / self.factor * s for f, s in zip(plain, slow, strict=True)]

    def _channel(self, turns: float, theta: float, dims: int) -> float:
        """The pair that turns so often within the original context."""
        return dims * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's: by wavelength, long ones are divided by `factor`, short ones stay, and a blend lies between."""

    factor: float
    original_positions: int
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, plain: list[float], theta: float) -> list[float]:
        return [self._scaled(f) for f in plain]

    def _scaled(self, frequency: float) -> float:
        turns = self.original_positions * frequency / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass(frozen=True, slots=True)
class Proportional:
    """The first `share` of the pairs turn as if all did, divided by `factor`; the others stand still."""

    share: float
    factor: float = 1.0

    def frequencies(self, plain: list[float], theta: float) -> list[float]:
        turning = int(self.share * 2 * len(plain) // 2)
        return [f / self.factor if i < turning else 0.0 for i, f in enumerate(plain)]


@dataclass(frozen=True, slots=True)
class Divided:
    """Pair i turns `divisors[i]` times slower: what is left of Llama 3's rule in a GGUF file."""

    divisors: tuple[float, ...]

    def frequencies(self, plain: list[float], theta: float) -> list[float]:
        return [f / divisor for f, divisor in zip(plain, self.divisors, strict=False)]


Scaling = LinearScaling | Yarn | Llama3 | Proportional | Divided


@dataclass(frozen=True, slots=True)
class Rope:
    """The first `dims` channels of a head turn in pairs; position p turns pair i by p * frequencies[i].

    pairs: channel i with i + dims / 2 ("halves"), or 2i with 2i + 1 ("neighbours"). table_factor multiplies cos and
    sin. Models whose layers turn differently have several of these; equal ones share a table.
    """

    theta: float
    dims: int
    scaling: Scaling | None = None
    table_factor: float = 1.0
    pairs: Literal["halves", "neighbours"] = "halves"

    def frequencies(self) -> list[float]:
        """Radians per position of each of the dims / 2 pairs."""
        plain: list[float] = [self.theta ** (-2 * i / self.dims) for i in range(self.dims // 2)]
        return plain if self.scaling is None else self.scaling.frequencies(plain, self.theta)


def still(dims: int) -> Rope:
    """No channel turns: attention without positions."""
    return Rope(10000.0, dims, Proportional(0.0))


STAY = "rope_theta", "partial_rotary_factor"
"""Keys for rotations, scaled or not."""


def one_rope(keys: JsonKeys) -> JsonKeys:
    """`keys` where `rope_scaling` does not lie beside `rope_parameters`: it replaces them, as in Transformers 5.

    Raises ConfigError where values of `rope_parameters` would be lost: Transformers goes back to the family's own.
    """
    if not {"rope_scaling", "rope_parameters"} <= set(keys):
        return keys
    scaling, before = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    if not scaling or not before:
        return keys
    if any(isinstance(value, Mapping) for value in before.values()) and scaling != before:
        raise ConfigError(
            f"{keys.where}: rope_scaling lies beside rope_parameters, which have an object for each kind of layer: "
            "write the scaling into that of full_attention, and remove rope_scaling"
        )
    lost = {key: before[key] for key in STAY if key in before and key not in scaling and key not in keys}
    if lost:
        whole = json.dumps({"rope_scaling": scaling | lost})
        raise ConfigError(
            f"{keys.where}: rope_scaling replaces rope_parameters, but does not say {' and '.join(lost)}: write {whole}"
        )
    return keys.overlaid({"rope_parameters": scaling})


def rope_keys(keys: JsonKeys) -> JsonKeys:
    """`keys` with those of `rope_parameters` (Transformers 5) or `rope_scaling` in front."""
    return keys.overlaid(keys.mapping("rope_parameters") or keys.mapping("rope_scaling"))


def read_rope(keys: JsonKeys, dims: int, pairs: Literal["halves", "neighbours"] = "halves") -> Rope:
    """keys: as `rope_keys` gives them. Raises ConfigError for a kind that is not computed, or wrong values."""
    theta = keys.need("rope_theta", 10000.0)
    if not (math.isfinite(theta) and theta > 0):
        raise ConfigError(f"{keys.where}: rope_theta is {theta}, and must be above 0; try 10000.0")
    if dims % 2 or not 1 <= dims <= MOST_DIMS:
        raise ConfigError(
            f"{keys.where}: {dims} rotary channels (by partial_rotary_factor) must be even, and 2 to {MOST_DIMS}"
        )
    kind = kind_of(keys)
    if kind == "default":
        return Rope(theta, dims, pairs=pairs)
    if kind == "linear":
        return Rope(theta, dims, LinearScaling(_factor(keys)), pairs=pairs)
    if kind == "llama3":
        return Rope(theta, dims, _llama3(keys), pairs=pairs)
    if kind == "divided":
        return Rope(theta, dims, _divided(keys, dims // 2), pairs=pairs)
    if kind == "proportional":
        share = keys.optional("partial_rotary_factor", 1.0)
        return Rope(theta, dims, Proportional(share, keys.optional("factor", 1.0)), pairs=pairs)
    if kind == "yarn":
        return Rope(theta, dims, _yarn(keys), keys.optional("attention_factor", _table_factor(keys)), pairs)
    raise ConfigError(f"{keys.where}: rope type {kind!r} is not supported; {KINDS} are")


def softmax_factor(keys: JsonKeys) -> float:
    """DeepSeek's factor of the softmax scale, by YaRN's `mscale_all_dim`, whatever is scaled how."""
    weight = 0.0 if kind_of(keys) == "default" else keys.optional("mscale_all_dim", 0.0)
    return mscale(_factor(keys), weight) ** 2 if weight else 1.0


def positions_of(keys: JsonKeys, rope: Rope) -> int:
    """How many positions a model reads: what config.json says, or as many as its scaling stretches to."""
    positions = keys.size("max_position_embeddings", 32768)
    scaling = rope.scaling
    if scaling is None or isinstance(scaling, LinearScaling | Proportional | Divided):
        return positions
    return max(positions, int(scaling.factor * scaling.original_positions))


def mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def kind_of(keys: JsonKeys) -> str:
    """keys: as `rope_keys` gives them."""
    kind = keys.get("rope_type") or keys.get("type") or "default"
    if not isinstance(kind, str):
        raise ConfigError(f"{keys.where}: rope_type is {kind!r}, not a word; {KINDS} are supported")
    return kind


def _factor(keys: JsonKeys) -> float:
    factor = keys.need("factor", 4.0)
    if not (math.isfinite(factor) and factor >= 1):
        raise ConfigError(f"{keys.where}: rope scaling factor {factor} must be at least 1; try 4.0")
    return factor


def _original(keys: JsonKeys) -> int:
    example = keys.optional("max_position_embeddings", 4096)
    if keys.get("original_max_position_embeddings") is None:
        return example
    return keys.size("original_max_position_embeddings", example)


def _yarn(keys: JsonKeys) -> Yarn:
    fast, slow = keys.optional("beta_fast", 32.0) or 32.0, keys.optional("beta_slow", 1.0) or 1.0
    for key, beta in (("beta_fast", fast), ("beta_slow", slow)):
        if not beta > 0:
            raise ConfigError(f"{keys.where}: {key} is {beta}, and must be above 0; remove it for the usual one")
    if (theta := keys.need("rope_theta", 10000.0)) <= 1:
        raise ConfigError(f"{keys.where}: rope_theta is {theta}, and must be above 1 for yarn; try 10000.0")
    return Yarn(_factor(keys), _original(keys), fast, slow, keys.optional("truncate", True))


def _table_factor(keys: JsonKeys) -> float:
    factor = _factor(keys)
    of_dims, of_all = keys.optional("mscale", 0.0), keys.optional("mscale_all_dim", 0.0)
    return mscale(factor, of_dims) / mscale(factor, of_all) if of_dims and of_all else mscale(factor, 1.0)


def _llama3(keys: JsonKeys) -> Llama3:
    low, high = keys.need("low_freq_factor", 1.0), keys.need("high_freq_factor", 4.0)
    if not 0 < low < high:
        raise ConfigError(
            f"{keys.where}: low_freq_factor {low} must be below high_freq_factor {high}; try 1.0"
        )
    return Llama3(_factor(keys), _original(keys), low, high)


def _divided(keys: JsonKeys, pairs: int) -> Divided:
    divisors = keys.get("divisors")
    if not isinstance(divisors, list) or len(divisors) < pairs or not all(each > 0 for each in divisors):
        raise ConfigError(f"{keys.where}: divisors must be a list of at least {pairs} numbers above 0")
    return Divided(tuple(map(float, divisors[:pairs])))
