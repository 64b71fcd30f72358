"""`make docs`: the site of docs/, README.md, CHANGELOG.md and CONTRIBUTING.md, built by Zensical, strictly.

    python scripts/docs_site.py --out build/docs    # the site is then in build/docs/site

Links are written as GitHub wants them. The pages are copied first, and their links turned to what the site has: a file
that is no page is copied beside them, and a folder becomes a page with its files. Exit code 1: a link leads nowhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETTINGS = DOCS / "zensical.toml"
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
TIGHT_LIST = re.compile(
    r"^(\*\*.+)\n(?=\d+\. )", re.M
)  # GitHub knows it for a list, Python-Markdown does not
FOLDER = re.compile(r'"([\w-]+)/\*\.md"(?=[\],])')
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Staged:
    """The folder that Zensical reads. `add` takes a file or folder of the repository and says where it lies there."""

    def __init__(self, pages: Path) -> None:
        self._pages = pages
        self._waiting: list[Path] = []
        self._places: dict[Path, Path] = {}

    def add(self, source: Path) -> Path:
        """Its path below the pages' folder."""
        if source not in self._places:
            self._places[source] = _place(source)
            self._waiting.append(source)
        return self._places[source]

    def write(self) -> None:
        """All that was added, and all that those link to."""
        while self._waiting:
            source = self._waiting.pop()
            target = self._pages / self._places[source]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                target.write_text(self._listing(source), encoding="utf-8")
            elif source.suffix == ".md":
                target.write_text(self._page(source), encoding="utf-8")
            else:
                shutil.copyfile(source, target)

    def _page(self, source: Path) -> str:
        """With the site's links. What leads nowhere stays, for Zensical to name."""

        def turned(link: re.Match[str]) -> str:
            target = (source.parent / link[2]).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                return link[0]
            return f"{link[1]}{self._path_between(source, target)}{link[3] or ''})"

        return TIGHT_LIST.sub(r"\1\n\n", LINK.sub(turned, source.read_text(encoding="utf-8")))

    def _listing(self, folder: Path) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        lines = [f"* [{path.relative_to(folder)}]({self._path_between(folder, path)})" for path in files]
        return "\n".join([f"# {folder.relative_to(ROOT)}", "", *lines, ""])

    def _path_between(self, source: Path, target: Path) -> str:
        place = self.add(target)
        return Path(os.path.relpath(place, self._places[source].parent)).as_posix()


def _place(source: Path) -> Path:
    path = source.relative_to(ROOT)
    if source.is_dir():
        return Path("files", path, "index.md")
    if path.as_posix() in ROOT_PAGES:
        return Path(ROOT_PAGES[path.as_posix()])
    return path.relative_to("docs") if path.is_relative_to("docs") else Path("files", path)


def settings() -> str:
    """Zensical's, with the pages of each folder that the navigation names."""
    return FOLDER.sub(lambda named: ", ".join(_pages(named[1])), SETTINGS.read_text(encoding="utf-8"))


def _pages(folder: str) -> list[str]:
    names = sorted(
        (path.name for path in (DOCS / folder).glob("*.md")), key=lambda name: (name != "README.md", name)
    )
    return [f'"{folder}/{name}"' for name in names]


def stage(out: Path) -> None:
    """Empties `out`, and writes what Zensical reads into it."""
    shutil.rmtree(out, ignore_errors=True)
    staged = Staged(out / "pages")
    sources = [*(ROOT / name for name in ROOT_PAGES), *(path for path in DOCS.rglob("*") if path.is_file())]
    for source in sources:
        if source != SETTINGS:
            staged.add(source)
    staged.write()
    (out / SETTINGS.name).write_text(settings(), encoding="utf-8")


def build(out: Path) -> int:
    """Zensical's exit code. Its report names the page, the line and what is wrong."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(COLOURS.sub("", done.stdout).partition("Traceback")[0], file=sys.stderr)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    out = parser.parse_args().out.resolve()
    stage(out)
    code = build(out)
    if code == 0:
        print(f"{out / 'site' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
