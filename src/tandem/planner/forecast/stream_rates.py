"""`StreamRates`: how much of a layer's experts in CPU memory is streamed to the GPU, and how much the CPU computes.

Both happen at the same time. The CPU begins later: rows are handed to it, and its thread gives the GPU all its work
first. So the share f that takes both equally long is best: f * bus = host + cpu(f). Those that had most rows are
streamed first. So the CPU has (1 - f) of the experts, which it reads, and fewer of the rows, which it multiplies. A
step streams where that gains a tenth over the CPU alone, to which rows are handed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem.planner.forecast.cpu_factors import CpuFactors

GAIN = 1.1
HOST_SECONDS = 2.5e-3
"""Seconds of a layer in which the CPU has a part, in addition: 2.7 ms at 512 rows, 2.4 at 2048 (H100, Qwen3-30B-A3B,
int4: experts are streamed in three parts)."""
LEAST_PARTS, PART_SECONDS = 3, 5e-4  # so many are in that; each more takes so long: counted by launches, not timed
HOST_BASE, HOST_ROW = 5e-4, 4e-6
"""Likewise, where nothing is streamed: 0.9 ms at 64 rows and 3 at 512, of which a share is on the GPU (as above)."""
SPLIT_SECONDS = 1e-3  # that a layer takes longer than its bus where both compute: 5.2 ms instead of 4.1 at 512 rows
WHOLE = 0.8  # for less than the rest the CPU is left out: it slows the bus, by a tenth at most where measured
GRAPH_BASE, GRAPH_ROW = 4e-4, 4e-7
"""Seconds of a layer that is a graph and in which the CPU has a part, in addition: attention, and rows on their way.
0.7 ms at 512 rows, 1.2 at 2048 (as above)."""
BUS_BESIDE = 1.12  # times as long as alone the bus takes beside a CPU that computes: 7.0 ms instead of 6.25 (as above)
DOUBT = 3.0  # times that what is known of the CPU may be wrong: at the start, or after steps on a busy machine
HOPED = tuple((1 - i / 10) ** 3 for i in range(11))  # of the rows left: few experts have most of them
HALVINGS = 24  # of the shares among which the best one is sought
UNUSUAL = 1.3  # times as much work for the CPU as the rows before made expect, or as little
TRIED = 1.1  # times as long as the bus alone a step takes that tries a CPU which seems too slow, by what is known


@dataclass(slots=True)
class StreamRates:
    """Seconds of a layer, on average over those that have experts in CPU memory. bus: of copying them all; cpu_fixed
    and cpu_row: of computing them all, for a step and for each of its rows. bend: rows of a step from which on each
    takes so long instead. least_rows: of a step that streams; None: wherever it pays."""

    bus: float
    cpu_fixed: float
    cpu_row: float
    least_rows: int | None = None
    parts: int = LEAST_PARTS  # in which a layer's experts are streamed
    bend: tuple[int, float] | None = None
    factors: CpuFactors = field(default_factory=CpuFactors)
    left: Sequence[float] | None = None  # of the rows, where 0, ... 1 of the experts is streamed; None: as of experts
    forced: float | None = None  # the share of every step, for measurements

    def host_seconds(self, share: float) -> float:
        """Until the CPU begins, where both compute: the host gives the GPU's work first."""
        return HOST_SECONDS + max(0.0, share * self.parts - LEAST_PARTS) * PART_SECONDS

    def share(self, rows: int, in_graphs: bool = False) -> float:
        """Share of the experts in CPU memory that is streamed in a step of so many rows; 0.0: none. in_graphs: layers
        are in CUDA graphs, where no host delays the CPU."""
        if self.forced is not None:
            return self.forced
        if self.least_rows is not None and rows < max(1, self.least_rows):
            return 0.0
        share = self._even(rows, in_graphs, self.factors.of(rows))
        whole = share > WHOLE
        share = 1.0 if whole else share
        if self.least_rows is None and self.seconds(rows, 0.0) < GAIN * self.seconds(rows, share, in_graphs):
            return 0.0
        return self._tried(rows, in_graphs) if whole and self.factors.tries(rows) else share

    def may_share(self, rows: int) -> bool:
        """True where bus and CPU may share the experts of such a step in graphs, once it is known who has few rows, and
        how long the CPU takes."""
        return any(0.0 < self._doubted(doubt).share(rows, in_graphs=True) < 1.0 for doubt in (1 / DOUBT, 1.0, DOUBT))

    def _doubted(self, doubt: float) -> StreamRates:
        bend = None if self.bend is None else (self.bend[0], doubt * self.bend[1])
        fixed, row = doubt * self.cpu_fixed, doubt * self.cpu_row
        left, factors = self.left or HOPED, CpuFactors()
        return replace(self, left=left, factors=factors, cpu_fixed=fixed, cpu_row=row, bend=bend)

    def _even(self, rows: int, in_graphs: bool, factor: float) -> float:
        """The share that takes both equally long. factor: of the CPU's time at the start."""
        bus = self.bus * (BUS_BESIDE if in_graphs else 1.0)

        def cpu_ends_first(share: float) -> bool:
            return self._host(rows, share, in_graphs) + factor * self._start_part(rows, share) <= share * bus

        return _least_share(0.0, cpu_ends_first)

    def _tried(self, rows: int, in_graphs: bool) -> float:
        """The share of a step that tries a CPU which seems too slow: as much is left to it as it may have in that time.
        1.0: nothing, as it would have no part either if it were much faster."""
        most, factor = TRIED * self.bus, self.factors.of(rows)
        if self._even(rows, in_graphs, min(1.0, factor / DOUBT)) > WHOLE:
            return 1.0
        return _least_share(
            WHOLE, lambda share: self._host(rows, share, in_graphs) + factor * self._start_part(rows, share) <= most
        )

    def _host(self, rows: int, share: float, in_graphs: bool) -> float:
        """Until the CPU begins."""
        return GRAPH_BASE + rows * GRAPH_ROW if in_graphs else self.host_seconds(share)

    def seconds(self, rows: int, share: float, in_graphs: bool = False) -> float:
        """Until a layer's experts are computed, of which `share` is streamed."""
        if share <= 0.0:
            return self.cpu_seconds(rows) + min(HOST_SECONDS, HOST_BASE + rows * HOST_ROW)
        if in_graphs and share < 1.0:
            return share * self.bus * BUS_BESIDE
        return share * self.bus + (0.0 if share == 1.0 else SPLIT_SECONDS)

    def cpu_seconds(self, rows: int) -> float:
        """That the CPU would take for a layer."""
        return self.cpu_part(rows, 0.0)

    def cpu_part(self, rows: int, share: float) -> float:
        """That it takes where such a share is streamed."""
        return self.factors.of(rows) * self._start_part(rows, share)

    def _start_part(self, rows: int, share: float, left: float | None = None) -> float:
        """Likewise, by what the start has measured: for fewer experts, which have other rows than the mean. left: share
        of the rows, if that is known."""
        experts = 1 - share
        if experts <= 0.0:
            return 0.0
        rows_like = rows * (self._rows_left(share) if left is None else left) / experts
        bend, row = self.bend or (rows_like, 0.0)
        return experts * (self.cpu_fixed + self.cpu_row * min(rows_like, bend) + row * max(0.0, rows_like - bend))

    def _rows_left(self, share: float) -> float:
        if self.left is None:
            return 1 - share
        at = share * (len(self.left) - 1)
        first = min(int(at), len(self.left) - 2)
        return self.left[first] + (at - first) * (self.left[first + 1] - self.left[first])

    def observe(self, rows: int, share: float, seconds: float, left: float | None = None) -> None:
        """The CPU took so long for its part of a layer, on average, while `share` of its experts were streamed. left:
        of the rows, for the CPU; None: as many as are expected. A prompt's own count where that is unusual, as of few
        words that are repeated: otherwise what is learnt makes up for what is expected of the next one's rows."""
        expected = self._start_part(rows, share)
        if left is not None:
            counted = self._start_part(rows, share, left)
            usual = self.left is not None and expected / UNUSUAL <= counted <= expected * UNUSUAL
            expected = expected if usual else counted
        if share == 1.0 and self.forced is None:
            self.factors.leave_out(rows)
        elif expected > 0 and seconds > 0:
            self.factors.learn(rows, seconds / expected)

    def text(self, most: int) -> str:
        """For the log: from which steps on, and what was measured."""
        least = self.least(most)
        when = f"for steps of {least} rows and more" if least else "for no step"
        cpu = self.cpu_seconds(most)
        return f"{when}: a layer's take {self.bus * 1e3:.2f} ms, the CPU {cpu * 1e3:.1f} ms for {most} rows"

    def least(self, most: int) -> int:
        """The least rows of a step that streams, in powers of two up to `most`; 0: none does."""
        sizes = [1 << i for i in range(max(1, most).bit_length())]
        return next((rows for rows in sizes if self.share(rows) > 0), 0)


def _least_share(least: float, enough: Callable[[float], bool]) -> float:
    """The least share from `least` to 1.0 that is enough, as all greater ones are; 1.0 where none is."""
    most = 1.0
    for _ in range(HALVINGS):
        share = (least + most) / 2
        least, most = (least, share) if enough(share) else (share, most)
    return most
