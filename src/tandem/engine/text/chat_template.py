"""`ChatTemplate`: a checkpoint's Jinja chat template, rendered as Transformers renders it, in a sandbox."""

from __future__ import annotations

import datetime
import json
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import CheckpointError, RequestError


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters, which a model has never seen escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """RequestError with the template's own complaint, e.g. about the order of roles."""
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:  # a template may do whatever Jinja can
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
