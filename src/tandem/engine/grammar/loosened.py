"""`loosened`: a schema without what cannot be held to, for those who would rather hold to the rest than be refused."""

from __future__ import annotations

from typing import Any

from tandem.engine.grammar.references import reached
from tandem.engine.grammar.schema import unheld_names


def loosened(schema: Any) -> tuple[Any, list[str]]:
    """And the places of what was left out, as in "#/properties/tags/uniqueItems". What the whole schema accepts the
    loosened one does, too."""
    names: dict[int, list[str]] = {}
    places: list[str] = []
    for place, part, _ in reached(schema):
        if isinstance(part, dict) and (unheld := unheld_names(part)):
            names[id(part)] = unheld
            places += [f"{place}/{name}" for name in unheld]
    return (_without(schema, names), places) if places else (schema, [])


def _without(node: Any, names: dict[int, list[str]]) -> Any:
    """names: to leave out, by the objects' ids."""
    if isinstance(node, list):
        return [_without(each, names) for each in node]
    if not isinstance(node, dict):
        return node
    unheld = names.get(id(node), ())
    return {name: _without(each, names) for name, each in node.items() if name not in unheld}
