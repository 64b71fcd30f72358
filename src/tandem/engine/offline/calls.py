"""`Calls`: the requests of `tandem.LLM`'s calls. Several streams may be read in turn; each gets its own outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.vision.spans import ImageSpan
from tandem.errors import BusyError


class Calls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests = 0
        self._outputs: dict[str, deque[TokenOutput]] = {}  # of requests that a call waits for
        self._left: list[str] = []  # that nobody waits for any more

    def begin(
        self, ids: list[list[int]], params: list[SamplingSettings], images: Sequence[tuple[ImageSpan, ...]] = ()
    ) -> list[str]:
        """Their names, in order. images: of each prompt, if any has some. Raises RequestError; then none of them is
        left."""
        names: list[str] = []
        for prompt_ids, one, spans in zip(ids, params, images or [()] * len(ids), strict=True):
            self._requests += 1
            names.append(str(self._requests))
            self._outputs[names[-1]] = deque()
            try:
                self._add(GenerateRequest(id=names[-1], prompt_ids=prompt_ids, sampling=one, images=spans))
            except BaseException:
                self.end(names)
                self.flush()
                raise
        return names

    def _add(self, request: GenerateRequest) -> None:
        """Where too much waits already, until less does."""
        while True:
            try:
                return self._engine.add(request)
            except BusyError:
                self._step()

    def outputs(self, names: list[str], answers: int) -> Iterator[TokenOutput]:
        """Until all their answers have ended; others' requests run in the same steps."""
        while True:
            for output in [o for name in names for o in self._pop_outputs(name)]:
                answers -= output.finish_reason is not None
                yield output
            if not answers or not self._engine.has_work():
                return
            self._step()

    def _pop_outputs(self, name: str) -> list[TokenOutput]:
        outputs, self._outputs[name] = self._outputs[name], deque()
        return list(outputs)

    def _step(self) -> None:
        self._abort()
        for output in self._engine.step():
            if output.id in self._outputs:
                self._outputs[output.id].append(output)

    def end(self, names: list[str]) -> None:
        """Nobody waits for them any more. Nothing else happens here: a stream may be dropped in the midst of a step."""
        self._left += [name for name in names if self._outputs.pop(name, None) is not None]

    def flush(self) -> None:
        """Frees what ended requests hold."""
        if self._left:
            self._step()

    def _abort(self) -> None:
        left, self._left = self._left, []
        for name in left:
            self._engine.abort(name)
