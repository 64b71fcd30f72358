"""`ResponseWriter`: one answer as /v1/responses gives it, whole or as events. Both come from the same outputs in the
same way, so they say the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.engine.protocol import SamplingParams, TokenOutput
from tandem.server.chat.answer_parser import AnswerParser
from tandem.server.chat.events import Finish, ReasoningDelta
from tandem.server.chat.settled import SettledCalls
from tandem.server.errors import ApiError
from tandem.server.generation import Answer, frame
from tandem.server.responses.items import Event, Items
from tandem.server.responses.schema import (
    CachedTokens,
    Incomplete,
    NamedTool,
    Reasoning,
    ReasoningTokens,
    Response,
    ResponseError,
    ResponsesRequest,
    TextBody,
    TextFormat,
    Usage,
)


class ResponseWriter:
    def __init__(
        self, response: Response, parser: AnswerParser, finished: Callable[[Response, Items], None]
    ) -> None:
        """response: as it is before anything was said. finished: told of the whole."""
        self._response = response
        self._parser = parser
        self._finished = finished
        self._settled = SettledCalls()
        self._items = Items()
        self._counts = Answer()
        self._reasoning_tokens = 0
        self._finish = "stop"
        self._number = 0

    # --- whole

    def take(self, outputs: list[TokenOutput]) -> list[Event]:
        return [event for output in outputs for event in self._events(output)]

    def whole(self) -> Response:
        cut = self._finish not in ("stop", "tool_calls")
        reason = Incomplete("max_output_tokens") if cut else None
        response = msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            output=self._items.done,
            usage=self._usage(),
            incomplete_details=reason,
        )
        self._finished(response, self._items)
        return response

    # --- as events

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        first = self._number == 0
        events = self.take(outputs)
        if first:
            events = [self._of_response(kind, self._response) for kind in ("created", "in_progress")] + events
        return b"".join(map(self._frame, events))

    def last(self) -> bytes:
        response = self.whole()
        return self._frame(self._of_response(response.status, response))

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that has begun: its response failed."""
        code = error.code or "server_error"
        said = ResponseError(code, str(error))
        response = msgspec.structs.replace(
            self._response, status="failed", output=self._items.done, error=said
        )
        event = {"type": "error", "code": code, "message": str(error), "param": error.param}
        return self._frame(self._of_response("failed", response)) + self._frame(event)

    def _of_response(self, kind: str, response: Response) -> Event:
        return {"type": f"response.{kind}", "response": response}

    def _frame(self, event: Event) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        return frame(msgspec.json.encode(numbered), event["type"])

    def _events(self, output: TokenOutput) -> Iterator[Event]:
        self._counts.add(output)
        self._counts.forget()
        events = self._parser.push(output.text)
        if output.finish_reason is not None:
            events += self._parser.end(output.finish_reason)
        if events and isinstance(events[0], ReasoningDelta):
            self._reasoning_tokens += len(output.token_ids)
        for event in self._settled.push(events):
            if isinstance(event, Finish):
                self._finish = event.reason
            yield from self._items.add(event)

    def _usage(self) -> Usage:
        counts = self._counts
        return Usage(
            counts.prompt_tokens,
            CachedTokens(counts.cached_tokens),
            counts.completion_tokens,
            ReasoningTokens(self._reasoning_tokens),
            counts.prompt_tokens + counts.completion_tokens,
        )


def begun(body: ResponsesRequest, response_id: str, model: str, sampling: SamplingParams) -> Response:
    """The response before anything is said: it repeats what was asked for."""
    choice: Any = body.tool_choice or "auto"
    return Response(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or Reasoning(),
        store=body.store is not False,
        temperature=sampling.temperature,
        text=TextBody(TextFormat("text")) if body.text is None else body.text,
        tool_choice=msgspec.to_builtins(choice) if isinstance(choice, NamedTool) else choice,
        tools=body.tools or [],
        top_p=sampling.top_p,
        metadata=body.metadata or {},
        user=body.user,
    )
