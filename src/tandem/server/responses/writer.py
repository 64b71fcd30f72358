"""`ResponseWriter`: one answer as /v1/responses gives it, whole or as events. Both come from the same outputs in the
same way, so they say the same."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from tandem.engine.protocol import SamplingSettings, TokenOutput
from tandem.server.chat.answer_parser import AnswerParser, AnswerRules
from tandem.server.chat.one_answer import OneAnswer
from tandem.server.errors import ApiError, naming
from tandem.server.generation import frame
from tandem.server.limits import WAITING_SECONDS
from tandem.server.responses.items import Event, Items
from tandem.server.responses.schema import (
    CachedTokens,
    Incomplete,
    Reasoning,
    ReasoningTokens,
    Response,
    ResponseError,
    ResponsesRequest,
    TextBody,
    TextFormat,
    Usage,
)
from tandem.server.responses.tools import Offer

_CUT = {"length": "max_output_tokens", "abort": "aborted"}  # how an answer ended, and what OpenAI calls that


class ResponseWriter:
    def __init__(
        self, response: Response, parser: AnswerParser, offer: Offer, finished: Callable[[Response, Items], None]
    ) -> None:
        """response: as it is before anything was said. finished: told of the whole."""
        self._response = response
        self._answer = OneAnswer(parser)
        self._finished = finished
        self._items = Items(offer)
        self._number = 0
        self._sent_at = time.monotonic()

    # --- whole

    def take(self, outputs: list[TokenOutput]) -> list[Event]:
        return [new for event in self._answer.collected(outputs) for new in self._items.add(event)]

    def whole(self) -> Response:
        reason = _CUT.get(self._answer.finish)
        response = msgspec.structs.replace(
            self._response,
            status="completed" if reason is None else "incomplete",
            output=self._items.done,
            usage=self._usage(),
            incomplete_details=None if reason is None else Incomplete(reason),
        )
        self._finished(response, self._items)
        return response

    # --- as events

    def frames(self, outputs: list[TokenOutput]) -> bytes:
        events = self.take(outputs)
        now = time.monotonic()
        if not events and now - self._sent_at > WAITING_SECONDS:
            return self.waiting()
        data = self._begin() + b"".join(map(self._frame, events))
        if data:
            self._sent_at = now
        return data

    def waiting(self) -> bytes:
        """A comment is no event, and some clients count events only. A call is not shown before it is complete."""
        self._sent_at = time.monotonic()
        return self._begin() or self._frame(self._of_response("in_progress", self._response))

    def last(self) -> bytes:
        response = self.whole()
        return self._frame(self._of_response(response.status, response))

    def failed(self, error: ApiError) -> bytes:
        """Failure event with the response, of the two events that OpenAI has for it. Both would end a stream twice."""
        details = ResponseError(error.code or "server_error", naming(error))
        response = msgspec.structs.replace(
            self._response, status="failed", output=self._items.done, error=details
        )
        return self._begin() + self._frame(self._of_response("failed", response))

    def _begin(self) -> bytes:
        """Before all else, once."""
        kinds = ("created", "in_progress") if self._number == 0 else ()
        return b"".join(self._frame(self._of_response(kind, self._response)) for kind in kinds)

    def _of_response(self, kind: str, response: Response) -> Event:
        return {"type": f"response.{kind}", "response": response}

    def _frame(self, event: Event) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        return frame(msgspec.json.encode(numbered), event["type"])

    def _usage(self) -> Usage:
        answer = self._answer
        return Usage(
            answer.prompt_tokens,
            CachedTokens(answer.cached_tokens),
            answer.completion_tokens,
            ReasoningTokens(answer.reasoning_tokens),
            answer.prompt_tokens + answer.completion_tokens,
        )


def refused(response: Response, error: ApiError) -> bytes:
    """The stream of a response that cannot be begun."""
    nothing = AnswerRules(None, None, {}).new_parser()
    return ResponseWriter(response, nothing, {}, lambda *_: None).failed(error)


def begun(body: ResponsesRequest, response_id: str, model: str, sampling: SamplingSettings) -> Response:
    """The response before anything is said: it repeats what was asked for."""
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
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=sampling.top_p,
        metadata=body.metadata or {},
        user=body.user,
    )
