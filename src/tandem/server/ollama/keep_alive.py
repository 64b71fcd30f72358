"""`keep_alive`: seconds, or a duration in Go's form, and the time at which a model that is kept so long is unloaded."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from tandem.errors import RequestError

FOR_GOOD = "9999-12-31T23:59:59Z"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
_MOST_CHARS = 64
_LARGEST = 10**300  # larger integers have no float
_MOST_SECONDS = 3.0e9  # a date of this century


def keep_seconds(value: Any) -> float | None:
    """inf for what is below 0: the model stays. None: nothing is said. Raises RequestError."""
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None:
        text = 'keep_alive must be seconds, or a duration such as "5m", "1h30m" or "0"; -1 keeps the model'
        raise RequestError(text, "keep_alive")
    return math.inf if seconds < 0 else seconds


def expiry(seconds_left: float) -> str:
    """RFC 3339."""
    if seconds_left > _MOST_SECONDS:
        return FOR_GOOD
    return (datetime.now(UTC) + timedelta(seconds=seconds_left)).isoformat()


def _seconds(value: Any) -> float | None:
    """None: it is no duration."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < _LARGEST else None
    if not isinstance(value, str) or len(value) > _MOST_CHARS:
        return None
    text = value.strip()
    sign = -1.0 if text.startswith("-") else 1.0
    text = text.removeprefix("-").removeprefix("+")
    if re.fullmatch(r"\d+(\.\d*)?", text):  # Go takes only "0" without a unit
        return sign * float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
