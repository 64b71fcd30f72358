"""`Learning`: what travels in a step, from rates that the CPU's times in earlier steps correct."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.forecast.stream_rates import StreamRates


@dataclass(frozen=True, slots=True)
class _Step:
    """Rows, the share that travels, and what was counted before it."""

    rows: int
    share: float
    served: float


class Learning:
    """Of one stream's steps, one after the other."""

    def __init__(
        self, rates: Callable[[], StreamRates], layers: int, served: Callable[[], float]
    ) -> None:
        """rates: of the stream, now. layers: that have experts in CPU memory. served: as `Followed`'s."""
        self._rates, self._layers, self._served = rates, layers, served
        self._last: _Step | None = None

    def share(self, rows: int, in_graphs: bool) -> float:
        """Of a step that begins: what travels. The one before has ended, and teaches. 0 rows: nothing is to travel."""
        rates, served, last = self._rates(), self._served(), self._last
        if last is not None:
            rates.observe(last.rows, last.share, (served - last.served) / self._layers)
        share = rates.share(rows, in_graphs) if rows else 0.0
        learns = rows > 0 and rates.forced is None
        self._last = _Step(rows, share, served) if learns else None
        return share

    def forget(self) -> None:
        """The step teaches nothing."""
        self._last = None
