"""Constraint of an answer: the fields of OpenAI, vLLM and SGLang that state it, as one `Grammar`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from tandem.engine.grammar import sources
from tandem.engine.protocol import Grammar
from tandem.errors import RequestError

Schema = str | bool | dict[str, Any]


class NamedSchema(msgspec.Struct, frozen=True):
    """`strict` changes nothing: every schema is held to, or refused."""

    schema: bool | dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(msgspec.Struct, frozen=True):
    """Structure that a trigger begins, in SGLang's older form of a structural tag."""

    begin: str
    end: str
    schema: bool | dict[str, Any] = True


class ResponseFormat(msgspec.Struct, frozen=True):
    """`format`, or `structures` and `triggers` in the older form, belong to a structural tag. `schema` beside the type
    is llama.cpp's form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema: bool | dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's: one of these."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class GrammarFields(msgspec.Struct, kw_only=True):
    """At most one of them."""

    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | None = None
    structural_tag: str | dict[str, Any] | None = None


class OpenAIGrammarFields(GrammarFields, kw_only=True):
    """The fields of OpenAI's routes: its own, those of SGLang and of vLLM, new and old, and llama.cpp's `grammar`."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None


def grammar_of(fields: GrammarFields) -> Grammar | None:
    """Raises RequestError when several fields say one, or when one makes no sense."""
    grammars = _all(fields)
    if len(grammars) > 1:
        first, second, *_ = grammars
        raise RequestError(f"{first} and {second} both say what the answer must match; send one", second)
    return next(iter(grammars.values()), None)


def grammar_field(fields: GrammarFields) -> str | None:
    """The one that says it."""
    return next(iter(_all(fields)), None)


def _all(fields: GrammarFields) -> dict[str, Grammar]:
    names = [field.name for field in msgspec.structs.fields(OpenAIGrammarFields) if field.name in _MAKERS]
    field_values = {name: value for name in names if (value := getattr(fields, name, None)) not in (None, "", [])}
    grammars = {name: _grammar(name, value) for name, value in field_values.items()}
    return {name: grammar for name, grammar in grammars.items() if grammar is not None}


def _grammar(name: str, value: Any) -> Grammar | None:
    try:
        return _MAKERS[name](value)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", name) from error


def _tag(tag: str | dict[str, Any]) -> Grammar:
    text = tag if isinstance(tag, str) else msgspec.json.encode(tag).decode()
    return Grammar("structural_tag", text)


def _of_response_format(form: ResponseFormat) -> Grammar | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            says = form.schema not in (None, True, {})
            return sources.json_schema(_schema(form)) if says else sources.json_object()
        case "json_schema":
            return sources.json_schema(_schema(form))
        case "structural_tag":
            return _tag({"type": "structural_tag", "format": form.format or _triggered(form)})


def _schema(form: ResponseFormat) -> bool | dict[str, Any]:
    named = None if form.json_schema is None else form.json_schema.schema
    schema = form.schema if named is None else named
    if schema is None:
        raise RequestError("json_schema.schema is missing")
    return schema


def _triggered(form: ResponseFormat) -> dict[str, Any]:
    """SGLang's older form of a structural tag."""
    if not form.structures or not form.triggers:
        raise RequestError("a structural tag needs format, or structures and triggers")
    tags = [
        {"type": "tag", "begin": one.begin, "end": one.end,
         "content": {"type": "json_schema", "json_schema": one.schema}}
        for one in form.structures
    ]  # fmt: skip
    return {"type": "triggered_tags", "triggers": form.triggers, "tags": tags}


def _of_structured_outputs(constraint: StructuredOutputs) -> Grammar | None:
    named = msgspec.structs.asdict(constraint)
    makers = {"json": "guided_json", "choice": "guided_choice", "grammar": "guided_grammar"}
    fields = [(makers.get(name, name), value) for name, value in named.items() if value not in (None, "", [], False)]
    if len(fields) > 1:
        raise RequestError("it may say one thing that the answer must match, not several")
    return next((_MAKERS[name](value) for name, value in fields), None)


_MAKERS: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
    "json_object": lambda _: sources.json_object(),
    "guided_choice": sources.choice,
    **dict.fromkeys(("guided_json", "json_schema"), sources.json_schema),
    **dict.fromkeys(("guided_regex", "regex"), lambda text: Grammar("regex", text)),
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), lambda text: Grammar("ebnf", text)),
    "structural_tag": _tag,
}
