"""`ranked`: a runner of the first rank, which tells the other ranks each step before it runs its own part."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any

from tandem.engine.cpu_runner import CpuRunner
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.ranks.leader import Leader
from tandem.engine.sampling.logits import DeviceLogits
from tandem.engine.sequence import Chunk
from tandem.engine.step.step import Step, StepOutput
from tandem.errors import EngineError

if TYPE_CHECKING:
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup


def _nothing() -> None:
    """Where nobody has anything to do beside a step."""


class Told:
    """What both runners of a first rank do. Passes do not pause: what runs between two pieces would meet what the
    others run."""

    def __init__(self, leader: Leader, group: GpuGroup | None, *arguments: Any, **named: Any) -> None:
        self._leader, self._group, self._under_way = leader, group, False
        super().__init__(*arguments, **named)

    def run(self, step: Step, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        self._under_way = True
        self._leader.step(step.chunks)
        output: StepOutput = super().run(step, meanwhile or _nothing)  # type: ignore[misc]
        if self._group is not None:
            self._group.check()
        self._under_way = False
        return output

    def pause(self, chunks: list[Chunk]) -> None:
        return None

    def after_failure(self) -> None:
        """Raises EngineError where ranks may stand in different places of a step."""
        if self._under_way:
            raise EngineError("a step of several ranks failed, and they would not meet again")
        super().after_failure()  # type: ignore[misc]


class ToldCpuRunner(Told, CpuRunner):
    """Where CPUs compute."""


class ToldGpuRunner(Told, GpuRunner):
    """Where each rank has a GPU."""

    def run_kernels(self, chunks: Rows[Chunk]) -> DeviceLogits:
        self._under_way = True
        self._leader.step(chunks, warms=True)
        logits = super().run_kernels(chunks)
        self._under_way = False
        return logits


def ranked(kind: type[CpuRunner] | type[GpuRunner], leader: Leader, group: GpuGroup | None) -> Callable[..., Any]:
    """Makes such a runner. group: which its operations use, on a GPU."""
    told: type[Told] = ToldCpuRunner if kind is CpuRunner else ToldGpuRunner
    return lambda *arguments, **named: told(leader, group, *arguments, **named)
