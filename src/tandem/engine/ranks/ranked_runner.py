"""`ranked`: a runner of the first rank, which tells the other ranks each step before it runs its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tandem.engine.cpu_runner import CpuRunner
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.ranks.leader import Leader
from tandem.engine.sampling.logits import DeviceLogits
from tandem.engine.sequence import Chunk
from tandem.engine.step.prefill import PrefillTask, TaskEvent
from tandem.engine.step.step import Running, Step, StepOutput
from tandem.errors import RanksApart

if TYPE_CHECKING:
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup


class Leading:
    """Common to both runners of a first rank. What all ranks run has one order: that in which they are told."""

    def __init__(self, leader: Leader, group: GpuGroup | None, *arguments: Any, **named: Any) -> None:
        self._leader, self._group, self._under_way = leader, group, False
        self._committed: int | None = None  # tokens of the last step's rows, which others do not know yet
        super().__init__(*arguments, **named)

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        self._under_way = True
        self._leader.step(step.chunks, committed=self._committed)
        self._committed = None
        step = Step(step.chunks)  # which never shrinks: others compute all rows
        running: Running[StepOutput] = super().start(step, overlaps)  # type: ignore[misc]
        return running.then(self._checked)

    def _checked(self, output: StepOutput) -> StepOutput:
        self._ended()
        return output

    def commit(self, tokens: int) -> None:
        """Others learn it with the next step."""
        self._committed = tokens
        super().commit(tokens)  # type: ignore[misc]

    def _ended(self) -> None:
        """Raises RankLost where another rank did not answer."""
        if self._group is not None:
            self._group.check()
        self._under_way = False

    def pause(self, chunks: list[Chunk]) -> PrefillTask | None:
        """As `Executor.pause`; the others are told of each piece, too."""
        task: PrefillTask | None = super().pause(chunks)  # type: ignore[misc]
        if task is not None:
            with self._telling("begins", chunks):
                task.around = self._telling
        return task

    @contextmanager
    def _telling(self, event: TaskEvent, chunks: Rows[Chunk] = ()) -> Iterator[None]:
        """Around what this rank does of it. A step may be under way meanwhile."""
        before, self._under_way = self._under_way, True
        self._leader.step(chunks, task=event)
        yield
        if self._group is not None:
            self._group.check()
        self._under_way = before

    def after_failure(self) -> None:
        """Raises RanksApart where ranks may stand in different places of a step."""
        if self._under_way:
            raise RanksApart("a step of several ranks failed, and they would not meet again")
        super().after_failure()  # type: ignore[misc]


class LeadingCpuRunner(Leading, CpuRunner):
    """Where CPUs compute."""


class LeadingGpuRunner(Leading, GpuRunner):
    """Where each rank has a GPU."""

    def run_kernels(self, chunks: Rows[Chunk], streamed: Rows[int] = ()) -> DeviceLogits:
        self._under_way = True
        self._leader.step(chunks, warms=True, streams=bool(streamed))
        logits = super().run_kernels(chunks, streamed)
        self._ended()
        return logits


def ranked(kind: type[CpuRunner] | type[GpuRunner], leader: Leader, group: GpuGroup | None) -> Callable[..., Any]:
    """Makes such a runner. group: which its operations use, on a GPU."""
    leading: type[Leading] = LeadingCpuRunner if kind is CpuRunner else LeadingGpuRunner
    return lambda *arguments, **named: leading(leader, group, *arguments, **named)
