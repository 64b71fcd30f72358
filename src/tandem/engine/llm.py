"""`tandem.LLM`: the engine inside the caller's process, for scripts and notebooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import msgspec

from tandem.engine.engine import Engine
from tandem.engine.offline.calls import Calls
from tandem.engine.offline.images import Pictures
from tandem.engine.offline.input import (
    Message,
    Prompt,
    Sampling,
    listed_conversations,
    listed_prompts,
    sampling_for_each,
)
from tandem.engine.offline.results import Completion, Generation, Piece, check, collect
from tandem.engine.protocol import SamplingSettings
from tandem.engine.start.loader import model_directory
from tandem.engine.start.model_files import prepare
from tandem.engine.start.progress import Progress
from tandem.engine.start.sampling_defaults import sampling_defaults
from tandem.engine.vision.spans import ImageSpan
from tandem.flags.engine_config import FLAGS, SERVER, EngineConfig
from tandem.flags.ways import on_one_gpu
from tandem.text import prompt as prompts
from tandem.text.reasoning_format import begun_text, detect_reasoning_format

_OF_ANSWERS = ("tool_call_parser", "reasoning_parser")
"""Flags of the model that say how a server presents its answers."""
_OF_ENGINES = ("sampling_defaults", "watchdog_timeout")
"""Flags of the server that an engine reads, too."""


class LLM:
    """Loads a model once; `generate` and `chat` batch whatever they are given.

    `flags` are the fields of `EngineConfig`, i.e. the server's flags in snake case; an unknown one is an error that
    names the nearest. Torch is set to one thread in this process: see engine/start/loader.py.
    `sampling_defaults`: what generation_config.json recommends, for fields that `SamplingParams` leave out.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        config = on_one_gpu(EngineConfig.from_keywords(model, **flags))
        for notice in [*config.notices(), *_server_notices(config)]:
            warnings.warn(notice, stacklevel=2)
        prepare(config)
        defaults = sampling_defaults(config, model_directory(config.model))
        self.engine = Engine(config)
        for notice in self.engine.plan.notices:  # those that depend on the machine and the model
            if notice not in config.notices():
                warnings.warn(notice, stacklevel=2)
        self._begin(defaults)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._begin({})
        return llm

    def _begin(self, defaults: dict[str, float]) -> None:
        self.engine.grammars.be_patient()
        self.sampling_defaults = defaults
        self._calls = Calls(self.engine)
        model, plan = self.engine.model_config, self.engine.plan
        self._pictures = Pictures(model.vision, plan.image_tokens, plan.blind or "this model reads text only")

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None, *,
        progress: bool = True, stream: Literal[False] = False,
    ) -> list[Generation]: ...  # fmt: skip
    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None, *,
        progress: bool = True, stream: Literal[True],
    ) -> Iterator[Piece]: ...  # fmt: skip
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        progress: bool = True,
        stream: bool = False,
    ) -> list[Generation] | Iterator[Piece]:
        """One result per prompt (text or token ids), in their order; with `stream` pieces of all of them as they come.
        Raises RequestError if a prompt or a parameter is impossible, before anything runs; EngineError if the model
        fails."""
        listed = listed_prompts(prompts)
        params = sampling_for_each(sampling, len(listed), self.sampling_defaults)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        ids = [self.engine.tokenizer.encode(p) if isinstance(p, str) else p for p in listed]
        return self._streamed(ids, params) if stream else self._run(texts, ids, params, progress)

    @overload
    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling = None, *,
        progress: bool = True, stream: Literal[False] = False, add_generation_prompt: bool = True,
        continue_final_message: bool = False, **template_variables: Any,
    ) -> list[Generation]: ...  # fmt: skip
    @overload
    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling: Sampling = None, *,
        progress: bool = True, stream: Literal[True], add_generation_prompt: bool = True,
        continue_final_message: bool = False, **template_variables: Any,
    ) -> Iterator[Piece]: ...  # fmt: skip
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = None,
        *,
        progress: bool = True,
        stream: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> list[Generation] | Iterator[Piece]:
        """One conversation, or a list of them, through the model's chat template. Control tokens that messages spell
        are text. continue_final_message: the answer goes on with the last message, an assistant's, and a grammar
        counts its text. Parts of type "image" have a path, bytes or an image of Pillow's in `image`. Raises as
        `generate`."""
        conversations = [
            self._pictures.taken_out([dict(message) for message in conversation])
            for conversation in listed_conversations(messages)
        ]
        rendered = [
            self._prompt(conversation, add_generation_prompt, continue_final_message, template_variables)
            for conversation, _ in conversations
        ]
        params = [
            self._behind(prompt, one)
            for prompt, one in zip(
                rendered, sampling_for_each(sampling, len(rendered), self.sampling_defaults), strict=True
            )
        ]
        inputs = [
            self._pictures.placed(self._chat_ids(prompt), pictures)
            for prompt, (_, pictures) in zip(rendered, conversations, strict=True)
        ]
        ids, images = [each for each, _ in inputs], [spans for _, spans in inputs]
        if stream:
            return self._streamed(ids, params, images)
        texts = [prompt.text.replace(prompt.sign, "") for prompt in rendered]
        return self._run(texts, ids, params, progress, images)

    def _prompt(
        self, messages: list[dict[str, Any]], begins: bool, goes_on: bool, variables: dict[str, Any]
    ) -> prompts.Prompt:
        tokenizer = self.engine.tokenizer
        one = prompts.draft(messages, variables, tokenizer.guard, tokenizer.own_markers, goes_on)
        text = tokenizer.apply_chat_template(
            one.messages, add_generation_prompt=begins and not goes_on, **one.variables
        )
        return one.prompt(text)

    def _behind(self, prompt: prompts.Prompt, params: SamplingSettings) -> SamplingSettings:
        """A grammar counts what the prompt has begun of the answer, without thoughts. Of an open one it
        counts all, and refuses it: nobody would tell where the answer begins."""
        if params.grammar is None or not prompt.begun or params.grammar_prefix:
            return params
        template = self.engine.tokenizer.chat_template
        reasoning = detect_reasoning_format(template.text) if template is not None else None
        opened = reasoning is not None and reasoning.is_open(prompt.before, begun=True)
        read = begun_text(prompt, reasoning, opened)
        return msgspec.structs.replace(params, grammar_prefix=prompt.begun if read.thinks else read.answer)

    def _chat_ids(self, prompt: prompts.Prompt) -> list[int]:
        tokenizer = self.engine.tokenizer
        if prompt.sign:
            return tokenizer.encode_guarded(prompt.text, prompt.sign)
        return tokenizer.encode(prompt.text, add_special_tokens=False)

    def _run(
        self,
        texts: Sequence[str | None],
        ids: list[list[int]],
        params: list[SamplingSettings],
        progress: bool,
        images: Sequence[tuple[ImageSpan, ...]] = (),
    ) -> list[Generation]:
        answers = sum(one.n for one in params)
        names = self._calls.begin(ids, params, images)
        try:
            results = {
                name: Generation(text, prompt_ids, [Completion() for _ in range(one.n)])
                for name, text, prompt_ids, one in zip(names, texts, ids, params, strict=True)
            }
            with Progress(answers, shown=progress) as bar:
                for output in self._calls.outputs(names, answers):
                    check(output)
                    collect(results[output.id], output)
                    bar.advance(tokens=len(output.token_ids), answers=output.finish_reason is not None)
        except BaseException:  # also Ctrl+C
            self._calls.end(names)
            self._calls.flush()
            raise
        self._calls.end(names)
        return list(results.values())

    def _streamed(
        self, ids: list[list[int]], params: list[SamplingSettings], images: Sequence[tuple[ImageSpan, ...]] = ()
    ) -> Iterator[Piece]:
        """The requests begin now. A stream that is dropped ends them, which only one that has begun can."""
        pieces = self._pieces(ids, params, images)
        next(pieces, None)
        return pieces

    def _pieces(
        self, ids: list[list[int]], params: list[SamplingSettings], images: Sequence[tuple[ImageSpan, ...]]
    ) -> Iterator[Piece]:
        """The first is empty."""
        names = self._calls.begin(ids, params, images)
        try:
            place = {name: index for index, name in enumerate(names)}
            yield Piece()
            for output in self._calls.outputs(names, sum(one.n for one in params)):
                check(output)
                yield Piece(
                    output.text, output.token_ids, output.logprobs, output.finish_reason, output.stop_match,
                    place[output.id], output.index,
                )  # fmt: skip
        finally:
            self._calls.end(names)


def _server_notices(config: EngineConfig) -> list[str]:
    """One line per flag that was given and that only a server reads."""
    names = [f.name for f in FLAGS if (f.group == SERVER and f.name not in _OF_ENGINES) or f.name in _OF_ANSWERS]
    return [f"{flag} changes nothing in tandem.LLM: only a server reads it" for flag in config.given_flags(names)]
