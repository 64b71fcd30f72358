"""`LoadProgress`: how far loading is, and how fast: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 5.0


class LoadProgress:
    """Call it with what is being done, bytes done, bytes in all. Each kind of work (the first word) is timed apart."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        rate = TextColumn("{task.fields[rate]}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            rate,
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("loading", total=None, rate="")
        self._line_at = monotonic() + LINE_SECONDS
        self._kind, self._started, self._done = "loading", monotonic(), 0

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        rate = self._rate(what.partition(" ")[0], done)
        self._bar.update(self._task, description=what, completed=done, total=total, rate=rate)
        if self._bar.disable and monotonic() >= self._line_at:
            self._line_at = monotonic() + LINE_SECONDS
            print(f"  {what}, {done / 1e9:.1f} of {total / 1e9:.1f} GB{rate and ', '}{rate}", flush=True)

    def _rate(self, kind: str, done: int) -> str:
        """Mean GB/s of this kind of work, since the first that was heard of it."""
        if kind != self._kind:
            self._kind, self._started, self._done = kind, monotonic(), done
            self._bar.reset(self._task, rate="")
        if done == self._done:
            return ""
        return f"{(done - self._done) / 1e9 / max(monotonic() - self._started, 1e-3):.2f} GB/s"
