"""Answers to many schemas are valid, every one: schemas made at random, and those of packages at hand."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from fake_model import run, text
from random_engine import engine, request
from tandem.engine.engine import Engine
from tandem.engine.grammar import sources
from tandem.engine.grammar.schema import check_schema, prepared
from tandem.errors import RequestError

SUITE = Path(__file__).parents[2] / "node_modules" / "json-schema-test-suite" / "tests"
PATTERNS = [r"^[a-f]{2,6}$", r"^v[0-9]+(\.[0-9]+)?$", r"^(on|off|[A-Z]{3})$", r"^[^0-9]{1,4}$", r"^\w+@\w+$"]
FORMATS = ["date", "date-time", "uuid", "ipv4", "time"]


@pytest.fixture(scope="module")
def model() -> Engine:
    return engine()


def made_up(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of what clients send: objects, lists, enums, patterns, bounds, unions, definitions."""
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "format", "null"]
    kind = chance.choice(kinds + ["object"] * 4 + ["array"] * 3 + ["anyOf"] * 2 if depth else kinds)
    least = chance.randint(0, 3)
    match kind:
        case "object":
            return made_up_object(chance, depth)
        case "array":
            items = made_up(chance, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
        case "anyOf":
            return {"anyOf": [made_up(chance, depth - 1) for _ in range(2)]}
        case "enum":
            return {"enum": chance.sample(["a", "b c", 1, 2.5, True, None, "ü"], 3)}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case "format":
            return {"type": "string", "format": chance.choice(FORMATS)}
        case "string":
            return {"type": "string", "minLength": least, "maxLength": least + 5}
        case "integer":
            return {"type": "integer", "minimum": -least, "maximum": 10**least}
        case "number":
            return {"type": "number", "exclusiveMinimum": -1.5, "maximum": 10}
        case _:
            return {"type": kind}


def made_up_object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["id", "name", "näme", "a b", "x-y", "tags", "at"], chance.randint(1, 4))
    one: dict[str, Any] = {
        "type": "object",
        "properties": {name: made_up(chance, depth - 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
    }
    if chance.random() < 0.3:
        one["additionalProperties"] = chance.choice([False, {"type": "null"}])
    return one


def outcomes(model: Engine, schemas: list[Any]) -> Counter[str]:
    """How many answers are valid, are cut, or were refused. Fails for an answer that its schema refuses."""
    counts: Counter[str] = Counter()
    asked = {}
    for number, schema in enumerate(schemas):
        one = request(str(number), sources.json_schema(schema), seed=number, max_tokens=1500)
        try:
            model.add(one)
            asked[one.id] = schema
        except RequestError:
            counts["refused"] += 1
    for (name, _), outputs in run(model).items():
        counts[kind := kind_of(outputs)] += 1
        if kind == "valid":
            checker = jsonschema_rs.validator_for(asked[name], validate_formats=True)
            assert checker.is_valid(json.loads(text(outputs))), (asked[name], text(outputs))
    return counts


def kind_of(outputs: list) -> str:
    last = outputs[-1]
    if last.refused is not None:
        return "refused"
    assert last.finish_reason in ("stop", "length"), last.error
    return "valid" if last.finish_reason == "stop" else "cut"


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
def test_answers_to_schemas_made_up(model, count) -> None:
    chance = random.Random(count)
    counts = outcomes(model, [made_up_object(chance, 3) for _ in range(count)])
    assert counts == {"valid": count}


def of_check_jsonschema() -> Iterator[Any]:
    """What it has built in: the schemas of well-known services' files, up to 200 kB."""
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            yield json.loads(file.read_text(encoding="utf-8"))


def of_suite() -> Iterator[Any]:
    if not SUITE.is_dir():
        pytest.skip("npm's json-schema-test-suite is not in node_modules")
    for file in sorted(SUITE.glob("*/*.json")):
        dialect = {"draft7": "http://json-schema.org/draft-07/schema#"}.get(file.parent.name)
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            yield {"$schema": dialect} | schema if dialect and isinstance(schema, dict) else schema


@pytest.mark.full
@pytest.mark.parametrize("schemas", [of_check_jsonschema, of_suite])
def test_answers_to_schemas_of_packages(model, schemas) -> None:
    counts = outcomes(model, list(schemas()))
    print(dict(counts))
    assert counts["valid"] > 0


AWAY = {
    "components": {"schemas": {"a b": {
        "type": "object", "required": ["code", "next"], "additionalProperties": False,
        "properties": {
            "code": {"type": "string", "format": "ipv4"},
            "part": {"type": "string", "pattern": r"^1(\.5+)?$"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/components/schemas/a%20b"}]},
        },
    }}},
    "type": "array", "items": {"$ref": "#/components/schemas/a%20b"}, "minItems": 2,
}  # fmt: skip


def test_what_a_reference_leads_to_is_held_to_wherever_it_stands(model) -> None:
    """And spelt as what stands elsewhere: xgrammar's own reading of `ipv4` allows 01.2.3.4."""
    assert outcomes(model, [AWAY] * 12) == {"valid": 12}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"uniqueItems": True, "type": "array"}, "uniqueItems"), ({"$ref": "#/x/c"}, "nowhere"), ([1], "no schema"),
        ({"type": "object", "properties": {"y": {"$ref": "#/x/b"}}, "required": ["y"]}, "requires itself"),
        ({"properties": {"deep": {"not": {}}}}, "#/x/b/properties/deep: not"),
    ],
)  # fmt: skip
def test_what_a_reference_leads_to_is_checked(bad, said) -> None:
    """Through another one, too, in places that no keyword leads to."""
    schema = {"x": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/x/b"}}, "b": bad}, "$ref": "#/x/a"}
    with pytest.raises(RequestError, match=said):
        check_schema(schema)
    check_schema({"x": schema["x"], "type": "string"})  # nothing leads there


def test_data_is_no_schema() -> None:
    """What looks like one in an enum, or where nothing leads to, stays as it is."""
    looks = {"type": "string", "maxLength": 3, "items": [{"format": "date"}]}
    schema = {"enum": [looks], "examples": [looks], "elsewhere": looks}
    assert prepared(schema) == schema


def test_long_chains_of_references_are_followed_once() -> None:
    chain = {f"p{i}": {"$ref": f"#/$defs/p{i + 1}"} for i in range(300)} | {"p300": {"type": "null"}}
    check_schema({"$defs": chain, "$ref": "#/$defs/p0"})
    both = {"type": "array", "prefixItems": [{"$ref": "#/x/b"}, {"$ref": "#/x/b"}]}
    check_schema({"x": {"a": both, "b": {"type": "null"}}, "$ref": "#/x/a"})
