"""Chat models for tests: real templates and a real tokenizer of bytes, no weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tandem.engine.protocol import SamplingSettings
from tandem.server.chat.conversation import Conversation
from tandem.server.chat.model import ChatModel, PreparedChat
from tandem.server.prompts.reader import PromptReader
from tandem.text.tokenizer import Tokenizer

CONTROLS = ("<|turn|>", "<|done|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")


def chat_tokenizer(template: dict[str, str] | str | None, special: tuple[str, ...] = CONTROLS) -> Tokenizer:
    """A token for each byte, and control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    inner.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
    return Tokenizer(inner, chat_template=template)


@contextlib.contextmanager
def chat_model(
    template: dict[str, str] | str | None, special: tuple[str, ...] = CONTROLS, **parsers: Any
) -> Iterator[tuple[ChatModel, Tokenizer]]:
    """The template is rendered in this process: `tests/server/test_chat_templates.py` has the other."""
    tokenizer = chat_tokenizer(template, special)
    prompts = PromptReader(tokenizer)
    prompts._template = None
    try:
        yield ChatModel(tokenizer, prompts, **parsers), tokenizer
    finally:
        prompts.close()


def prepare(model: ChatModel, conversation: Conversation, **sampling: Any) -> PreparedChat:
    return asyncio.run(model.prepare(conversation, SamplingSettings(**sampling)))


def prompt_of(template: dict[str, str] | str | None, conversation: Conversation, **parsers: Any) -> str:
    """The prompt's text, decoded from its ids."""
    with chat_model(template, **parsers) as (model, tokenizer):
        return tokenizer.decode(prepare(model, conversation).prompt_ids, skip_special_tokens=False)
