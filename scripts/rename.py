"""Renames modules and names all over the checkout, by a table that is kept: open work can be renamed, too.

    python scripts/rename.py scripts/renames/houses.txt

Lines of a table:

    module tandem.config.norm tandem.spec.norm   moves a file or folder, and what names it: imports, strings, paths
                                                 such as `config/norm.py` in prose
    export tandem.config Norm tandem.spec.norm   where a name of a package that goes away lives
    text --spared --reserved                     what stands anywhere so: flags, quoted phrases
    name spared reserved                         a word of code
    word fold update src/tandem/engine/ tests/   the same, of files whose path begins so
    code guess draft                             the same, of names in Python, and of strings that are nothing else; in
                                                 comments and documents where it stands in backticks; in C++ outside
                                                 comments and strings
    file csrc/ops/a csrc/ops/b                   moves `a.h` and `a.cc`; text lines name them anew
    leave docs/upgrading.md                      files that have the old words for a reason
    class tandem.bench.serve Row ServeRow        what a module has of that name, and what is imported from there

Words and texts are applied in their order. A table may be run again: what has been renamed is left alone.
`ruff check --fix --select I` sorts imports.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".cc", ".h", ".cu", ".sh", ".txt", ".cmake"}
C_SUFFIXES = ".cc", ".h", ".cu"
LEFT_ALONE = "scripts/rename", "tests/test_rename.py", "CHANGELOG.md", "benchmarks/results/", "docs/lab/"  # what was


class Table(NamedTuple):
    modules: dict[str, str]
    exports: dict[tuple[str, str], str]  # package and name: module
    words: list[Word]
    classes: dict[tuple[str, str], str]  # module and name: the new name
    left_alone: list[str]
    files: dict[str, str]  # of C++, without their endings


class Word(NamedTuple):
    """paths: beginnings of those of the files; none: all files."""

    kind: str  # word, code: names of Python alone, or text
    old: str
    new: str
    paths: tuple[str, ...]

    def applies(self, path: str) -> bool:
        return not self.paths or path.startswith(self.paths)


def read_table(text: str) -> Table:
    """Raises ValueError with the line that it cannot read."""
    table = Table({}, {}, [], {}, [], {})
    for line in text.splitlines():
        match shlex.split(line, comments=True):
            case [] | ["#", *_]:
                continue
            case ["module", old, new]:
                table.modules[old] = new
            case ["export", package, name, module]:
                table.exports[package, name] = module
            case ["name", old, new]:
                table.words.append(Word("word", old, new, ()))
            case ["leave", *paths]:
                table.left_alone.extend(paths)
            case ["word" | "code" | "text" as kind, old, new, *paths]:
                table.words.append(Word(kind, old, new, tuple(paths)))
            case ["file", old, new]:
                table.files[old] = new
            case ["class", module, old, new]:
                table.classes[module, old] = new
            case _:
                raise ValueError(f"not a line of a table: {line}")
    return table


def renamed(text: str, table: Table, python: bool, path: str = "") -> str:
    """A file's text with the table applied, except its classes."""
    if python:
        text = _with_imports(text, table)
    for old, new in sorted(table.modules.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w])", new, text)
        text = re.sub(rf"(?:(?<=tandem/)|(?<![\w./-])){_path(old)}(?=\.py\b|/)", _path(new), text)
    for word in table.words:
        if word.applies(path):
            text = _with_word(text, word, python, path)
    return text


def _with_word(text: str, word: Word, python: bool, path: str) -> str:
    if word.kind == "text":
        return text.replace(word.old, word.new)
    if word.kind == "code" and path.endswith(C_SUFFIXES):
        return _with_c_code(text, word)
    return _with_code(text, word, python) if word.kind == "code" else _replaced(text, word.old, word.new)


def _with_c_code(text: str, word: Word) -> str:
    """C++ with a name replaced: a comment or a string is matched whole, and stays."""
    parts = rf'//[^\n]*|"(?:\\.|[^"\\\n])*"|(?<!\w){re.escape(word.old)}(?!\w)'
    return re.sub(parts, lambda part: word.new if part[0] == word.old else part[0], text)


def _replaced(text: str, old: str, new: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)


def _with_code(text: str, word: Word, python: bool) -> str:
    def in_backticks(found: re.Match[str]) -> str:
        return _replaced(found[0], word.old, word.new)

    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", in_backticks, text)
    if not python:
        return text
    text = re.sub(rf"([\"'])(?<!\w){re.escape(word.old)}\1", rf"\g<1>{word.new}\g<1>", text)
    return _with_tokens(text, lambda token, *_: word.new if token == word.old else token)


NewName = Callable[[str, bool, int], str]
"""The new name of a name; whether a dot stands before it, and its line."""


def _with_tokens(text: str, new_name: NewName) -> str:
    """Python with its names replaced, those within f-strings, too."""
    lines, changes, before = text.splitlines(keepends=True), [], ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            changes.append((token.start, token.end, new_name(token.string, before == ".", token.start[0])))
        elif token.type == tokenize.STRING and re.match(r"[rR]?[fF]", token.string):
            changes.append((token.start, token.end, _formatted(token.string, new_name, token.start[0])))
        before = token.string
    for (row, column), (last_row, last_column), new in reversed(changes):
        tail = lines[last_row - 1][last_column:]
        lines[row - 1 : last_row] = [lines[row - 1][:column] + new + tail]
    return "".join(lines)


def _formatted(text: str, new_name: NewName, line: int) -> str:
    def in_braces(found: re.Match[str]) -> str:
        return re.sub(r"(\.?)\b([A-Za-z_]\w*)", lambda name: name[1] + new_name(name[2], bool(name[1]), line), found[0])

    return re.sub(r"\{[^{}]+\}", in_braces, text)


def with_classes(texts: dict[str, str], classes: dict[tuple[str, str], str]) -> dict[str, str]:
    """Python files by module, with what `classes` renames: where it is made, imported, and named by its module."""
    trees = {module: ast.parse(text) for module, text in texts.items()}
    homes = dict(classes)
    while more := {
        (module, alias.asname or alias.name): homes[source, alias.name]
        for module, tree in trees.items()
        for source, alias in _from_imports(tree)
        if (source, alias.name) in homes and alias.asname in (None, alias.name)
    }.items() - homes.items():
        homes.update(more)
    return {module: _with_homes(text, module, trees[module], homes) for module, text in texts.items()}


def _from_imports(tree: ast.AST) -> Iterator[tuple[str, ast.alias]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias) for alias in node.names)


def _with_homes(text: str, module: str, tree: ast.Module, homes: dict[tuple[str, str], str]) -> str:
    own = {old: new for (home, old), new in homes.items() if home == module}
    elsewhere = _lines_of_other_imports(tree, homes)
    scopes = [(scope, local) for scope in _scopes(tree) if (local := _local_names(scope, homes, set(own)))]
    imported = {a.name: homes[s, a.name] for s, a in _from_imports(tree) if (s, a.name) in homes and a.asname}
    modules = {a.asname or a.name: f"{s}.{a.name}" for s, a in _from_imports(tree)}
    modules |= {
        a.asname: a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names if a.asname
    }
    by_module = {
        (name, old): new for (home, old), new in homes.items() for name, full in modules.items() if full == home
    }
    for (home, old), new in homes.items():  # strings, as patches have them
        text = text.replace(f'"{home}.{old}"', f'"{home}.{new}"').replace(f'"{home}.{old}.', f'"{home}.{new}.')
    for (name, old), new in by_module.items():
        text = re.sub(rf"(?<![\w.]){name}\.{old}\b", f"{name}.{new}", text)
        text = re.sub(rf'(attr\(\s*{name}, )"{old}"', rf'\1"{new}"', text)
    for old, new in own.items():
        text = re.sub(rf"`{old}\b", f"`{new}", text)
        text = re.sub(rf'(?ms)^(__all__ = \[[^\]]*)"{old}"', rf'\1"{new}"', text)
    for old, new in imported.items():
        text = re.sub(rf"\b{old} as ", f"{new} as ", text)

    def new_name(name: str, dotted: bool, line: int) -> str:
        if dotted or name not in own or (line, name) in elsewhere:
            return name
        inner = (local[name] for scope, local in scopes if scope.lineno <= line <= _end(scope) and name in local)
        return next(inner, own[name])

    return _with_tokens(text, new_name) if own else text


def _lines_of_other_imports(tree: ast.Module, homes: dict[tuple[str, str], str]) -> set[tuple[int, str]]:
    return {
        (alias.lineno, alias.name) for source, alias in _from_imports(tree) if (source, alias.name) not in homes
    }


def _end(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return scope.end_lineno or scope.lineno


def _scopes(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _local_names(scope: ast.AST, homes: dict[tuple[str, str], str], names: set[str]) -> dict[str, str]:
    """New names of those that a function imports for itself, perhaps from elsewhere than the file does."""
    return {
        alias.asname or alias.name: homes.get((source, alias.name), alias.asname or alias.name)
        for source, alias in _from_imports(scope)
        if (alias.asname or alias.name) in names
    }


def _path(module: str) -> str:
    return module.removeprefix("tandem.").replace(".", "/")


def _with_imports(text: str, table: Table) -> str:
    """`from package import name` where the name is a module that moves, or lives elsewhere from now on."""
    lines = text.splitlines(keepends=True)
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and _moves(node, table)
    ]
    for node in sorted(nodes, key=lambda each: -each.lineno):
        indent, end = " " * node.col_offset, node.end_lineno or node.lineno
        _, hash_sign, words = lines[end - 1].partition("#")
        comment = f"  #{words.rstrip()}" if hash_sign else ""
        lines[node.lineno - 1 : end] = [f"{indent}{line}{comment}\n" for line in _imports(node, table)]
    return "".join(lines)


def _moves(node: ast.ImportFrom, table: Table) -> bool:
    each = ((node.module or "", alias.name) for alias in node.names)
    return any(name in table.exports or ".".join(name) in table.modules for name in each)


def _imports(node: ast.ImportFrom, table: Table) -> Iterator[str]:
    for alias in node.names:
        as_name = f" as {alias.asname}" if alias.asname else ""
        full = f"{node.module}.{alias.name}"
        home, name = table.exports.get((node.module or "", alias.name), node.module), alias.name
        if full in table.modules:
            home, _, name = table.modules[full].rpartition(".")
        if name != alias.name and not as_name:
            as_name = f" as {alias.name}"
        yield f"from {home} import {name}{as_name}"


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
        git_move(source, target)


def git_move(source: Path, target: Path) -> None:
    if source.exists() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(source), str(target)], cwd=ROOT, check=True)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    table = read_table(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for old, new in table.modules.items():
        move(old, new)
    for old, new in table.files.items():
        for suffix in C_SUFFIXES:
            git_move(ROOT / f"{old}{suffix}", ROOT / f"{new}{suffix}")
    for path in files():
        if path.relative_to(ROOT).as_posix() in table.left_alone:
            continue
        text = path.read_text(encoding="utf-8")
        after = renamed(text, table, path.suffix in (".py", ".pyi"), path.relative_to(ROOT).as_posix())
        if after != text:
            path.write_text(after, encoding="utf-8")
    rename_classes(table.classes)


def rename_classes(classes: dict[tuple[str, str], str]) -> None:
    paths = {module_of(path): path for path in files() if path.suffix == ".py"} if classes else {}
    texts = {module: path.read_text(encoding="utf-8") for module, path in paths.items()}
    for module, text in with_classes(texts, classes).items():
        if text != texts[module]:
            paths[module].write_text(text, encoding="utf-8")


def module_of(path: Path) -> str:
    """The name by which others import it: that of the folder, of a package."""
    relative = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT).with_suffix("")
    if relative.parts[:2] == ("tests", "support"):  # these folders are on the path
        return relative.name
    return ".".join(part for part in relative.parts if part != "__init__")


if __name__ == "__main__":
    main()
