"""`LoadProgress`: how far the loading of a model is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 5.0


class LoadProgress:
    """Call it with what is being loaded, bytes done, bytes in all."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("loading", total=None)
        self._line_at = monotonic() + LINE_SECONDS

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=f"loading {what}", completed=done, total=total)
        if self._bar.disable and monotonic() >= self._line_at:
            self._line_at = monotonic() + LINE_SECONDS
            print(f"  loading: {what}, {done / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)
