"""Long prefills: how much work they make, and that what is read does not depend on where their pieces end."""

from __future__ import annotations

import pytest

from tandem.server.chat.answer_parser import AnswerRules, FormattedText
from tandem.server.chat.collect import whole_answer
from tandem.server.chat.conversation import Tool
from tandem.server.chat.events import ToolCallEnd
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import tool_format
from tandem.server.chat.reading.source import AnswerSource
from tandem.text.prompt import draft

WEATHER = Tool("weather", "Tells it.", {"type": "object"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HOSTILE = (
    "<tool_call>x", "a <tool_call>{}</tool_call>", "<|channel>thought\nx<channel|>y", "<", " ",
    '<tool_call>{"arguments": "', f"{CALL}\n",
)  # fmt: skip


def rules(begun: str = "") -> AnswerRules:
    return AnswerRules(tool_format("hermes"), reasoning_format("gemma4"), {"weather": WEATHER}, begun=begun)


class Text(str):
    """Counts how often it is searched."""

    searches = 0

    def __contains__(self, other: object) -> bool:
        Text.searches += 1
        return super().__contains__(other)


def test_a_mark_is_looked_for_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.text.prompt._joined", lambda texts: Text(hostile))
    hostile = "TheAnswerGoesOnHere" + "e" * 1_000_000
    said = [{"role": "user", "content": hostile}, {"role": "assistant", "content": "x"}]
    Text.searches = 0
    mark = draft(said, {}, None, None, True).mark
    assert mark not in hostile and mark.isalpha() and Text.searches == 2


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("how", ["begun", "pushed"])
def test_what_is_taken_copies_little(unit: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character that is taken copies what `text` shows: of a text of markers all of it, but for the pieces."""
    copied, take = [0], AnswerSource.take

    def counted(source: AnswerSource, count: int) -> str:
        copied[0] += len(source.text)
        return take(source, count)

    monkeypatch.setattr(AnswerSource, "take", counted)
    text = unit * (300_000 // len(unit))
    parser = FormattedText(rules(text if how == "begun" else ""))
    if how == "pushed":
        parser.push(text)
    parser.end("stop")
    assert copied[0] < 3000 * len(text)


def read(text: str, size: int) -> tuple[object, ...]:
    parser = FormattedText(rules())
    events = [e for at in range(0, len(text), size) for e in parser.push(text[at : at + size])]
    answer = whole_answer([*events, *parser.end("stop")])
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    "text", [CALL, "<|channel>thought\nx<channel|>y", "<tool_call> no", f"<tool_call>{' ' * 3000}no"]
)
def test_markers_may_stand_where_a_piece_ends(text: str) -> None:
    for before in range(1024 - min(len(text), 100), 1026):
        whole = "a" * before + text + "b"
        assert read(whole, len(whole)) == read(whole, 7), before


def test_white_space_may_be_longer_than_pieces() -> None:
    for text in (f"{' ' * 5000}{CALL}", f"{' ' * 5000}<tool_call>{' ' * 5000}x", f"a{' ' * 5000}b"):
        assert read(text, len(text)) == read(text, 11)


def test_arguments_that_fill_a_prefill_go_on() -> None:
    filled = CALL.replace("Paris", "P" * 100_000)
    cut = len(filled) - 40
    parser = FormattedText(rules(f"Hm. {filled[:cut]}"))
    [call] = whole_answer([*parser.push(filled[cut:]), *parser.end("stop")]).calls
    assert call.arguments == '{"city": "%s"}' % ("P" * 100_000)
    done = FormattedText(rules(filled))
    assert not [e for e in [*done.push("x"), *done.end("stop")] if isinstance(e, ToolCallEnd)]


def test_a_call_that_breaks_far_away_is_read_again() -> None:
    """Its arguments come first, and no name behind them: all of it is text, with a call at its end."""
    broken = '<tool_call>{"arguments": "%s"}' % ("<tool_call>x" * 1000)
    assert read(broken + CALL, 100_000) == read(broken + CALL, 13)
    assert len(read(broken + CALL, 100_000)[2]) == 1
