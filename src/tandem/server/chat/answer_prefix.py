"""`begun_answer`: how far an answer is that the prompt has begun."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.server.chat.rendering import Speaking
from tandem.text.prompt import Prompt
from tandem.text.reasoning_format import begun_text


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """`began_open`: the prompt opens reasoning in front of what was begun. `thinks`: reasoning is open at its end.

    `answers`: no reasoning can come any more. `answer`: what a grammar of the answer has to match first.
    """

    began_open: bool
    thinks: bool
    answers: bool = False
    answer: str = ""


def begun_answer(prompt: Prompt, speaking: Speaking) -> BegunAnswer:
    """Most prompts have begun nothing, or only reasoning."""
    reasoning = speaking.reasoning_format
    if not prompt.goes_on:
        opened = reasoning is not None and reasoning.is_open(prompt.text)
        return BegunAnswer(opened, opened)
    opened = reasoning is not None and reasoning.is_open(prompt.before, begun=True)
    if speaking.tool_format is not None and speaking.tool_format.channels:
        return BegunAnswer(opened, False, False, prompt.begun)  # its grammar has the channel's header, too
    read = begun_text(prompt, reasoning, opened)
    answers = not read.thinks and bool(read.thought or read.answer.strip())
    return BegunAnswer(opened, read.thinks, answers, read.answer)
