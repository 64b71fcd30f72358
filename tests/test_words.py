"""Words that a reader from vLLM, SGLang or llama.cpp knows: names are nouns or verbs, docstrings have a subject.

Counts may only shrink: where one does, its number here follows.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tandem"
ODD = frozenset(
    """alone already apart asked aside beside came elsewhere found given gone kept late lately made meanwhile said seen
    sure taken there told wanted""".split()
)
MOST_ODD = 0.2
"""Of all names that are bound: adverbs and participles that say nothing of what they hold, per cent."""
MOST_OF, MOST_WHAT, MOST_WHETHER = 0, 0, 0
"""Docstrings that begin so; the last one: of what returns no bool."""


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))]


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def docstrings() -> Iterator[tuple[str, bool]]:
    """Each docstring of a function or class, and whether what it describes returns a bool."""
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if text := ast.get_docstring(node):
                returns = getattr(node, "returns", None)
                yield text, returns is not None and "bool" in ast.unparse(returns)


def test_names_say_what_they_hold() -> None:
    names = [name for tree in trees() for name in bound_names(tree)]
    odd = [name for name in names if name.strip("_") in ODD]
    share = 100 * len(odd) / len(names)
    assert share <= MOST_ODD, f"{share:.2f} % of {len(names)} names"


def test_docstrings_begin_with_their_subject() -> None:
    texts = list(docstrings())
    of = sum(text.startswith("Of ") for text, _ in texts)
    what = sum(text.startswith("What ") for text, _ in texts)
    whether = sum(text.startswith("Whether ") and not says for text, says in texts)
    assert of <= MOST_OF and what <= MOST_WHAT and whether <= MOST_WHETHER, (of, what, whether)


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
