"""Hooks of a step: what operations prepare before its layers run."""

from __future__ import annotations

from collections.abc import Callable

from tandem.models.batch import ForwardBatch

BeginStep = Callable[[ForwardBatch, bool], None]
"""Before the layers of a step run; True: before its graph is captured or replayed."""


def nothing_begins(batch: ForwardBatch, captured: bool) -> None:
    """Where no backend plans its steps."""
