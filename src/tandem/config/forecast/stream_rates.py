"""`StreamRates`: how much of a layer's experts in CPU memory travels to the GPU, and how much the CPU computes.

Both happen at the same time. The CPU begins later, when the GPU has made the layer's rows, and slows the bus. So the
share f that takes both equally long is best: f * bus = late + (1 - f) * cpu, with the seconds that each would take for
all. A step streams where that gains a tenth over the CPU alone, to which rows are handed, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GAIN = 1.1
HOST_SECONDS = 2.5e-3
"""Of a layer whose kernels the host gives one by one, in which the CPU has a part, beside that: 2.7 ms at 512 rows, 2.4
at 2048 (H100, Qwen3-30B-A3B, int4)."""
HOST_BASE, HOST_ROW = 5e-4, 4e-6
"""Likewise, where nothing travels: 0.9 ms at 64 rows and 3 at 512, of which a share is on the GPU (as above)."""
SPLIT_SECONDS = 5e-4  # that a layer takes longer than its bus where both compute: 5.2 ms instead of 4.6 at 512 rows
WHOLE = 0.8  # for less than the rest the CPU is left out: it slows the bus, by a tenth at most where measured
TURN_BASE, TURN_ROW, TURN_HIDDEN = 4e-4, 4e-7, 2048
"""Of one that is a graph, likewise: attention, and rows of so many channels on their way. 0.7 ms at 512 rows, 1.2 at
2048 (as above). Wider rows take longer: 8.2 ms for 4096 of DeepSeek-V3, kernel by kernel."""
BUS_BESIDE = 1.12  # times as long as alone the bus takes beside a CPU that computes: 7.0 ms instead of 6.25 (as above)
SLOWER, FASTER, NEWEST = 4.0, 0.25, 0.3  # how far, and how soon, measured times correct those of the start
LIKELY = 0.5  # from so many times as long as foretold on, a first time that is shorter counts as it is
FORGOTTEN = 0.1  # of what was measured, in each step in which the CPU has no part


@dataclass(slots=True)
class StreamRates:
    """Seconds of a layer, on average over those that have experts in CPU memory. bus: of copying them all; cpu_fixed
    and cpu_row: of computing them all, for a step and for each of its rows. least_rows: of a step that streams; None:
    wherever it pays."""

    bus: float
    cpu_fixed: float
    cpu_row: float
    least_rows: int | None = None
    factors: dict[int, float] = field(default_factory=dict)  # by size of steps: the CPU's time ÷ the start's
    turn_row: float = TURN_ROW  # until the GPU has made the next layer's rows, for each
    forced: float | None = None  # the share of every step, for measurements

    def share(self, rows: int, in_graphs: bool = False) -> float:
        """Of the experts in CPU memory, that travel in a step of so many rows: 0 for none. in_graphs: so the layers
        are given, and no host delays the CPU."""
        if self.forced is not None:
            return self.forced
        if self.least_rows is not None and rows < max(1, self.least_rows):
            return 0.0
        cpu, bus, late = self.cpu_seconds(rows), self.bus, TURN_BASE + rows * self.turn_row
        if not in_graphs:
            late, bus = HOST_SECONDS + rows * (self.turn_row - TURN_ROW), bus * BUS_BESIDE
        share = (late + cpu) / (cpu + bus)
        share = 1.0 if share > WHOLE else share
        gains = self.seconds(rows, 0.0) >= GAIN * self.seconds(rows, share, in_graphs)
        return share if self.least_rows is not None or gains else 0.0

    def seconds(self, rows: int, share: float, in_graphs: bool = False) -> float:
        """Until a layer's experts are computed, of which `share` travels."""
        if share <= 0.0:
            return self.cpu_seconds(rows) + min(HOST_SECONDS, HOST_BASE + rows * HOST_ROW)
        if share == 1.0:
            return self.bus
        return share * self.bus * BUS_BESIDE + (0.0 if in_graphs else SPLIT_SECONDS)

    def cpu_seconds(self, rows: int) -> float:
        """That the CPU would take for a layer."""
        return self.factors.get(rows.bit_length(), 1.0) * (self.cpu_fixed + rows * self.cpu_row)

    def observe(self, rows: int, share: float, seconds: float) -> None:
        """The CPU took so long for its part of a layer, on average, while `share` of its experts travelled. Where it
        had none, what is known of it is slowly forgotten, or one wild measurement would leave it out for good."""
        expected, size = self.cpu_seconds(rows) * (1 - share), rows.bit_length()
        if share == 1.0 and size in self.factors:
            self.factors[size] += FORGOTTEN * (1.0 - self.factors[size])
        if expected <= 0 or seconds <= 0:
            return
        ratio = seconds / expected
        first = size not in self.factors and LIKELY <= ratio <= 1
        wanted = self.factors.get(size, 1.0) * (1 + (1.0 if first else NEWEST) * (ratio - 1))
        self.factors[size] = min(SLOWER, max(FASTER, wanted))

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
