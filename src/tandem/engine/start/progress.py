"""`Progress`: a bar for long offline runs, on a terminal only."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SHOW_AFTER_SECONDS = 2.0


class Progress:
    """Appears when the work has taken two seconds, so that short calls print nothing."""

    def __init__(self, total_answers: int, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._total, self._answers, self._tokens = total_answers, 0, 0
        self._started = monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, tokens: int, answers: int) -> None:
        self._tokens += tokens
        self._answers += answers
        if not self._shown:
            return
        elapsed = monotonic() - self._started
        if self._bar is None and elapsed > SHOW_AFTER_SECONDS:
            self._bar = self._start()
        if self._bar is not None:
            rate = f"{self._tokens / elapsed:.1f} tokens/s"
            self._bar.update(self._bar.task_ids[0], completed=self._answers, rate=rate)

    def _start(self) -> RichProgress:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task("answers", total=self._total, rate="")
        bar.start()
        return bar
