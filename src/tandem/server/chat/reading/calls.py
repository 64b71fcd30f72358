"""`CallWriter`: turns what a reader finds into the events of one call after the other."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping

from tandem.server.chat.conversation import Tool
from tandem.server.chat.events import CallOutcome, ChatEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from tandem.server.chat.reading.json_text import well_formed
from tandem.server.chat.reading.values import property_choices, property_types

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")
_SHORT_CHARS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class CallWriter:
    """Calls of one answer. A name that is not among `tools` begins none."""

    def __init__(
        self, tools: Mapping[str, Tool], ids: str, emit: Callable[[ChatEvent], None], earlier: int = 0
    ) -> None:
        """`earlier`: calls of the conversation before this answer, for ids that count them."""
        self._tools = tools
        self._ids = ids
        self._emit = emit
        self._earlier = earlier
        self._used: set[str] = set()
        self.count = 0
        self.open = False
        self._name = ""

    def knows(self, name: str) -> bool:
        return name in self._tools

    def start(self, name: str, call_id: str | None = None) -> None:
        call_id = call_id if call_id and call_id not in self._used else self._new_id(name)
        self._used.add(call_id)
        self._name, self.open = name, True
        self._emit(ToolCallStart(self.count, call_id, name))

    def arguments(self, fragment: str) -> None:
        """Escapes in Python's strings can name half a character, which no answer can say."""
        if fragment:
            self._emit(ToolCallArguments(self.count, well_formed(fragment)))

    def end(self, outcome: CallOutcome, raw: str) -> None:
        self._emit(ToolCallEnd(self.count, outcome, raw))
        self.count += 1
        self.open = False

    def types(self, key: str) -> frozenset[str]:
        """JSON types that a parameter of the open call may have."""
        return property_types(self._tools[self._name].parameters, key)

    def choices(self, key: str) -> frozenset[str]:
        """The only texts that it may be, if it may be no others."""
        return property_choices(self._tools[self._name].parameters, key)

    def _new_id(self, name: str) -> str:
        if self._ids == "numbered":
            return f"functions.{name}:{self._earlier + self.count}"
        if self._ids == "short":
            return short_id(uuid.uuid4().hex)
        return f"call_{uuid.uuid4().hex[:24]}"


def short_id(call_id: str) -> str:
    """Nine letters and digits, always the same for the same id."""
    if _SHORT.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode(errors="replace")).digest()[:8])
    return "".join(_SHORT_CHARS[(number // 62**i) % 62] for i in range(9))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
