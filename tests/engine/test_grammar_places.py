"""A schema that cannot be held to is refused with the place of what is wrong, whether Tandem finds it or xgrammar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.engine.grammar.backend import complaint_of_schema, warned
from tandem.engine.grammar.loosened import loosened
from tandem.engine.grammar.places import placed
from tandem.engine.grammar.schema import check_schema
from tandem.errors import RequestError

HTTP_URL = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}  # Pydantic's
WRONG: dict[str, tuple[Any, str]] = {
    "a format and a length": (HTTP_URL, "format combined with minLength/maxLength is not supported"),
    "a pattern and a length": (
        {"type": "string", "pattern": "^a+$", "maxLength": 5},
        "pattern combined with minLength/maxLength is not supported",
    ),
    "Pydantic's Decimal": (
        {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*$"},
        "Lookahead assertion is not supported: ^(?!^[-+.]*$)[+-]?0*\\d*$",
    ),
    "a type that is none": ({"type": "strnig"}, 'Unsupported type "strnig"'),
    "a pattern that cannot be read": (
        {"type": "string", "pattern": "(a"}, "Regex parsing error at position 3: The parenthesis is not closed.",
    ),
    "a back reference": ({"type": "string", "pattern": "(a)\\1"}, "Backreference is not supported yet."),
    "steps of fractions": (
        {"type": "number", "multipleOf": 0.5}, "multipleOf is not supported for type:number",
    ),
    "parts that overlap": (
        {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf with overlapping",
    ),
    "draft 4's bounds": ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, "Value must be a number"),
    "an empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
    "too few items": ({"type": "array", "minItems": 5, "maxItems": 2}, "minItems is greater than maxItems: 5 > 2"),
    "no schema": ({"type": "array", "items": 3}, "items must be a boolean or an object"),
    "no value": ({"type": "string", "enum": [1]}, "no value of an enum or const is what stands beside it"),
    "a keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be held to; leave it out"),
    "a keyword of a wrong type": ({"type": "string", "minLength": [1]}, "a keyword has a value of the wrong type"),
    "false": (False, "cannot accept any value"),
}  # fmt: skip
PLACES: dict[str, Any] = {
    "#/properties/user/properties/url": lambda part: {
        "type": "object", "properties": {"id": {"type": "integer"}, "user": {
            "type": "object", "properties": {"name": {"type": "string"}, "url": part}, "required": ["url"]}},
    },
    "#/properties/urls/items": lambda part: {
        "type": "object", "properties": {"urls": {"type": "array", "items": part}}, "required": ["urls"],
    },
    "#/properties/url/anyOf/1": lambda part: {
        "type": "object", "properties": {"url": {"anyOf": [{"type": "null"}, part]}},
    },
    "#/$defs/Url": lambda part: {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/Url"}, "b": {"$ref": "#/$defs/Url"}},
        "$defs": {"Other": {"type": "null"}, "Url": part},
    },
    "#": lambda part: part,
}  # fmt: skip


@pytest.fixture(autouse=True)
def time_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has used more than a job may."""
    monkeypatch.setattr("tandem.engine.grammar.places.MOST_CPU_SECONDS", 1e9)


@contextlib.contextmanager
def errors_file() -> Iterator[int]:
    """xgrammar writes its warnings to standard error."""
    before, said = os.dup(2), os.memfd_create("said")
    os.dup2(said, 2)
    try:
        yield said
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(said)


def refusal(schema: Any) -> str | None:
    try:
        check_schema(schema)
    except RequestError as error:
        return str(error)
    with errors_file() as said:
        complaint = complaint_of_schema(schema, said)
        return complaint and placed(complaint, [{"type": "null"}, schema], lambda one: complaint_of_schema(one, said))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_refusal_names_the_place(kind: str, place: str) -> None:
    part, text = WRONG[kind]
    if part is False and place not in ("#", "#/$defs/Url"):
        pytest.skip("there it says that nothing may stand there")
    said = refusal(PLACES[place](part))
    assert said is not None and said.startswith(f"{place}: ") and text in said, said
    assert "ignor" not in said and "falling back" not in said  # what is refused is not ignored


def test_looking_has_an_end(monkeypatch) -> None:
    """Else the job would be ended for taking too long, and that would be said of the schema."""
    monkeypatch.setattr("tandem.engine.grammar.places.MOST_CPU_SECONDS", 0.0)
    asked: list[Any] = []
    assert placed("x", [{"properties": {"a": {}}}], lambda one: asked.append(one) or "x") == "x"
    assert not asked


def test_warnings_say_what_is_not_supported() -> None:
    line = "[10:00:00] /project/cpp/x.cc:5: Warning: {}\n"
    assert warned(line.format("a is not supported; ignoring a")) == "a is not supported"
    assert warned(line.format("a is not exact; falling back to b")) == "a is not exact"
    assert warned("nothing\n") is None


def test_a_loosened_schema_says_what_it_lacks() -> None:
    tags = {"type": "array", "items": {"not": {"const": "x"}, "type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags, "not": {"type": "null"}}, "required": ["tags"]}
    made, places = loosened(schema)
    assert sorted(places) == ["#/properties/tags/items/not", "#/properties/tags/uniqueItems"]
    held = {"type": "array", "items": {"type": "string"}}
    assert made == {**schema, "properties": {"tags": held, "not": {"type": "null"}}}  # a property's name is none
    check_schema(made)
    assert loosened(made) == (made, []) and loosened({"uniqueItems": False})[1] == []


def test_conditions_go_together() -> None:
    made, places = loosened({"type": "object", "if": {}, "then": {}, "else": {}, "dependentRequired": {}})
    assert made == {"type": "object"} and len(places) == 4
