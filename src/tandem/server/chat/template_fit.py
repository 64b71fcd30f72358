"""`TemplateFit`: how a checkpoint's chat template takes tools, found by trying it when the model is loaded.

A call of our own is rendered as history and read back. The way in which that works is how every later history is
given to the template. Where none works, what the template writes is not what the parser reads: calls are not
constrained then.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from tandem.errors import RequestError
from tandem.server.chat.answer_parser import AnswerRules, FormattedText
from tandem.server.chat.collect import whole_answer
from tandem.server.chat.conversation import Tool
from tandem.server.chat.formats.tool_format import ToolFormat, Written
from tandem.server.chat.tools_in_text import tool_for_template

Render = Callable[..., str]  # (messages, add_generation_prompt=…, **variables), raises RequestError
TemplateMessages = list[dict[str, Any]]

_USER, _THOUGHT = "Weather and time, please?", "I need a tool for this."
_RESULTS = ("It rains.", "It is noon.")
_ARGUMENTS: dict[str, Any] = {"city": 'Zürich "Nord"', "days": 3, "fine": True, "units": ["C", "F"]}
_TOOL = Tool(
    "probe_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Which city"},
            "days": {"type": "integer", "description": "How many days"},
            "fine": {"type": "boolean", "description": "Only fine weather"},
            "units": {"type": "array", "items": {"type": "string"}, "description": "Which units"},
        },
        "required": ["city"],
    },
)

ReasoningKey = Literal["reasoning_content", "thinking", "blocks"]


@dataclass(frozen=True, slots=True)
class TemplateFit:
    """`tools`: the template tells the model about tools. `reads_back`: a call in history was rendered and read.

    `arguments`: as an object or as JSON text. `empty`: content of an assistant that only calls. `several`: whether one
    message may have several calls. `written`: the exact form of a call.
    """

    tools: bool = False
    reads_back: bool = False
    arguments: Literal["object", "text"] = "object"
    empty: str | None = ""
    several: bool = True
    reasoning: ReasoningKey = "reasoning_content"
    written: Written | None = None


def fit_template(render: Render, tool_format: ToolFormat) -> TemplateFit:
    """A template that refuses everything fits nothing. Raises what `render` raises besides RequestError."""
    return _Trial(render, tool_format).fit()


class _Trial:
    def __init__(self, render: Render, tool_format: ToolFormat) -> None:
        self._render = render
        self._format = tool_format
        self._variables: dict[str, Any] = {"tools": [tool_for_template(_TOOL)]}

    def fit(self) -> TemplateFit:
        tools = self._renders_tools()
        if not tools:
            self._variables = {}
        fit = TemplateFit(tools=tools)
        for arguments, empty in itertools.product(("object", "text"), ("", None)):
            candidate = replace(fit, arguments=arguments, empty=empty)  # type: ignore[arg-type]
            if (answer := self._answer(candidate, 1)) is not None:
                fit = replace(candidate, reads_back=True, written=self._written(answer))
                break
        several = fit.reads_back and self._answer(fit, 2) is not None
        fit = replace(fit, several=several or not fit.reads_back)
        return replace(fit, reasoning=self._reasoning_key(fit))

    def _rendered(self, messages: TemplateMessages, **variables: Any) -> str | None:
        try:
            return self._render(messages, **(self._variables | variables))
        except RequestError:
            return None

    def _renders_tools(self) -> bool:
        text = self._rendered([_user()])
        return text is not None and _TOOL.name in text

    def _answer(self, fit: TemplateFit, count: int) -> str | None:
        """The text of an assistant with `count` calls as the template writes it; None unless these are read from it."""
        begun = self._rendered([_user()])
        text = self._rendered(self._history(fit, count), add_generation_prompt=False)
        if begun is None or text is None:
            return None
        return next((one for one in _endings(begun, text) if self._reads_back(one, count)), None)

    def _history(
        self, fit: TemplateFit, count: int, reasoning: dict[str, Any] | None = None
    ) -> TemplateMessages:
        arguments = _ARGUMENTS if fit.arguments == "object" else json.dumps(_ARGUMENTS, ensure_ascii=False)
        function = {"name": _TOOL.name, "arguments": arguments}
        calls = [{"id": self._id(i), "type": "function", "function": function} for i in range(count)]
        results = [
            {"role": "tool", "tool_call_id": self._id(i), "name": _TOOL.name, "content": _RESULTS[i]}
            for i in range(count)
        ]
        assistant = {"role": "assistant", "content": fit.empty, "tool_calls": calls} | (reasoning or {})
        return [_user(), assistant, *results]

    def _id(self, index: int) -> str:
        """Some templates insist on nine letters and digits."""
        return f"functions.{_TOOL.name}:{index}" if self._format.ids == "numbered" else f"callnum{index:02}"

    def _reads_back(self, answer: str, count: int) -> bool:
        parser = FormattedText(AnswerRules(self._format, None, {_TOOL.name: _TOOL}))
        calls = whole_answer([*parser.push(answer), *parser.end("stop")]).calls
        return len(calls) == count and all(_object(call.arguments) == _ARGUMENTS for call in calls)

    def _written(self, answer: str) -> Written | None:
        """The form in which the template wrote the call, if it is one of the format's."""
        for written in self._format.written:
            begin = written.first + written.begun(_TOOL.name, call_id=self._id(0))
            _, opening, rest = answer.partition(begin)
            if opening and written.end in rest:  # some templates forget `last`
                return written
        return None

    def _reasoning_key(self, fit: TemplateFit) -> ReasoningKey:
        """Under which key an assistant's reasoning gets into the prompt; mostly it does only beside calls."""
        ways: dict[ReasoningKey, dict[str, Any]] = {
            "reasoning_content": {"reasoning_content": _THOUGHT},
            "thinking": {"thinking": _THOUGHT},
            "blocks": {"content": [{"type": "thinking", "thinking": _THOUGHT}]},
        }
        on = {"enable_thinking": True, "thinking": True}
        for key, fields in ways.items():
            plain = [_user(), {"role": "assistant", "content": _RESULTS[0]} | fields]
            texts = [
                self._rendered(history, **on) or "" for history in (self._history(fit, 1, fields), plain)
            ]
            if any(
                _THOUGHT in text and "'thinking'" not in text and '"thinking"' not in text for text in texts
            ):
                return key  # a template that knows no blocks may write them as they are
        return "reasoning_content"


def _user() -> dict[str, Any]:
    return {"role": "user", "content": _USER}


def _object(arguments: str) -> Any:
    """None: a call that was cut."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def _endings(begun: str, text: str) -> Iterator[str]:
    """Where the assistant's text may begin. `begun`: the prompt that it answers."""
    if text.startswith(begun):
        yield text[len(begun) :]
    yield text.rpartition(_USER)[2]
    yield text[next((i for i, (a, b) in enumerate(zip(begun, text, strict=False)) if a != b), 0) :]
