"""`ExpertRecorder`: records which experts are used from a start to a stop, and writes it to files.

Modes: "stat" adds everything up and costs nothing per step. SGLang's "stat_approx" is the same here: counts are always
exact. "per_pass" keeps the counts of each of the last steps, "per_token" each token's choice, too. What was typed is
never recorded, only which experts it went to.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.errors import EngineError, RequestError
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.experts.usage.usage_file import UsageRecord, write_usage

FILE_PREFIX = "expert_distribution_recorder_"  # SGLang's
DETAILED = ("per_pass", "per_token")


class RecordedRows(NamedTuple):
    """A step's rows of one sequence."""

    request: int  # its number
    first: int  # position
    length: int


@dataclass(frozen=True, slots=True)
class RecorderOptions:
    """last_passes: steps that per_pass and per_token keep, the last ones; None: all. gpu_experts: say which were on a
    GPU."""

    directory: Path
    mode: str = "stat"
    last_passes: int | None = 1000
    gpu_experts: bool = False


class _RecordedPass(NamedTuple):
    """One step, in the modes that keep steps."""

    counts: Tensor  # int32 [layers, experts]
    gpu_experts: Tensor
    rows: tuple[RecordedRows, ...]
    chosen: Tensor | None


class _Book:
    """Records that are not in a file yet."""

    def __init__(self, counts: Tensor, most_steps: int | None) -> None:
        self.counts = counts  # int64 [layers, experts]
        self.passes = self.tokens = 0
        self.steps: deque[_RecordedPass] = deque(maxlen=most_steps)

    def add(self, later: _Book) -> None:
        self.counts = self.counts + later.counts
        self.passes += later.passes
        self.tokens += later.tokens
        self.steps.extend(later.steps)


class ExpertRecorder:
    """Belongs to the thread that runs the steps; files are written on a thread of their own."""

    def __init__(
        self, usage: ExpertUsage, layers: Sequence[int], options: RecorderOptions, model: str = ""
    ) -> None:
        """layers: decoder layers of the usage's. model: its name, for the files."""
        self._usage, self._layers, self.options, self._model = usage, tuple(layers), options, model
        self.recording = False
        self._book: _Book | None = None
        self._failed: _Book | None = None  # from the thread
        self._session = 0  # a start makes a new one
        self._lock, self._thread = Lock(), ThreadPoolExecutor(1, "tandem-recorder")

    @property
    def extent(self) -> tuple[int, int]:
        """Steps and tokens that the next file will hold, as far as they are known."""
        return (0, 0) if self._book is None else (self._book.passes, self._book.tokens)

    def start(self) -> None:
        """From zero, also while it records. Raises EngineError if files could not be written."""
        check_writable(self.options.directory)
        with self._lock:
            self._failed, self._session = None, self._session + 1
        self._book, self.recording = self._fresh(), True

    def stop(self) -> None:
        """Ends recording; the records wait for `dump`. Raises RequestError if nothing is being recorded."""
        if not self.recording:
            raise RequestError("nothing is being recorded; call /start_expert_distribution_record first")
        self._count(self._book)
        self.recording = False

    def after_step(self, rows: Sequence[RecordedRows], wrong: Sequence[int] = ()) -> None:
        """The model has run these rows. wrong: the numbers of others that it has run among them, which do not count."""
        if not self.recording or self._book is None:
            return
        count = sum(r.length for r in rows)
        self._book.passes += 1
        self._book.tokens += count
        if self.options.mode in DETAILED:
            chosen = self._usage.chosen(count, wrong) if self.options.mode == "per_token" else None
            new = self._count(self._book).int()
            self._book.steps.append(_RecordedPass(new, self._usage.gpu_experts, tuple(rows), chosen))

    def after_failure(self) -> None:
        """A step has failed: what it counted is no part of the next one."""
        if self.recording and self.options.mode in DETAILED:
            self._last_tokens = self._usage.read().tokens

    def dump(self) -> Future[Path]:
        """Writes what was recorded since `start` or the last dump, and goes on from zero. If that fails, the future has
        an EngineError, and the next dump tries again. Raises RequestError if nothing was recorded."""
        with self._lock:
            whole, self._failed = self._failed, None
        if self._book is not None:
            if self.recording:
                self._count(self._book)
            whole = self._together(whole, self._book)
        if whole is None:
            raise RequestError("nothing has been recorded; call /start_expert_distribution_record first")
        self._book = self._fresh() if self.recording else None
        return self._thread.submit(self._write, whole, self._usage.gpu_experts, self._session)

    def _fresh(self) -> _Book:
        self._last_tokens = self._usage.read().tokens
        return _Book(torch.zeros_like(self._last_tokens), self.options.last_passes)

    def _count(self, book: _Book | None) -> Tensor:
        """Adds what is new; returns it."""
        before, self._last_tokens = self._last_tokens, self._usage.read().tokens
        new = self._last_tokens - before
        if book is not None:
            book.counts += new
        return new

    @staticmethod
    def _together(first: _Book | None, second: _Book) -> _Book:
        if first is None:
            return second
        first.add(second)
        return first

    def _write(self, book: _Book, gpu_experts: Tensor, session: int) -> Path:
        directory = self.options.directory
        path = directory / f"{FILE_PREFIX}{time.time():.6f}.pt"
        try:
            write_usage(path, self._record(book, gpu_experts))
        except Exception as error:
            with self._lock:
                if session == self._session:
                    self._failed = book if self._failed is None else self._together(self._failed, book)
            raise EngineError(_unwritable(directory, error)) from error
        return path

    def _record(self, book: _Book, gpu_experts: Tensor) -> UsageRecord:
        placement = gpu_experts if self.options.gpu_experts else None
        whole = UsageRecord(
            book.counts[None], self.options.mode, self._model, book.tokens, book.passes, self._layers, placement
        )
        if self.options.mode in DETAILED and book.steps:
            return _by_pass(whole, book.steps)
        return whole


def _by_pass(whole: UsageRecord, steps: Sequence[_RecordedPass]) -> UsageRecord:
    """With one entry for each step instead of their sum, and what is known of each token."""
    by_pass = replace(
        whole,
        counts=torch.stack([step.counts for step in steps]),
        pass_tokens=torch.tensor([sum(r.length for r in step.rows) for step in steps], dtype=torch.int32),
        gpu_experts=None if whole.gpu_experts is None else torch.stack([step.gpu_experts for step in steps]),
    )
    chosen = [step.chosen for step in steps if step.chosen is not None]
    if not chosen:
        return by_pass
    rows = torch.tensor([row for step in steps for row in step.rows], dtype=torch.int32)
    requests, first, lengths = rows.unbind(1)
    begins = lengths.cumsum(0, dtype=torch.int32) - lengths  # of the rows of each sequence, in the file
    return replace(
        by_pass,
        topk_ids=torch.cat(chosen),
        requests=requests.repeat_interleave(lengths),
        positions=(first - begins).repeat_interleave(lengths)
        + torch.arange(int(lengths.sum()), dtype=torch.int32),
    )


def check_writable(directory: Path) -> None:
    """Before a long run, not after it. Raises EngineError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise EngineError(_unwritable(directory, error)) from error


def _unwritable(directory: Path, reason: object) -> str:
    return (
        f"expert statistics cannot be written to {directory} ({reason}); make room there, or start the server with "
        "--expert-distribution-recorder-dir DIRECTORY"
    )
