"""`ChatModel`: how the served model chats. Its template makes prompts, its formats say how its answers are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import msgspec

from tandem.engine.images.placeholders import with_rows
from tandem.engine.protocol import SamplingSettings
from tandem.engine.vision.spans import ImageSpan
from tandem.errors import TandemError
from tandem.server.chat.answer_parser import AnswerParser, AnswerRules
from tandem.server.chat.answer_prefix import BegunAnswer, begun_answer
from tandem.server.chat.attachments import unread_image
from tandem.server.chat.constraint import Speech, constraint
from tandem.server.chat.content import Content, Image, images_of, joined
from tandem.server.chat.conversation import Conversation, Message, Role
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import (
    NONE,
    ToolFormat,
    Written,
    detect_tool_format,
    tool_format,
)
from tandem.server.chat.held_tools import held_tools
from tandem.server.chat.history import earlier_calls
from tandem.server.chat.image_fit import fit_images
from tandem.server.chat.rendering import PromptRenderer, Speaking, TemplateTokenizer
from tandem.server.chat.template_fit import Render, TemplateFit, fit_template
from tandem.server.chat.turns import TurnOrders, fit_turns
from tandem.server.errors import ApiError
from tandem.server.prompts.images import ImageReader, PreparedImage, Unreadable
from tandem.server.prompts.reader import PromptReader
from tandem.text.prompt import Prompt
from tandem.text.reasoning_format import detect_reasoning_format

F = TypeVar("F")

log = logging.getLogger("tandem.server")

_FALLBACK = "hermes"  # what is described to a model whose template says nothing of tools

class ChatTokenizer(TemplateTokenizer, Protocol):
    """Part of `tandem.text.tokenizer.Tokenizer` that chats need."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def special_ids_in(self, texts: set[str]) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A request to submit, and how to read each of its answers: every answer needs its own parser. `ignored`: places in
    strict tools that calls cannot be held to, and images that are not shown. `prepared`: keeps the pixels of
    `images`."""

    prompt_ids: list[int]
    sampling: SamplingSettings
    rules: AnswerRules
    ignored: tuple[str, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    prepared: tuple[PreparedImage, ...] = ()

    def new_parser(self) -> AnswerParser:
        return self.rules.new_parser()


class ChatModel:
    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompts: PromptReader,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """`tool_parser`, `reasoning_parser`: names of formats, "none", or None to find them by the template. `images`:
        of a model that sees. Raises ConfigError for a name that is none."""
        self._prompts = prompts
        self._speaking = speaking_of(tokenizer, prompts.render_now, tool_parser, reasoning_parser)
        self._images = images
        if images is not None:
            self._speaking = replace(self._speaking, image_roles=_image_roles(tokenizer, prompts, images.placeholder))
        self._renderer = PromptRenderer(tokenizer, prompts.render, self._speaking)
        self._shown = tokenizer.special_ids_in(self._speaking.markers())
        self._written = _written(self._speaking)

    @property
    def reasons(self) -> bool:
        """Whether it may reason before it answers."""
        return self._speaking.reasoning_format is not None

    @property
    def sees(self) -> bool:
        """Whether its users may show it images."""
        return "user" in self._speaking.image_roles

    async def prepare(
        self, conversation: Conversation, sampling: SamplingSettings, *, counting: bool = False
    ) -> PreparedChat:
        """`sampling` comes back with what reading the answer needs, and all that it must match. counting: only the
        prompt's length is wanted, and images are not decoded. Raises RequestError, with `param` "messages", "prompt",
        "tools", "tool_choice" or what else of the conversation is wrong; ApiError 429, 500; EngineError."""
        conversation, readable, ignored = await self._with_read_images(conversation, counting)
        prompt, images = await self._renderer.render(conversation)
        [ids] = await self._prompts.encode_all([prompt.text], False, prompt.sign)  # first: one too long is not read
        begun = begun_answer(prompt, self._speaking)
        rules = self._rules(conversation, prompt, begun)
        held, unheld = held_tools(conversation)
        sampling = self._sampling(held, rules, begun, sampling)
        pictures = tuple(readable[id(image)] for image in images)
        ids, spans = self._with_images(ids, pictures, counting)
        return PreparedChat(ids, sampling, rules, (*unheld, *ignored), spans, pictures)

    async def _with_read_images(
        self, conversation: Conversation, counting: bool
    ) -> tuple[Conversation, dict[int, PreparedImage], list[str]]:
        """Notes in place of images that cannot be read, the others by their `id`, and the places that are ignored."""
        images = [image for message in conversation.messages for image in images_of(message.content)]
        if not images or self._images is None:
            return conversation, {}, []
        outcomes = dict(zip(map(id, images), await self._images.read(images, sizes=counting), strict=True))
        messages = tuple(_noted(message, outcomes) for message in conversation.messages)
        readable = {key: one for key, one in outcomes.items() if isinstance(one, PreparedImage)}
        ignored = [image.where for image in images if id(image) not in readable]
        several = [image for image in images if id(image) in readable and readable[id(image)].several]
        ignored += [f"{image.where}.later_frames" for image in several]
        return replace(conversation, messages=messages), readable, ignored

    def _with_images(
        self, ids: list[int], shown: tuple[PreparedImage, ...], counting: bool
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        if self._images is None or not shown:
            return ids, ()
        try:
            ids, firsts = with_rows(ids, self._images.placeholder, [one.rows for one in shown])
        except ValueError as error:
            text = f"the model's chat template wrote {error}; send fewer messages"
            raise ApiError(500, text, kind="server_error", code="chat_template_failed") from error
        if counting:
            return ids, ()
        return ids, tuple(one.span(first) for one, first in zip(shown, firsts, strict=True))

    def _rules(self, conversation: Conversation, prompt: Prompt, begun: BegunAnswer) -> AnswerRules:
        reasoning = self._speaking.reasoning_format if conversation.separate_reasoning else None
        return AnswerRules(
            tool_format=self._speaking.tool_format,
            reasoning_format=reasoning,
            tools=conversation.callable_tools,
            in_reasoning=reasoning is not None and begun.began_open,
            begun=prompt.begun,
            parallel=conversation.parallel_tool_calls,
            stream_reasoning=conversation.stream_reasoning,
            earlier_calls=earlier_calls(conversation),
        )

    def _sampling(
        self, conversation: Conversation, rules: AnswerRules, begun: BegunAnswer, sampling: SamplingSettings
    ) -> SamplingSettings:
        if rules.parses:
            sampling = msgspec.structs.replace(sampling, show_tokens=self._shown)
        speech = Speech(
            rules.tool_format,
            self._written,
            None if begun.answers else self._speaking.reasoning_format,
            in_reasoning=begun.thinks,
            may_reason=conversation.thinking is not False,
        )
        grammar = constraint(conversation, speech, sampling.grammar)
        return msgspec.structs.replace(sampling, grammar=grammar, grammar_prefix=begun.answer if grammar else "")


def _noted(message: Message, images: Mapping[int, PreparedImage | Unreadable]) -> Message:
    """With notes in place of images that cannot be read."""
    if isinstance(message.content, str):
        return message
    return replace(message, content=joined(_note(part, images) for part in message.content))


def _note(part: str | Image, images: Mapping[int, PreparedImage | Unreadable]) -> Content:
    if isinstance(part, str):
        return part
    one = images[id(part)]
    return (part,) if isinstance(one, PreparedImage) else unread_image(one.why)


def _image_roles(tokenizer: ChatTokenizer, prompts: PromptReader, placeholder: int) -> frozenset[Role]:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    none = frozenset[Role]()
    if tokenizer.chat_template is None:
        return none
    roles = _tried(fit_images, none, prompts.render_now, encode, placeholder)
    if "user" not in roles:
        log.warning("the model sees, and its chat template shows no images: requests with images are refused")
        return none
    log.info("images: shown in messages of %s", ", ".join(sorted(roles)))
    return roles


def _written(speaking: Speaking) -> Written | None:
    """The exact form of a call: the template's, or what was described."""
    if speaking.calls_as_text and speaking.tool_format and speaking.tool_format.written:
        return speaking.tool_format.written[0]
    return speaking.fit.written


def speaking_of(
    tokenizer: TemplateTokenizer, render: Render, tool_parser: str | None, reasoning_parser: str | None
) -> Speaking:
    """Says in the log what was found. Raises ConfigError."""
    source = tokenizer.chat_template.text if tokenizer.chat_template else ""
    reasoning = reasoning_format(reasoning_parser) if reasoning_parser else detect_reasoning_format(source)
    tool_syntax = tool_format(tool_parser) if tool_parser else detect_tool_format(source)
    if tokenizer.chat_template is None:
        log.warning("the model has no chat template: chats are refused until --chat-template FILE gives one")
        return Speaking(tool_syntax, reasoning)
    turns = _tried(fit_turns, TurnOrders(), render)
    if (tool_parser or "").lower() == NONE:
        return Speaking(tool_syntax, reasoning, turns=turns)
    tools = tool_syntax or _fallback()
    fit = _tried(fit_template, TemplateFit(), render, tools)
    unknown = tool_syntax is None or not (fit.tools or fit.reads_back)
    speaking = Speaking(tools, reasoning, fit, turns, describe=unknown or not fit.tools, calls_as_text=unknown)
    log.info("%s", _summary(speaking, named=tool_parser is not None))
    return speaking


def _tried(trial: Callable[..., F], otherwise: F, *arguments: object) -> F:
    try:
        return trial(*arguments)
    except TandemError as error:  # takes too long, or too much memory
        log.warning("the chat template cannot be tried: %s", error)
        return otherwise


def _fallback() -> ToolFormat:
    fallback = tool_format(_FALLBACK)
    assert fallback is not None
    return fallback


def _summary(speaking: Speaking, named: bool) -> str:
    """One line for the log."""
    assert speaking.tool_format is not None
    how = "named" if named else "found in the chat template"
    if speaking.calls_as_text:
        how = "described in a system message: the chat template has no tools of a known format"
    elif not speaking.fit.reads_back:
        how += "; not constrained: a call that the template writes is not read back"
    elif speaking.fit.written is None:
        how += "; not constrained: the template writes calls in no exact form of this format"
    reasoning = speaking.reasoning_format.name if speaking.reasoning_format else NONE
    return f"tool calls: {speaking.tool_format.name} ({how}); reasoning: {reasoning}"
