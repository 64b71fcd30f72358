"""Prose can be read: sentences of the documents are short, and the pages that a newcomer opens first are, too."""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
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


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [link for link, anchor in links if anchor and anchor not in anchors(page.parent / link)] == []


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub spells them."""
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
