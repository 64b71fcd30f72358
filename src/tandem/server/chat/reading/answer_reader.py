"""`AnswerReader`: one answer of a model whose calls and reasoning stand between markers."""

from __future__ import annotations

from tandem.server.chat.events import CallOutcome
from tandem.server.chat.formats.tool_format import ToolFormat
from tandem.server.chat.reading.calls import CallWriter
from tandem.server.chat.reading.json_calls import read_name_then_json, read_named_json
from tandem.server.chat.reading.other_calls import read_pairs, read_python_calls
from tandem.server.chat.reading.parameter_calls import read_parameters
from tandem.server.chat.reading.shown_text import ShownText
from tandem.server.chat.reading.source import AnswerSource, Reading
from tandem.text.reasoning_format import ReasoningFormat


class AnswerReader:
    """`tools` None: calls are not looked for. `reasoning` None: reasoning is text. A call ends reasoning."""

    def __init__(
        self,
        source: AnswerSource,
        sink: ShownText,
        call: CallWriter,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._call_writer = call
        self._tools = tools
        self._reasoning = reasoning

    def run(self) -> Reading[None]:
        while (yield from self._beginning()):
            pass
        while stop := (yield from self._source.until(self._stops(), self._sink.say)):
            yield from self._at(stop)

    def _stops(self) -> tuple[str, ...]:
        """Markers that the text is searched for now."""
        calls = self._tools.openers if self._tools else ()
        if self._reasoning is None:
            return calls
        if self._sink.reasoning:
            return (*self._reasoning.close, *calls)
        return (*self._reasoning.open, *calls) if self._reasoning.anywhere else calls

    def _at(self, stop: str) -> Reading[None]:
        reasoning = self._reasoning
        if reasoning and stop in reasoning.open:
            self._begin_reasoning(stop)
        elif reasoning and stop in reasoning.close:
            self._sink.marker(self._source.take(len(stop)))
            self._sink.reasoning = False
            while (yield from self._beginning()):
                pass
        else:
            yield from self._section()

    def _beginning(self) -> Reading[bool]:
        """Where an answer begins, or reasoning has ended: what stands only here. Whether it was something."""
        starts = self._tools.at_start if self._tools and not self._sink.reasoning else ()
        opens = self._reasoning.open if self._reasoning else ()
        if not (opens or starts):
            return False
        marker = yield from self._source.behind_space((*opens, *starts))
        if not marker:
            return False
        if marker in opens:
            self._begin_reasoning(marker)
            return False
        return (yield from self._section())

    def _begin_reasoning(self, marker: str) -> None:
        self._sink.marker(self._source.take_behind_space(marker))
        self._sink.reasoning = True

    # --- calls

    def _section(self) -> Reading[bool]:
        """One call or several. Whether there was one."""
        source, tools = self._source, self._tools
        assert tools is not None
        source.mark()
        yield from source.space()
        opened = yield from source.literal(tools.section_open)
        begun = False
        while True:
            yield from source.space()
            outcome = yield from self._call(bare=bool(opened) or not tools.open)
            if outcome is None:
                self._no_call()
                return begun
            begun = True
            self._call_writer.end(outcome, source.consumed)
            source.mark()
            if (
                outcome != "complete"
                or (yield from self._closed(opened))
                or not (yield from self._another(opened))
            ):
                return begun

    def _closed(self, opened: str) -> Reading[bool]:
        """Whether the section ends here. White space behind a call belongs to no text."""
        if not opened or not self._tools:
            return False
        marker = yield from self._source.behind_space(self._tools.section_close)
        self._sink.marker(self._source.take_behind_space(marker))
        self._source.mark()
        return bool(marker)

    def _another(self, opened: str) -> Reading[bool]:
        """Whether a further call follows, perhaps behind a separator, which is taken then."""
        source, tools = self._source, self._tools
        assert tools is not None
        yield from source.space()
        yield from source.literal(tools.separator)
        yield from source.space()
        bare = tools.at_start or (("{",) if opened and tools.named_json else ())
        if (yield from source.next_of((*tools.open, *bare))):
            return True
        source.put_back()
        return False

    def _no_call(self) -> None:
        """Takes back a call that is none: it is text, up to behind the marker that it began with. The rest is looked at
        again."""
        source, tools = self._source, self._tools
        assert tools is not None
        source.put_back()
        rest = source.text.lstrip()
        markers = (*tools.openers, *tools.at_start, *tools.separator)
        marker = max((m for m in markers if rest.startswith(m)), key=len, default="")
        self._sink.say(source.take_behind_space(marker or rest[:1]))

    def _call(self, bare: bool) -> Reading[CallOutcome | None]:
        """One call with its end marker. None: it is none, and nothing has been said of it."""
        source, tools = self._source, self._tools
        assert tools is not None
        marker = yield from source.literal(tools.open)
        if not marker and not bare:
            return None
        yield from source.space()
        outcome = yield from self._body(tools, bool(marker))
        if outcome == "complete":
            end_marker = yield from source.behind_space(tools.close)
            source.take_behind_space(end_marker or source.half_of(tools.close))
        return outcome

    def _body(self, tools: ToolFormat, marked: bool) -> Reading[CallOutcome | None]:
        source, call = self._source, self._call_writer
        if marked and tools.name_then_json:
            keep_id = tools.ids == "numbered"
            return (yield from read_name_then_json(source, tools.name_then_json, call, keep_id))
        if tools.parameters:
            return (yield from read_parameters(source, tools.parameters, tools, call))
        if tools.pairs:
            return (yield from read_pairs(source, tools.pairs, call))
        if tools.named_json:
            return (yield from read_named_json(source, tools.named_json, call))
        return (yield from read_python_calls(source, call)) if tools.python else None
