"""What README.md and docs/ tell people to type exists: make targets, commands, flags, links, Python names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer.main

import tandem
from tandem.architectures import FAMILIES
from tandem.cli.app import app
from tandem.config.engine_config import FLAGS
from tandem.config.flags import unknown_flag
from tandem.config.foreign_flags import FOREIGN

ROOT = Path(__file__).parents[2]
USED = ("commands", "setup-gpu", "tuning", "quantisation", "upgrading", "troubleshooting")
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / f"{name}.md" for name in USED),
    *sorted((ROOT / "docs" / "models").glob("*.md")),
]  # fmt: skip
TEXT = {page: page.read_text() for page in PAGES}
SERVE_FLAGS = {s for f in FLAGS for s in f.spellings} | {"--plan-only", "--help", "--help-all"}
GROUP = typer.main.get_command(app)

COMMANDS = [
    each
    for c in GROUP.commands.values()
    for each in (c, *getattr(c, "commands", {}).values())  # type: ignore[attr-defined]
]
COMMAND_FLAGS = {s for c in (GROUP, *COMMANDS) for p in c.params for s in p.opts}


def code(text: str) -> str:
    """Fenced blocks, indented lines and `spans`."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.S)
    indented = re.findall(r"^    (.+)$", text, re.M)
    return "\n".join(
        [*fenced, *indented, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))]
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", code(TEXT[page]))) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    for words in re.findall(r"\bkt ([a-z]+(?: [a-z]+)?)", code(TEXT[page])):
        name, _, sub = words.partition(" ")
        assert name in GROUP.commands, words  # type: ignore[attr-defined]
        subcommands = getattr(GROUP.commands[name], "commands", None)  # type: ignore[attr-defined]
        assert not sub or subcommands is None or sub in subcommands, words


def test_flags_exist() -> None:
    for page in PAGES:
        for line in code(TEXT[page]).splitlines():
            known = SERVE_FLAGS if line.startswith("kt serve") else SERVE_FLAGS | COMMAND_FLAGS
            if line.strip().startswith(("kt ", "--")):
                assert set(re.findall(r"(?<!\S)--[a-z0-9-]+", line)) <= known, line


def test_every_flag_is_told() -> None:
    told = set(flags_in(TEXT[ROOT / "docs" / "commands.md"]))
    assert [f.spellings[0] for f in FLAGS if f.spellings[0] not in told] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT[page])
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_make_installs_what_a_build_without_isolation_needs() -> None:
    """scikit-build-core brings cmake and ninja itself, but only into an isolated build."""
    isolated = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    installed = re.search(r"build-tools:.*\n\t\$\(PIP\) install (.*)", (ROOT / "Makefile").read_text())
    assert isolated and installed
    names = {re.split(r"[>=]", word)[0] for word in re.findall(r"[\w.>=-]+", isolated[1])}
    assert {*names, "cmake", "ninja"} <= set(re.findall(r"[a-z-]{4,}", installed[1]))


def test_every_family_is_named() -> None:
    dense = {"llama"}
    listed = (ROOT / "docs" / "models.md").read_text()
    assert all(f"`{name}`" in listed for name in set(FAMILIES) - dense)


COMING_FROM = (ROOT / "docs" / "coming-from.md").read_text()


def test_flags_of_other_engines_are_answered_and_ours_exist() -> None:
    """docs/coming-from.md: what stands in its first column is ours, too, or answered with what to give."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", COMING_FROM, re.M)
    theirs, ours = ({f for row in rows for f in flags_in(row[side])} for side in (0, 1))
    elsewhere = {"--kl-divergence", "--interleave"}  # of other programs
    assert len(theirs) > 40 and theirs - SERVE_FLAGS - COMMAND_FLAGS - set(FOREIGN) == elsewhere
    assert len(ours) >= 10 and ours <= SERVE_FLAGS | COMMAND_FLAGS


def flags_in(cell: str) -> list[str]:
    return re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", " ".join(re.findall(r"`([^`]+)`", cell)))


def test_the_line_of_llama_cpp_is_answered_as_the_page_says() -> None:
    said = re.search(r"^    error: (.*)$", COMING_FROM, re.M)
    assert said and said[1] == unknown_flag("-c", [])


def test_python_example_uses_what_is_there() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT[ROOT / "README.md"], re.S)
    tree = ast.parse(example)
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names]
    assert names
    assert all(hasattr(tandem, name) for name in names)
