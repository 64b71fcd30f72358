"""`Counters`: totals since the engine started, read by `Engine.stats`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    steps: int = 0
    step_seconds: float = 0.0
