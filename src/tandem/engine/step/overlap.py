"""`PrefillOverlap`: prompts that are computed between steps of those who decode, a slice at a time.

A step of decoding rows and a slice take turns, so a reader waits for both, and never for a whole chunk. A slice is as
many layers as fit into a share of a decoding step's time. Where a device computes, it is as many as keep it busy. The
host launches them while the device is busy with a step: the end of one chunk and the begin of the next, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from tandem.engine.protocol import TokenOutput
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Chunk
from tandem.engine.step.executor import Executor
from tandem.engine.step.prefill import FailedPieces, HostPlace, PrefillTask
from tandem.engine.step.step import Step, StepOutput, StepResult

_log = logging.getLogger(__name__)

Tried = Callable[[list[Chunk], Callable[[], StepOutput | None]], StepResult]
"""Runs a slice of these chunks, and settles them where it was the last."""


class PrefillOverlap:
    """At most one task at a time. The scheduler keeps its sequences from running otherwise; when one of them loses its
    pages, the task ends, and what it computed is computed again."""

    def __init__(self, scheduler: Scheduler, executor: Executor, together: bool) -> None:
        """together: several sequences may share a task. Not where layers change what a sequence keeps in place: that
        cannot be computed again."""
        self._scheduler, self._executor, self._together = scheduler, executor, together
        self._task: PrefillTask | None = None
        self._began = self._spent = 0.0
        self._oldest = False  # whose turn was last

    @property
    def chunks(self) -> list[Chunk]:
        """Chunks of the task under way."""
        return list(self._scheduler.in_flight)

    @property
    def overlaps(self) -> bool:
        """Whether a device computes the task under way, if there is one, while steps run."""
        return self._task is not None and self._task.overlaps

    def step_overlap(self, step: list[Chunk], tried: Tried, pauses: bool) -> StepOverlap:
        """The work of the task under way in this step of the engine. pauses: another task may follow it."""
        return StepOverlap(self, step, tried, bool(step) and self._executor.runs_beside(step), pauses)

    def follow(self, step: list[Chunk]) -> None:
        """The next task begins, while this step runs. The step is not to blame if none can."""
        try:
            self.take([*step, *self._scheduler.prompts(len(step))])
        except Exception:
            _log.exception("no prompt could be begun while a step ran")

    def step_ended(self) -> bool:
        return self._executor.step_ended()

    def take(self, chunks: list[Chunk]) -> list[Chunk]:
        """A step's chunks without the prompts that are computed aside from now on."""
        decoding = [chunk for chunk in chunks if not chunk.prefills]
        prompts = [chunk for chunk in chunks if chunk.prefills]
        if self._task is not None or not decoding or not prompts or not self._executor.runs_beside(decoding):
            return chunks
        some = prompts if self._together else [self._one(prompts)]
        self._began, self._spent = perf_counter(), 0.0
        try:
            self._task = self._executor.pause(some)
        except Exception as error:  # its first slice says so: the prompts fail, and nobody else
            self._task = PrefillTask(FailedPieces(error), HostPlace())
        if self._task is None:
            return chunks
        self._scheduler.begin_background(Step(tuple(some)), self.drop)
        return decoding

    def _one(self, prompts: list[Chunk]) -> Chunk:
        """The oldest and the one that needs least take turns, so neither waits for all of the other."""
        self._oldest = not self._oldest
        return prompts[0] if self._oldest else min(prompts, key=lambda chunk: chunk.sequence.pending_len)

    def slice(self, whole: bool) -> StepOutput | None:
        """Goes on with the task; its output when it has ended. whole: until then, for nobody waits."""
        task, started = self._task, perf_counter()
        assert task is not None
        try:
            ended = task.go_on(self._scheduler.pace.slice_seconds(), whole)
            logits = task.logits() if ended else None
        except Exception:
            self.drop()
            raise
        self._spent += perf_counter() - started
        if logits is None:
            return None
        step, self._task = self._scheduler.end_background(), None
        assert step is not None
        seconds = perf_counter() - self._began if task.overlaps else self._spent
        self._scheduler.pace.observe(step.num_tokens, seconds)
        return StepOutput(step, logits)

    def drop(self) -> None:
        """Its sequences begin their chunks again, if they still run."""
        task, self._task = self._task, None
        self._scheduler.end_background()
        if task is not None:
            task.drop()


class StepOverlap:
    """A slice of the task under way, once in a step of the engine, and what became of its sequences."""

    def __init__(self, overlap: PrefillOverlap, step: list[Chunk], tried: Tried, runs: bool, follows: bool) -> None:
        """step: its chunks; runs: it can run while a task is under way; else it waits for its end. follows: the
        next task may begin at once."""
        self._overlap, self._step, self._tried, self._runs, self._follows = overlap, step, tried, runs, follows
        self.outputs: list[TokenOutput] = []
        self.under_way = self._left = bool(overlap.chunks)
        self.overlaps = runs and overlap.overlaps  # until a device computes the step
        self.overtook = 0.0  # seconds that the step's end waited for this, at most

    def __call__(self) -> None:
        if not self._left:
            return
        running, self._left = perf_counter(), False
        self._slice()
        if self.overlaps and self._follows and not self._overlap.chunks:
            running = running if self._overlap.step_ended() else perf_counter()
            self._overlap.follow(self._step)
            self._slice()
        if self.overlaps and self._overlap.step_ended():
            self.overtook = perf_counter() - running

    def _slice(self) -> None:
        if chunks := self._overlap.chunks:
            self.outputs += self._tried(chunks, lambda: self._overlap.slice(not self._runs)).outputs
