"""Schemas to hold answers to, made at random and those of packages at hand, and what became of the answers."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec

from fake_model import run, text
from random_engine import request
from tandem.engine.engine import Engine
from tandem.engine.grammar import sources
from tandem.engine.protocol import TokenOutput
from tandem.errors import RequestError

SUITE = Path(__file__).parents[3] / "node_modules" / "json-schema-test-suite" / "tests"
PATTERNS = [r"^[a-f]{2,6}$", r"^v[0-9]+(\.[0-9]+)?$", r"^(on|off|[A-Z]{3})$", r"^[^0-9]{1,4}$", r"^\w+@\w+$"]
FORMATS = ["date", "date-time", "uuid", "ipv4", "time"]
DIALECTS = {f"draft{n}": f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 6, 7)} | {
    f"draft{day}": f"https://json-schema.org/draft/{day}/schema" for day in ("2019-09", "2020-12")
}
AT_ONCE = 32  # fewer than may wait to be compiled


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


def outcomes(
    model: Engine, schemas: Sequence[Any], prompt_ids: list[int] | None = None, **sampling: Any
) -> Counter[str]:
    """How many answers are valid, are cut, or were refused. Fails for an answer that its schema refuses."""
    return Counter(kinds_of_answers(model, schemas, prompt_ids, **sampling))


def kinds_of_answers(
    model: Engine, schemas: Sequence[Any], prompt_ids: list[int] | None = None, **sampling: Any
) -> list[str]:
    """Each schema's kind of answer: "valid", "cut", "refused", or "busy" where it cannot be compiled in time."""
    found: dict[int, str] = {}
    for first in range(0, len(schemas), AT_ONCE):
        waiting = dict(enumerate(schemas[first : first + AT_ONCE], first))
        for at_once in (AT_ONCE, 8, *[1] * 2 * AT_ONCE):  # alone even a busy machine compiles a large one
            if asked := dict(itertools.islice(waiting.items(), at_once)):
                kinds = _outcomes(model, asked, prompt_ids or [ord("?")], {"max_tokens": 1500} | sampling)
                waiting = {n: schema for n, schema in waiting.items() if kinds.get(n, "busy") == "busy"}
                found |= kinds
    return [found[number] for number in range(len(schemas))]


def _outcomes(
    model: Engine, schemas: dict[int, Any], prompt_ids: list[int], sampling: dict[str, Any]
) -> dict[int, str]:
    kinds: dict[int, str] = {}
    for number, schema in schemas.items():
        one = request(str(number), sources.json_schema(schema), seed=number, **sampling)
        one = msgspec.structs.replace(one, prompt_ids=prompt_ids)
        try:
            model.add(one)
        except RequestError:
            kinds[number] = "refused"
    for (name, _), outputs in run(model).items():
        number = int(name)
        kinds[number] = kind_of(outputs)
        if kinds[number] == "valid":
            checker = jsonschema_rs.validator_for(schemas[number], validate_formats=True)
            assert checker.is_valid(json.loads(text(outputs))), (schemas[number], text(outputs))
    return kinds


def kind_of(outputs: list[TokenOutput]) -> str:
    last = outputs[-1]
    if last.refused is not None:
        return "refused"
    if last.error is not None and "too busy" in last.error:  # a 503: it may be asked for again
        return "busy"
    assert last.finish_reason in ("stop", "length"), last.error
    return "valid" if last.finish_reason == "stop" else "cut"


def of_check_jsonschema() -> list[Any]:
    """Schemas built into it: those of well-known services' files, up to 200 kB. None: it is not installed."""
    found = find_spec("check_jsonschema")  # it is not imported: what it imports need not be there
    folders = [] if found is None else list(found.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("builtin_schemas/vendor/*.json"))]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def of_suite() -> list[Any]:
    """Those of npm's json-schema-test-suite, each of its own dialect. None: it is not in node_modules."""
    return [
        {"$schema": DIALECTS[file.parent.name]} | group["schema"]
        for file in sorted(SUITE.glob("*/*.json"))
        if file.parent.name in DIALECTS
        for group in json.loads(file.read_text(encoding="utf-8"))
        if isinstance(group["schema"], dict)
    ]
