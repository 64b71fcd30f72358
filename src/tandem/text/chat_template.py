"""`ChatTemplate`: a checkpoint's Jinja chat template, rendered as Transformers renders it, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import CheckpointError, ConfigError, RequestError

MAX_TEMPLATE_CHARS = 1 << 20  # the longest that models have are some 30,000


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
    """`source` is only parsed here: compiling already computes what is constant, for as long as that takes."""

    def __init__(
        self, source: str, variables: Mapping[str, Any] | None = None, with_tools: str | None = None
    ) -> None:
        """variables: those that every rendering has, as `bos_token`. with_tools: the source where there are tools."""
        self.source, self.with_tools = source, with_tools
        self.variables: dict[str, Any] = {"tools": None, "documents": None, **(variables or {})}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.filters["from_json"] = json.loads
        self._environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._compiled: dict[str, Template] = {}
        if len(self.text) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(f"the model's chat template has more than {MAX_TEMPLATE_CHARS} characters")
        # what it reads, and a request may set
        self.names = frozenset(name for each in self._sources for name in self._names(each))

    @property
    def _sources(self) -> list[str]:
        return [each for each in (self.source, self.with_tools) if each is not None]

    @property
    def text(self) -> str:
        """All that it may write."""
        return "\n".join(self._sources)

    def _names(self, source: str) -> set[str]:
        with _readable():
            tree = self._environment.parse(source)
            return {n.name for n in tree.find_all(nodes.Name) if n.ctx == "load"}

    def compile(self) -> None:
        """Raises CheckpointError. Takes as long as the template wants."""
        for source in self._sources:
            self._template(source)

    def _template(self, source: str) -> Template:
        if source not in self._compiled:
            with _readable():
                self._compiled[source] = self._environment.from_string(source)
        return self._compiled[source]

    def values(self, **variables: Any) -> dict[str, Any]:
        """Variables of a rendering, besides the messages."""
        return self.variables | variables

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """RequestError with the template's own complaint, e.g. about the order of roles. Takes as long and as much
        memory as the template wants: a server renders in `server/prompts/template_worker.py`."""
        values = self.values(**variables)
        template = self._template(self.with_tools if self.with_tools and values["tools"] else self.source)
        try:
            return template.render(messages=messages, **values)
        except Exception as error:  # a template may do whatever Jinja can
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error


def chat_template_text(text: str) -> str:
    """`--chat-template`: a file, or the template itself. Raises ConfigError."""
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {text[:200]!r} is neither a file that can be read nor a Jinja template ({error})"
        ) from error


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # too deep nesting is a RecursionError, MemoryError or SyntaxError of Python's
        raise CheckpointError(f"the model's chat template is not valid Jinja: {error}") from error
