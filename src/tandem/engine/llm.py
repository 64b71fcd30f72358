"""`tandem.LLM`: the engine inside the caller's process, for scripts and notebooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.llm_input import (
    Message,
    Prompt,
    Sampling,
    listed_conversations,
    listed_prompts,
    sampling_for_each,
)
from tandem.engine.protocol import GenerateRequest, SamplingParams, TokenLogprob, TokenOutput
from tandem.engine.start.model_files import prepare
from tandem.engine.start.progress import Progress
from tandem.errors import BusyError, EngineError, RequestError


@dataclass(slots=True)
class Completion:
    """One answer. `finish_reason`: "stop" | "length" | "abort"."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_match: str | int | None = None


@dataclass(slots=True)
class Generation:
    """What became of one prompt: `answers` has SamplingParams.n entries; the properties are those of the first."""

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


class LLM:
    """Loads a model once; `generate` and `chat` batch whatever they are given.

    `flags` are the fields of `EngineConfig`, i.e. the server's flags in snake case; an unknown one is an error that
    names the nearest. Torch is set to one thread in this process: see engine/loader.py.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        config = EngineConfig.from_keywords(model, **flags)
        for notice in config.notices():
            warnings.warn(notice, stacklevel=2)
        prepare(config)
        self.engine = Engine(config)
        for notice in self.engine.plan.notices:  # those that depend on the machine and the model
            if notice not in config.notices():
                warnings.warn(notice, stacklevel=2)
        self._begin()

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._begin()
        return llm

    def _begin(self) -> None:
        self.engine.grammars.be_patient()
        self._requests = 0
        self._early: list[TokenOutput] = []  # outputs of steps that made room for further prompts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        progress: bool = True,
    ) -> list[Generation]:
        """One result per prompt (text or token ids), in their order. Raises RequestError if a prompt or a parameter is
        impossible, before anything runs; EngineError if the model fails."""
        listed = listed_prompts(prompts)
        params = sampling_for_each(sampling, len(listed))
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        ids = [self.engine.tokenizer.encode(p) if isinstance(p, str) else p for p in listed]
        return self._run(texts, ids, params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        *,
        progress: bool = True,
        **template_variables: Any,
    ) -> list[Generation]:
        """One conversation, or a list of them, through the model's chat template."""
        tokenizer = self.engine.tokenizer
        texts = [
            tokenizer.apply_chat_template([dict(m) for m in conversation], **template_variables)
            for conversation in listed_conversations(messages)
        ]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._run(texts, ids, sampling_for_each(sampling, len(texts)), progress)

    def _run(
        self, texts: Sequence[str | None], ids: list[list[int]], params: list[SamplingParams], progress: bool
    ) -> list[Generation]:
        names = self._add_all(ids, params)
        results = {
            name: Generation(text, prompt_ids, [Completion() for _ in range(one.n)])
            for name, text, prompt_ids, one in zip(names, texts, ids, params, strict=True)
        }
        try:
            with Progress(sum(one.n for one in params), shown=progress) as bar:
                for output in self._outputs():
                    _collect(results[output.id], output)
                    bar.advance(tokens=len(output.token_ids), answers=output.finish_reason is not None)
        except BaseException:  # also Ctrl+C
            self._empty()
            raise
        return list(results.values())

    def _add_all(self, ids: list[list[int]], params: list[SamplingParams]) -> list[str]:
        names: list[str] = []
        for prompt_ids, one in zip(ids, params, strict=True):
            self._requests += 1
            names.append(str(self._requests))
            try:
                self._add(GenerateRequest(id=names[-1], prompt_ids=prompt_ids, sampling=one))
            except BaseException:
                self._empty()
                raise
        return names

    def _add(self, request: GenerateRequest) -> None:
        """Where too much waits already, until less does."""
        while True:
            try:
                return self.engine.add(request)
            except BusyError:
                self._early += self.engine.step()

    def _empty(self) -> None:
        """For the next call."""
        self._early = []
        self.engine.abort("")
        self.engine.step()

    def _outputs(self) -> Iterator[TokenOutput]:
        early, self._early = self._early, []
        yield from early
        while self.engine.has_work():
            yield from self.engine.step()


def _collect(result: Generation, output: TokenOutput) -> None:
    if output.refused is not None:
        raise RequestError(output.error or "the request is refused", output.refused)
    if output.finish_reason == "error":
        raise EngineError(output.error or "the engine failed")
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
