"""Results of `tandem.LLM`: whole answers, or their pieces as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.protocol import TokenLogprob, TokenOutput
from tandem.errors import EngineError, RequestError


@dataclass(slots=True)
class Completion:
    """One answer. `finish_reason`: "stop" | "length" | "abort"."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_match: str | int | None = None


@dataclass(slots=True)
class Piece(Completion):
    """A step's part of an answer in a stream. `prompt`: of which prompt, `answer`: which of its n answers.
    `finish_reason` is None until the answer ends."""

    prompt: int = 0
    answer: int = 0


@dataclass(slots=True)
class Generation:
    """Answers to one prompt: `answers` has SamplingParams.n entries; the properties are those of the first."""

    prompt: str | None  # None if it was given as ids
    prompt_ids: list[int]
    answers: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.answers[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.answers[0].finish_reason


def check(output: TokenOutput) -> None:
    """Raises RequestError where the request is refused, EngineError where the model failed."""
    if output.refused is not None:
        raise RequestError(output.error or "the request is refused", output.refused)
    if output.finish_reason == "error":
        raise EngineError(output.error or "the engine failed")


def collect(result: Generation, output: TokenOutput) -> None:
    """Adds what a step made."""
    answer = result.answers[output.index]
    answer.text += output.text
    answer.token_ids += output.token_ids
    if output.logprobs is not None:
        answer.logprobs = (answer.logprobs or []) + output.logprobs
    if output.prompt_logprobs is not None:
        result.prompt_logprobs = output.prompt_logprobs
    if output.index == 0:
        result.cached_tokens = output.cached_tokens
    answer.finish_reason, answer.stop_match = output.finish_reason, output.stop_match
