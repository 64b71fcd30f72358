"""`make docs`: the site is built strictly, has every page, looks as on GitHub, and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from markdown_it import MarkdownIt

from repo_scripts import script_module

ROOT = Path(__file__).parents[2]
BLOCKS = ("li", "tr", "table", "pre", "h2", "h3", "blockquote", "img")
needs_zensical = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="the site needs Zensical: make docs installs it"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("docs_site")


@pytest.fixture(scope="module")
def site(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with pages/ and site/."""
    out = tmp_path_factory.mktemp("docs")
    script.stage(out)
    assert script.build(out) == 0
    return out


def pages_of(out: Path) -> list[Path]:
    return sorted(path.relative_to(out / "pages") for path in (out / "pages").rglob("*.md"))


def html_of(page: Path) -> Path:
    return page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")


def listed(entry: object) -> list[str]:
    """Pages of a navigation, of which every part may have parts."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in listed(part)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_once(script: ModuleType, tmp_path: Path) -> None:
    script.stage(tmp_path)
    settings = tomllib.loads((tmp_path / "zensical.toml").read_text(encoding="utf-8"))
    there = sorted(page.as_posix() for page in pages_of(tmp_path) if page.parts[0] != "files")
    assert sorted(listed(settings["project"]["nav"])) == there


def test_links_that_leave_the_documents_lead_to_copies(script: ModuleType, tmp_path: Path) -> None:
    script.stage(tmp_path)
    start = (tmp_path / "pages" / "index.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", start)
    assert "files/LICENSE" in links and "files/benchmarks/results/index.md" in links and "tuning.md" in links
    assert [link for link in links if not (tmp_path / "pages" / link).exists()] == []
    deeper = (tmp_path / "pages" / "structure.md").read_text(encoding="utf-8")
    assert "](contributing.md#a-new-model-family)" in deeper and "](design/experts.md)" in deeper


@pytest.mark.full
@needs_zensical
@pytest.mark.parametrize("link", ["[gone](gone.md)", "[no heading](commands.md#no-such-heading)"])
def test_a_link_that_leads_nowhere_is_named(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    script.stage(tmp_path)
    page = tmp_path / "pages" / "tuning.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n{link}\n", encoding="utf-8")
    assert script.build(tmp_path) != 0
    assert "tuning.md" in capsys.readouterr().err


class Blocks(HTMLParser):
    """Counts blocks of an article, and notes what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.fetched: list[str] = []
        self._within = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within |= tag == "article"
        if self._within and tag in BLOCKS:
            self.counts[tag] += 1
        if tag != "a":
            self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset") and value]

    def handle_endtag(self, tag: str) -> None:
        self._within &= tag != "article"


def blocks(html: str) -> Blocks:
    found = Blocks()
    found.feed(html)
    return found


@pytest.mark.full
@needs_zensical
def test_pages_have_the_blocks_that_github_shows(site: Path) -> None:
    """Python-Markdown takes some lists and tables for text where CommonMark does not."""
    markdown = MarkdownIt("commonmark").enable("table")
    for page in pages_of(site):
        source = (site / "pages" / page).read_text(encoding="utf-8")
        shown = blocks((site / "site" / html_of(page)).read_text(encoding="utf-8"))
        assert shown.counts == blocks(f"<article>{markdown.render(source)}").counts, page


@pytest.mark.full
@needs_zensical
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Scripts of the theme have addresses of what these pages do not use, such as Mermaid."""
    elsewhere = re.compile(r"^(?:https?:)?//")
    for page in (site / "site").rglob("*.html"):
        fetched = blocks(page.read_text(encoding="utf-8")).fetched
        assert fetched and not list(filter(elsewhere.match, fetched)), page
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8")
    for sheet in (site / "site").rglob("*.css"):
        addresses = re.findall(
            r"url\(['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)", sheet.read_text(encoding="utf-8")
        )
        assert not [each for pair in addresses for each in pair if elsewhere.match(each)], sheet
