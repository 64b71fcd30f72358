"""Prose can be read: sentences of documents, docstrings and comments are short, and so are the first pages."""

from __future__ import annotations

import ast
import io
import math
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
    *sorted((ROOT / "docs" / "models").glob("*.md")),
]  # docs/lab is excepted: it is for those who repeat an experiment
LAB = sorted((ROOT / "docs" / "lab").glob("*.md"))
ROOTS = ROOT, ROOT / "src" / "tandem"
MOST_MEAN_WORDS, MOST_WORDS_IN_NINE_OF_TEN = 16, 28
MOST_LINES = {"README.md": 120, "CHANGELOG.md": 60, "docs/structure.md": 120}
MOST_WORDS_IN_CODE = 20  # of a sentence in a docstring or a comment
LONG_IN_CODE = 3.6  # sentences with more, per cent; today's share, which may only shrink
LONGEST_IN_CODE = 36
THEIRS = {"doc/xxhash_spec.md", "linux/prctl.h", "ggml/docs/gguf.md", "inference/convert.py"}  # files of other projects
MOST_STEP_WORDS = 15  # of a numbered step in docs/structure.md

ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.M)


def sentences(text: str) -> list[int]:
    """Words of each sentence of a page. Code blocks, tables, headings, pictures and comments do not count."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    counts: list[int] = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        plain = re.sub(r"`[^`]*`", "code", plain).replace("**", "")
        parts = re.split(r"(?<=[.!?])[)\"'”]*\s+", plain)
        counts += [count for count in map(words, parts) if count]
    return counts


def paragraphs(text: str) -> list[str]:
    """Blocks between blank lines; each item of a list is one. Indented code, tables and headings are left out."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not re.match(r"\s*\||#|!\[|    (?![-*\d ])", line)]
        pieces = ITEM.split("\n".join(lines))
        found += [" ".join(piece.split()) for piece in pieces if piece.strip()]
    return found


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def ninth_of_ten(counts: list[int]) -> int:
    return sorted(counts)[math.ceil(0.9 * len(counts)) - 1]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sentences_are_short(page: Path) -> None:
    counts = sentences(page.read_text(encoding="utf-8"))
    assert counts, "no sentence was found"
    assert statistics.mean(counts) <= MOST_MEAN_WORDS
    assert ninth_of_ten(counts) <= MOST_WORDS_IN_NINE_OF_TEN


@pytest.mark.parametrize("page", MOST_LINES)
def test_first_pages_are_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[page]


def test_steps_are_one_short_sentence_with_a_file() -> None:
    steps = re.findall(r"^\d+\. (.+)$", (ROOT / "docs" / "structure.md").read_text(encoding="utf-8"), re.M)
    assert len(steps) == 8 + 6 + 9 + 8  # a request, an expert's bytes, a decode step, a long prompt
    for step in steps:
        sentence, _, files = step.partition(" — ")
        assert words(sentence) <= MOST_STEP_WORDS, step
        assert files, f"no file: {step}"


def places(text: str) -> list[str]:
    """Paths of the repository or of src/tandem that a page names in `code`: with a folder and a known ending."""
    return re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|h|cc|cu|md|json|sh|toml))`", text)


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=name)
def test_named_files_exist(page: Path) -> None:
    named = set(places(page.read_text(encoding="utf-8"))) - {"architectures/NAME.py"}
    assert {each for each in named if not any((root / each).exists() for root in ROOTS)} == set()


@cache
def remarks() -> list[tuple[str, str]]:
    """(file, text) of each docstring and comment of the package; the lines of a comment are one text."""
    paths = sorted((ROOT / "src" / "tandem").rglob("*.py"))
    texts = [(path, path.read_text(encoding="utf-8")) for path in paths]
    return [(name(path), each) for path, text in texts for each in (*docstrings(text), *comments(text))]


def docstrings(text: str) -> Iterator[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield docstring


def comments(text: str) -> list[str]:
    found: list[str] = []
    above = -1  # the line of a comment that has its line for itself
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# ?(fmt|type|noqa|ruff|pragma)\b", token.string):
            alone, words = token.line.lstrip().startswith("#"), token.string.lstrip("# ")
            if alone and above == token.start[0] - 1:
                found[-1] += f" {words}"
            else:
                found.append(words)
            above = token.start[0] if alone else -1
    return found


def test_sentences_in_code_are_short() -> None:
    """Parameters are listed with semicolons between them; trees are drawn."""
    plain = [(file, re.sub(r".*[├└│].*|;", ".", text)) for file, text in remarks()]
    counts = sorted((count, file) for file, text in plain for count in sentences(text))
    long = [each for each in counts if each[0] > MOST_WORDS_IN_CODE]
    assert counts[-1][0] <= LONGEST_IN_CODE, counts[-3:]
    assert 100 * len(long) / len(counts) <= LONG_IN_CODE, (len(long), len(counts))


def test_files_named_in_code_exist() -> None:
    """Paths in docstrings and comments: of the repository, of src/tandem, or of the file's own folder."""
    pattern = re.compile(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cc|cu|md|json|sh|toml))\b")
    named = {(file, path) for file, text in remarks() for path in pattern.findall(text)} | {
        (name(source), path)
        for source in (ROOT / "csrc").rglob("*.[ch]*")
        for path in pattern.findall("\n".join(re.findall(r"//(.*)", source.read_text(encoding="utf-8"))))
    }
    roots = (*ROOTS, ROOT / "csrc")
    missing = [(f, p) for f, p in named if not any((r / p).exists() for r in (*roots, (ROOT / f).parent))]
    assert len(named) > 50 and [each for each in missing if each[1] not in THEIRS] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# One two.\n# Three.\nx = 1  # four\n", ["One two. Three.", "four"]),
        ("x = [  # a\n    1,  # b\n]  # fmt: skip\n", ["a", "b"]),
        ("y = 1  # a\n# b\n", ["a", "b"]),
    ],
)
def test_comments_are_read(text: str, expected: list[str]) -> None:
    assert comments(text) == expected


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [link for link, anchor in links if anchor and anchor not in anchors(page.parent / link)] == []


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_speed_table_is_that_of_the_results() -> None:
    """After a run: python scripts/readme_tables.py --write"""
    script = ROOT / "scripts" / "readme_tables.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_folders_of_structure_exist() -> None:
    named = re.findall(r"`([\w./-]+/)`", (ROOT / "docs" / "structure.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [each for each in named if not any((root / each).exists() for root in ROOTS)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two three. Four five.", [3, 2]),
        ("A [link text](docs/x.md) and `code with spaces` end.", [6]),
        ("# Heading\n\nOne two.\n\n| a | b |\n\n```sh\nmake all\n```\n", [2]),
        ("- one two\n  three\n- four\n", [3, 1]),
        ("1. One. Two three!\n2. Four?\n", [1, 2, 1]),
        ("Text:\n\n    make test   # all tests\n", [1]),
        ("Numbers 0.5 and 1.2 are one sentence (as here). Next one.", [9, 2]),
        ("<!-- a: generated -->\nOne two.\n", [2]),
    ],
)
def test_words_are_counted(text: str, expected: list[int]) -> None:
    assert sentences(text) == expected
