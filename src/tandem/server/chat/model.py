"""`ChatModel`: how the served model chats. Its template makes prompts, its formats say how its answers are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.engine.protocol import SamplingParams
from tandem.server.chat.answer_parser import AnswerParser, PlainText
from tandem.server.chat.conversation import Conversation, Message
from tandem.server.limits import INLINE_TOKENIZE_CHARS


class ChatTokenizer(Protocol):
    """What is needed of `tandem.engine.text.tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """What to submit, and how to read each of the answers: every answer needs its own parser."""

    prompt_ids: list[int]
    sampling: SamplingParams
    new_parser: Callable[[], AnswerParser]


class ChatModel:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def prepare(self, conversation: Conversation, sampling: SamplingParams) -> PreparedChat:
        """`sampling` comes back with what reading the answer needs. Off the event loop when there is much text. Raises
        RequestError, with `param` "messages", "tools", "tool_choice" or "chat_template_kwargs"."""
        if sum(len(message.content) for message in conversation.messages) <= INLINE_TOKENIZE_CHARS:
            return self._prepare(conversation, sampling)
        return await asyncio.to_thread(self._prepare, conversation, sampling)

    def _prepare(self, conversation: Conversation, sampling: SamplingParams) -> PreparedChat:
        messages = [_for_template(message) for message in conversation.messages]
        text = self._tokenizer.apply_chat_template(
            messages, conversation.add_generation_prompt, **conversation.template_variables
        )
        return PreparedChat(self._tokenizer.encode(text, add_special_tokens=False), sampling, PlainText)


def _for_template(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    return result if message.name is None else result | {"name": message.name}
