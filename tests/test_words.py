"""Words that a reader from vLLM, SGLang or llama.cpp knows: names are nouns or verbs, docstrings have a subject.

Counts may only shrink: where one does, its number here follows.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ODD = frozenset(
    """alone already apart asked aside beside came elsewhere found given gone kept late lately made meanwhile said seen
    sure taken there told wanted""".split()
)
MOST_ODD = 0.05
"""Per cent of all names that are bound: adverbs and participles that say nothing of what they hold."""
VAGUE = frozenset(("result", "value", "data", "item", "info"))
MOST_VAGUE = 1.0
"""Per cent of all names: nouns that any name could be; today's share."""
WRONG_OPENINGS = {"src/tandem": 0, "scripts": 0, "benchmarks": 0, "tests": 203}
"""Docstrings that begin with "Of" or "What", or with "Whether" where no bool is returned."""


def trees(folder: str = "src/tandem") -> Iterator[ast.Module]:
    for path in (ROOT / folder).rglob("*.py"):
        yield ast.parse(path.read_text(encoding="utf-8"))


@cache
def names() -> list[str]:
    return [name.strip("_") for tree in trees() for name in bound_names(tree)]


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def wrong_openings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first, _, _ = (ast.get_docstring(node) or "").partition(" ")
        returns = getattr(node, "returns", None)
        says = returns is not None and "bool" in ast.unparse(returns)
        if first in ("Of", "What") or (first == "Whether" and not says):
            yield f"{getattr(node, 'name', 'module')}: {ast.get_docstring(node)}"


def share(words: frozenset[str]) -> float:
    """Per cent of the package's names."""
    return 100 * sum(name in words for name in names()) / len(names())


def test_names_say_what_they_hold() -> None:
    assert share(ODD) <= MOST_ODD


def test_vague_nouns_do_not_become_more_frequent() -> None:
    assert share(VAGUE) <= MOST_VAGUE


@pytest.mark.parametrize("folder", WRONG_OPENINGS)
def test_docstrings_begin_with_their_subject(folder: str) -> None:
    wrong = [each for tree in trees(folder) for each in wrong_openings(tree)]
    assert len(wrong) <= WRONG_OPENINGS[folder], "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('def f() -> bool:\n    """Whether it runs."""', 0),
        ('def f() -> int:\n    """Whether it runs."""', 1),
        ('"""What runs."""', 1),
        ('class A:\n    """Of a run."""\n    def f(self):\n        """Often."""', 1),
    ],
)
def test_openings_are_counted(code: str, count: int) -> None:
    assert len(list(wrong_openings(ast.parse(code)))) == count


MOST_NAMESAKES = 10
"""Names of classes that stand twice or more, an underscore before them or not."""
NAMESAKES = {
    "Cost": "found by the folder of a mechanism (`mechanisms/cost.py`)",
    "CalledFunction": "OpenAI and Ollama call it so",
    "CalledTool": "OpenAI and Ollama call it so",
    "ErrorDetail": "OpenAI and Anthropic call it so",
    "MessageBody": "a message of a dialect's body",
    "StreamOptions": "OpenAI's chats and responses differ in it",
    "Thinking": "OpenAI's and Anthropic's bodies have it",
    "ToolBody": "a tool of a dialect's body",
    "ToolChoiceBody": "a choice of a dialect's body",
    "Usage": "every dialect has its own",
}


def test_a_class_has_a_name_of_its_own() -> None:
    names = Counter(node.name.strip("_") for tree in trees() for node in tree.body if isinstance(node, ast.ClassDef))
    namesakes = {name for name, count in names.items() if count > 1}
    assert namesakes <= NAMESAKES.keys(), f"name them by what they are: {sorted(namesakes - NAMESAKES.keys())}"
    assert not NAMESAKES.keys() - namesakes, "take it off the list"
    assert len(NAMESAKES) <= MOST_NAMESAKES


GONE = {"guess": "draft token; to draft", "travel": "are streamed", "late expert": "deferred expert"}
"""Words of the house that the field has others for."""
PUBLIC = re.compile(
    r"mimetypes\.guess_type|tandem_speculation_\w+|[\"`](?:speculation_)?(?:right_)?guess\w*[\"`]|\{guesses\}"
)
"""Names of other code, of metrics and of JSON fields: dashboards read them."""


@pytest.mark.parametrize("pages", ["src/tandem/**/*.py", "docs/**/*.md"])
def test_words_that_are_gone_do_not_come_back(pages: str) -> None:
    texts = {path: PUBLIC.sub("", path.read_text(encoding="utf-8")).lower() for path in ROOT.glob(pages)}
    found = [f"{path.relative_to(ROOT)}: {word}" for path, text in texts.items() for word in GONE if word in text]
    assert not found, f"in the words of the field: {GONE}"
