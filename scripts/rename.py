"""Renames modules and names all over the checkout, by a table that is kept: open work can be renamed, too.

    python scripts/rename.py scripts/renames/houses.txt

Lines of a table:

    module tandem.config.norm tandem.spec.norm   moves a file or folder, and what names it: imports, strings, paths
                                                 such as `config/norm.py` in prose
    export tandem.config Norm tandem.spec.norm   where a name of a package that goes away lives
    name spared reserved                         a word of code

A table may be run again: what has been renamed is left alone. `ruff check --fix --select I` sorts imports.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".cc", ".h", ".cu", ".sh", ".txt", ".cmake"}
LEFT_ALONE = "scripts/rename", "tests/test_rename.py", "CHANGELOG.md", "benchmarks/results/", "docs/lab/"  # what was


class Table(NamedTuple):
    modules: dict[str, str]
    exports: dict[tuple[str, str], str]  # package and name: module
    names: dict[str, str]


def read_table(text: str) -> Table:
    """Raises ValueError with the line that it cannot read."""
    table = Table({}, {}, {})
    for line in text.splitlines():
        match line.split():
            case [] | ["#", *_]:
                continue
            case ["module", old, new]:
                table.modules[old] = new
            case ["export", package, name, module]:
                table.exports[package, name] = module
            case ["name", old, new]:
                table.names[old] = new
            case _:
                raise ValueError(f"not a line of a table: {line}")
    return table


def renamed(text: str, table: Table, python: bool) -> str:
    """A file's text with the table applied."""
    if python:
        text = _with_imports(text, table)
    for old, new in sorted(table.modules.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text)
        text = re.sub(rf"(?:(?<=tandem/)|(?<![\w./-])){_path(old)}(?=\.py\b|/)", _path(new), text)
    for old, new in table.names.items():
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
    return text


def _path(module: str) -> str:
    return module.removeprefix("tandem.").replace(".", "/")


def _with_imports(text: str, table: Table) -> str:
    """`from package import name` where the name is a module that moves, or lives elsewhere from now on."""
    packages = {old.rpartition(".")[0] for old in table.modules} | {package for package, _ in table.exports}
    lines = text.splitlines(keepends=True)
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module in packages
    ]
    for node in sorted(nodes, key=lambda each: -each.lineno):
        indent, end = " " * node.col_offset, node.end_lineno or node.lineno
        _, hash_sign, words = lines[end - 1].partition("#")
        comment = f"  #{words.rstrip()}" if hash_sign else ""
        lines[node.lineno - 1 : end] = [f"{indent}{line}{comment}\n" for line in _imports(node, table)]
    return "".join(lines)


def _imports(node: ast.ImportFrom, table: Table) -> Iterator[str]:
    for alias in node.names:
        as_name = f" as {alias.asname}" if alias.asname else ""
        full = f"{node.module}.{alias.name}"
        home = table.exports.get((node.module or "", alias.name))
        if home is None and full in table.modules:
            home = table.modules[full].rpartition(".")[0]
        yield f"from {home or node.module} import {alias.name}{as_name}"


def files() -> Iterable[Path]:
    known = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in known.stdout.splitlines():
        path = ROOT / name
        if path.suffix in SUFFIXES and not name.startswith(LEFT_ALONE) and path.is_file():
            yield path


def move(old: str, new: str) -> None:
    """A module's file, or a package's folder."""
    for suffix in (".py", ""):
        source, target = (SOURCE / f"{module.replace('.', '/')}{suffix}" for module in (old, new))
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", str(source), str(target)], cwd=ROOT, check=True)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    table = read_table(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for old, new in table.modules.items():
        move(old, new)
    for path in files():
        text = path.read_text(encoding="utf-8")
        after = renamed(text, table, path.suffix == ".py")
        if after != text:
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
