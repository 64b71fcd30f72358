"""Seconds of a test that are the program's own, on a machine that does other things as well."""

from __future__ import annotations

from time import monotonic

import psutil

PATIENCE = 120.0  # seconds for what must come; a busy machine takes many


class QuietClock:
    """Stands still while no CPU is free: the program may be what waits for one. A program that waits for a time or for
    an event that does not come leaves one free, and the clock runs."""

    def __init__(self) -> None:
        self._began, self._idle = monotonic(), _idle_seconds()

    def seconds(self) -> float:
        """Since it was made."""
        return min(monotonic() - self._began, _idle_seconds() - self._idle)


def _idle_seconds() -> float:
    """Idle seconds of all CPUs."""
    return float(psutil.cpu_times().idle)
