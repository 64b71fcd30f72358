"""What README.md and docs/ tell people to type exists: make targets, commands, flags, links, Python names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from page_lines import PAGES as EVERY_PAGE
from tandem.architectures import FAMILIES
from tandem.cli.app import app
from tandem.flags.engine_config import FLAGS, FORMER
from tandem.flags.foreign_flags import FOREIGN

ROOT = Path(__file__).parents[2]
OTHERS = ("coming-from.md", "backends.md", "containers.md", "several-gpus.md", "several-hosts.md", "files.md")  # …
INSIDE = ("design", "lab")  # which have flags of benchmarks/
PAGES = [page for page in EVERY_PAGE if page.name not in OTHERS and page.parent.name not in INSIDE]
TEXT = {page: page.read_text() for page in PAGES}
FORMER_FLAGS = {f"--{name.replace('_', '-')}" for name in FORMER}
SERVE_FLAGS = {s for f in FLAGS for s in f.spellings} | FORMER_FLAGS | {"--plan-only", "--help", "--help-all"}
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
    unlisted = {"llama", "glm5_next_text"}  # dense; inside glm5_next
    listed = (ROOT / "docs" / "models.md").read_text()
    assert all(f"`{name}`" in listed for name in set(FAMILIES) - unlisted)


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
