"""`begun_answer`: how far an answer is that the prompt has begun, as its own parser reads it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.text.prompt import Prompt, common_end
from tandem.server.chat.answer_parser import AnswerRules, FormattedText
from tandem.server.chat.conversation import Conversation
from tandem.server.chat.rendering import Speaking


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """`began_open`: the prompt opens reasoning in front of what was begun. `thinks`: reasoning is open at its end.

    `answers`: no reasoning can come any more. `answer`: what a grammar of the answer has to match first.
    """

    began_open: bool
    thinks: bool
    answers: bool = False
    answer: str = ""


def begun_answer(prompt: Prompt, conversation: Conversation, speaking: Speaking) -> BegunAnswer:
    """Most prompts have begun nothing, or only reasoning."""
    reasoning = speaking.reasoning_format
    if not prompt.goes_on:
        opened = reasoning is not None and reasoning.is_open(prompt.text)
        return BegunAnswer(opened, opened)
    opened = reasoning is not None and reasoning.is_open(prompt.before, begun=True)
    if speaking.tool_format is not None and speaking.tool_format.channels:
        return BegunAnswer(opened, False, False, prompt.begun)  # its grammar has the channel's header, too
    rules = AnswerRules(reasoning_format=reasoning, in_reasoning=opened, begun=prompt.begun)
    read = FormattedText(rules)
    if read.reasoning:
        return BegunAnswer(opened, True)
    answer = prompt.begun[read.thought_until :]
    answer = answer.lstrip() if read.thought_until else common_end(answer, conversation.messages[-1].content)
    return BegunAnswer(opened, False, bool(answer.strip() or read.thought_until), answer)
