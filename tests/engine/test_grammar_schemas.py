"""Answers to many schemas are valid, every one: schemas made at random, and those of packages at hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from random_engine import engine
from schemas import kinds_of_answers, made_up_object, of_check_jsonschema, of_suite, outcomes
from tandem.engine.engine import Engine
from tandem.engine.grammar.schema import check_schema, prepared
from tandem.errors import RequestError
from tandem.flags.engine_config import EngineConfig


@pytest.fixture(scope="module")
def model() -> Engine:
    return engine()


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
def test_answers_to_schemas_made_up(model, count) -> None:
    chance = random.Random(count)
    counts = outcomes(model, [made_up_object(chance, 3) for _ in range(count)])
    assert counts == {"valid": count}


@pytest.mark.full
@pytest.mark.parametrize("schemas", [of_check_jsonschema, of_suite])
def test_answers_to_schemas_of_packages(model, schemas) -> None:
    if not (found := schemas()):
        pytest.skip("the package is not installed")
    counts = outcomes(model, found)
    print(dict(counts))
    assert counts["valid"] > 0


WANTED = 200


@pytest.mark.full
@pytest.mark.timeout(1200)  # six minutes on two quiet cores
def test_answers_of_the_demo_model(demo_dir) -> None:
    """Valid, every one that is not refused by name, until there are 200. A small model may write a text for ever: such
    an answer is asked for again from one that likes to close what it has opened."""
    model = Engine(EngineConfig(model=str(demo_dir), max_running_requests=16, context_length=2048))
    prompt = model.tokenizer.encode("An example of the file, as JSON:")
    chance, counts = random.Random(1), Counter[str]()
    given, biases = [*of_suite(), *of_check_jsonschema()], [{}, *_closing(model)]
    try:
        while counts["valid"] < WANTED:
            schemas = given or [made_up_object(chance, 3) for _ in range(64)]
            for bias in biases:
                kinds = kinds_of_answers(model, schemas, prompt, max_tokens=600, logit_bias=bias)
                counts += Counter(kind for kind in kinds if kind != "cut")
                schemas = [schema for schema, kind in zip(schemas, kinds, strict=True) if kind == "cut"]
            print(dict(counts), "of packages" if given else "of ours")
            assert not schemas
            given = []
    finally:
        model.close()
    assert set(counts) <= {"valid", "refused"}


def _closing(model: Engine) -> list[dict[int, float]]:
    """Tokens that end a text, an object, a list, or an answer, far above all others, and the sign without which a text
    of `\\w+@\\w+` cannot end; then all but those of texts, or an object that may have itself in it would be opened for
    ever; then the letter without which a name of `f.*o` cannot end."""
    pieces, ends = model.tokenizer.token_table().pieces, set(model.tokenizer.eos_ids)
    brackets = ends | {i for i, piece in enumerate(pieces) if piece in (b"}", b"]")}
    texts = {i for i, piece in enumerate(pieces) if piece in (b'"', b'"}', b'"]', b"@")}
    named = dict.fromkeys(brackets, 50.0) | {pieces.index(b"o"): 60.0, pieces.index(b'"'): 70.0}
    return [dict.fromkeys(brackets | texts, 50.0), dict.fromkeys(brackets, 50.0), named]


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
