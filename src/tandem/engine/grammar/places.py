"""`placed`: where in a schema that is which xgrammar complains of; it does not say so itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from tandem.engine.grammar.references import children

MOST_CPU_SECONDS = 1.0  # of a job that looks: it is ended a little later, and another reason would be told

ComplaintOf = Callable[[Any], str | None]  # about a schema alone


def placed(complaint: str, schemas: Iterable[Any], complaint_of: ComplaintOf) -> str:
    """`complaint` with the smallest part of one of the schemas that alone brings it; as it is where there is none."""
    for schema in schemas:
        place, part = "#", schema
        if not _same(complaint, schema, complaint_of):
            continue
        while (inner := _inner(complaint, schema, part, complaint_of)) is not None:
            place, part = f"{place}/{inner[0]}", inner[1]
        return f"{place[:200]}: {complaint}"
    return complaint


def _inner(complaint: str, whole: Any, part: Any, complaint_of: ComplaintOf) -> tuple[str, Any] | None:
    """First those that need no definitions: what refers to a definition that is wrong brings the same complaint."""
    within = list(children(part)) if isinstance(part, dict) else []
    nothing: Any = {}
    for definitions in (nothing, whole):
        for name, child in within:
            if _same(complaint, _with_definitions(child, definitions), complaint_of):
                return name, child
    return None


def _same(complaint: str, schema: Any, complaint_of: ComplaintOf) -> bool:
    return time.process_time() < MOST_CPU_SECONDS and complaint_of(schema) == complaint


def _with_definitions(part: Any, whole: Any) -> Any:
    if not isinstance(part, dict) or not isinstance(whole, dict):
        return part
    return {name: whole[name] for name in ("$defs", "definitions") if name in whole} | part
