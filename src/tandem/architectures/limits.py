"""Limits of feed-forwards' activations that differ between layers: Step and Ling 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.architectures.shared import layer_count
from tandem.errors import ConfigError
from tandem.mechanisms.experts.shape import Moe
from tandem.spec.activation import Activation
from tandem.spec.json_keys import JsonKeys


def of_layers(keys: JsonKeys, key: str, default: Any) -> list[Any]:
    """A list of one value for each layer; those of draft layers at its end are left out."""
    values, count = keys.get(key) or [], layer_count(keys)
    if not isinstance(values, list) or 0 < len(values) < count:
        raise ConfigError(f"{keys.where}: {key} must be a list of {count}, one for each layer; or remove it")
    by_layer = [default if value is None else value for value in values[:count]]
    return by_layer or [default] * count


def limits(keys: JsonKeys, key: str) -> list[float]:
    """Numbers of each layer; 0: without a limit."""
    return _numbers(keys, key, of_layers(keys, key, 0.0))


def draft_limit(keys: JsonKeys, key: str) -> float:
    """The number of a draft layer, which stands behind those of all layers; 0: without a limit."""
    behind = (keys.get(key) or [])[layer_count(keys) :][:1]
    return next(iter(_numbers(keys, key, [value or 0.0 for value in behind])), 0.0)


def _numbers(keys: JsonKeys, key: str, values: list[Any]) -> list[float]:
    if bad := [value for value in values if type(value) not in (int, float) or value < 0]:
        raise ConfigError(f"{keys.where}: {key} has {bad[0]!r}, and must have numbers of 0 or more")
    return [float(value) for value in values]


def clamped(experts: Moe, routed: float, shared: float) -> Moe:
    """The same experts with limits of their own."""
    shared_experts = None if experts.shared is None else replace(experts.shared, activation=up_to(shared))
    return replace(experts, experts=replace(experts.experts, activation=up_to(routed)), shared=shared_experts)


def up_to(limit: float) -> Activation:
    """0: without a limit."""
    return Activation("silu_clamp", limit=limit) if limit else Activation()
