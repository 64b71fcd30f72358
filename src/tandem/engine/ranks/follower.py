"""`Follower`: another rank than the first: its part of the model, and the steps that it is told."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import cast

from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.ranks.lists import Mirror
from tandem.engine.ranks.messages import StepList
from tandem.engine.runners import runner_of, states_of
from tandem.engine.sequence import Chunk
from tandem.engine.speculation.from_plan import rollouts_of
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.prefill import PrefillTask, TaskEvent
from tandem.engine.step.step import Step


class Follower:
    """Captures graphs when it is made, as the first rank does at the same time. Not thread-safe."""

    def __init__(self, parts: EngineParts) -> None:
        """parts: of `load_rank`."""
        plan = parts.plan
        self._states, self._begin_step = states_of(parts), parts.begin_step
        self._runner, self._group = runner_of(parts, self._states.arrays), parts.group
        self._rollouts = rollouts_of(parts, self._states) if plan.drafts else None
        self._warm = _nothing_to_warm if plan.gpu is None else _warming(self._runner, parts)
        self._task: PrefillTask | None = None
        self._mirror = Mirror(-(-plan.context_length // plan.page_size))

    def step(self, step: StepList) -> None:
        """Raises RankLost where another rank did not answer."""
        for source, target in step.copies:
            self._states.slots[target].copy_(self._states.slots[source])
            if self._begin_step is not None:
                self._begin_step.slot_copied(source, target)
        if step.committed is not None:
            self._runner.commit(step.committed)
        if step.widths is not None and self._rollouts is not None:
            self._rollouts.chains(self._mirror.runs(step), step.widths)
        else:
            self._run(step)
        if self._group is not None:
            self._group.check()

    def _run(self, step: StepList) -> None:
        chunks = cast(list[Chunk], self._mirror.chunks(step))  # its steps read what a `BatchedChunk` has
        if step.task is not None:
            self._pause(step.task, chunks)
        elif step.warms:
            self._warm(chunks, step.streams)
        else:
            self._runner.start(Step(tuple(chunks))).result()  # the first rank chooses tokens

    def _pause(self, event: TaskEvent, chunks: list[Chunk]) -> None:
        """The first rank's task could pause, and so can this one."""
        if event == "begins":
            self._task = self._runner.pause(chunks)
        assert self._task is not None, "no task has begun"
        if event == "piece":
            self._task.piece()
        if event == "ends":
            self._task.drop()
            self._task = None  # with what its rows were on the way: the next one's plan has no room for both


def _nothing_to_warm(chunks: Rows[Chunk], streams: bool) -> None: ...


def _warming(runner: object, parts: EngineParts) -> Callable[[Rows[Chunk], bool], None]:
    from tandem.engine.start.warm_kernels import warming  # Triton is there only where a GPU is

    assert isinstance(runner, GpuRunner)

    def warm(chunks: Rows[Chunk], streams: bool) -> None:
        with warming(runner, parts) as streamed:
            runner.run_kernels(chunks, streamed if streams else ())

    return warm
