"""`Calls`: the requests of `tandem.LLM`'s calls. Several streams may be read in turn, and several threads may call.
Each gets its own outputs. Whoever waits for some steps the engine, for all."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from tandem.engine.engine import Engine
from tandem.engine.offline.turns import Turns
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.vision.spans import ImageSpan
from tandem.errors import BusyError


class Calls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns = Turns()
        self._numbers = itertools.count(1)  # of requests; threads take them at the same time
        self._outputs: dict[str, deque[TokenOutput]] = {}  # of requests that a call waits for; one deque a call
        self._left: deque[str] = deque()  # that nobody waits for any more

    def begin(
        self, ids: list[list[int]], params: list[SamplingSettings], images: Sequence[tuple[ImageSpan, ...]] = ()
    ) -> list[str]:
        """Their names, in order. images: of each prompt, if any has some. Raises RequestError; then none of them is
        left."""
        names: list[str] = []
        outputs: deque[TokenOutput] = deque()
        try:
            for prompt_ids, one, spans in zip(ids, params, images or [()] * len(ids), strict=True):
                names.append(str(next(self._numbers)))
                self._outputs[names[-1]] = outputs
                self._add(GenerateRequest(id=names[-1], prompt_ids=prompt_ids, sampling=one, images=spans))
        except BaseException:  # also Ctrl+C
            self.end(names)
            self.flush()
            raise
        return names

    def _add(self, request: GenerateRequest) -> None:
        """Adds a request. Where the queue is full it steps first, in a turn for each step: that may take minutes."""
        while True:
            with self._turns.adding():
                try:
                    return self._engine.add(request)
                except BusyError:
                    self._step()

    def outputs(self, names: list[str], answers: int) -> Iterator[TokenOutput]:
        """Until all their answers have ended; others' requests run in the same steps."""
        mine: deque[TokenOutput] = self._outputs[names[0]] if names else deque()
        while answers:
            with self._turns.stepping(unless=lambda: bool(mine)) as my_turn:
                if my_turn and not self._engine.has_work():
                    return
                if my_turn:
                    self._step()
            while mine:
                output = mine.popleft()
                answers -= output.finish_reason is not None
                yield output

    def _step(self) -> None:
        """In this thread's turn."""
        while self._left:
            self._engine.abort(self._left.popleft())
        for output in self._engine.step():
            outputs = self._outputs.get(output.id)
            if outputs is not None:
                outputs.append(output)

    def end(self, names: list[str]) -> None:
        """Nobody waits for them any more. Nothing else happens here: a stream may be dropped in the midst of a step."""
        self._left += [name for name in names if self._outputs.pop(name, None) is not None]

    def flush(self) -> None:
        """Frees what ended requests hold."""
        if self._left:
            with self._turns.adding():
                self._step()
