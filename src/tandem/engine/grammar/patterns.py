"""Regular expressions within JSON schemas, as xgrammar reads them rightly."""

from __future__ import annotations

import re

_DAY = "(0[1-9]|[12][0-9])"  # of any month, but for 29 February, which is left out
_DATE = rf"[0-9]{{4}}-((0[13578]|1[02])-({_DAY}|3[01])|(0[469]|11)-({_DAY}|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "date-time": rf"{_DATE}T{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR})",
    "time": rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR})",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}

# What is none of a pattern's groups: an escaped character, a class of characters.
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\)\?\??|.", re.S)


def counted_groups(pattern: str) -> str:
    """`(…)?` as `(…){0,1}`: of an optional group that ends with a repetition xgrammar 0.2.8 also takes the repetition
    alone, so `1(\\.5+)?` would match `155`."""
    return "".join("){0,1}" if piece in (")?", ")??") else piece for piece in _PIECES.findall(pattern))
