"""xgrammar, as far as it is used here. It imports Transformers, so it is imported when a grammar is asked for."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.engine.grammar.schema import prepared
from tandem.engine.grammar.sources import schemas_in
from tandem.engine.protocol import Grammar

# White space between two parts of a JSON text: enough for usual indentation. Without a bound a weak model may write
# nothing else until its answer is cut. A compiled grammar grows with it.
MOST_WHITE_SPACE = 16

_SWITCH_SECONDS = 2e-4
_MOST_SAID = 64 << 10
_WARNING = re.compile(r"^\[[\d:. ]+\] \S+?:\d+: Warning: (.+)$", re.M)
_INSTEAD = re.compile(r"; (ignoring|falling back) .*$| and is ignored in regex(?=:)")
_SOURCE_PLACE = re.compile(r"^\[[\d:. ]+\] \S+?:\d+: ")


def grammar_compiler(tokenizer_info: Any, threads: int) -> Any:
    """Without a cache: each process of `worker.py` compiles once."""
    import xgrammar

    return xgrammar.GrammarCompiler(tokenizer_info, max_threads=threads, cache_enabled=False)


def compiled_by(compiler: Any, grammar: Grammar) -> Any:
    """Raises what xgrammar raises; `complaint` makes a sentence of it."""
    match grammar.kind:
        case "json_schema":
            schema = json.dumps(prepared(json.loads(grammar.text)))
            return compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_WHITE_SPACE)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "structural_tag":
            return compiler.compile_structural_tag(json.dumps(_with_schemas(json.loads(grammar.text))))


def _with_schemas(tag: Any) -> Any:
    """The same of all schemas in a structural tag."""
    if isinstance(tag, list):
        return [_with_schemas(each) for each in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        schema = prepared(tag["json_schema"])
        return {"max_whitespace_cnt": MOST_WHITE_SPACE} | tag | {"json_schema": schema}
    return {name: _with_schemas(each) for name, each in tag.items()}


def schemas_of(grammar: Grammar) -> list[Any]:
    if grammar.kind == "json_schema":
        return [json.loads(grammar.text)]
    return list(schemas_in(json.loads(grammar.text))) if grammar.kind == "structural_tag" else []


def heard(work: Callable[[], Any], errors: int) -> tuple[Any, str | None]:
    """The result of `work`, and xgrammar's complaint: an exception, or a warning of something ignored. errors:
    the file that standard error leads to."""
    begin = os.fstat(errors).st_size
    try:
        done = work()
    except Exception as error:
        return None, complaint(error)
    return done, warned(os.pread(errors, _MOST_SAID, begin).decode(errors="replace"))


def complaint_of_schema(schema: Any, errors: int) -> str | None:
    """Without a vocabulary: much cheaper than compiling."""
    import xgrammar

    def convert() -> Any:
        text = json.dumps(prepared(schema))
        return xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MOST_WHITE_SPACE)

    return heard(convert, errors)[1]


def warned(stderr: str) -> str | None:
    """The first warning on xgrammar's standard error, without what it does instead: here it is refused. None: there is
    none."""
    return next((_INSTEAD.sub("", " ".join(m[1].split()))[:300] for m in _WARNING.finditer(stderr)), None)


def complaint(error: BaseException) -> str:
    """One line, without the place in xgrammar's own source."""
    message = _SOURCE_PLACE.sub("", str(error).strip()) or type(error).__name__
    return " ".join(message.split())[:500]


@contextmanager
def quick_switches() -> Iterator[None]:
    """Imports hold Python's lock: a step that runs meanwhile asks for it often, and would wait 5 ms each time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
