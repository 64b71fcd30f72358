"""`scripts/rename.py`: what a table does to code, strings and prose; twice is as once."""

from __future__ import annotations

import pytest

from repo_scripts import script_module

script = script_module("rename")
TABLE = script.read_table(
    """
# houses
module tandem.config.norm tandem.spec.norm
module tandem.config.old tandem.spec.new
module tandem.config.choices tandem.planner.choices
export tandem.config Norm tandem.spec.norm
export tandem.config Plan tandem.planner.plan
name spared reserved
"""
)


NORM, PLAN = "from tandem.spec.norm import Norm\n", "from tandem.planner.plan import Plan\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from tandem.config import Norm, Plan as P\n", NORM + PLAN.replace("Plan\n", "Plan as P\n")),
        ("    from tandem.config import Norm  # late\n", "    from tandem.spec.norm import Norm  # late\n"),
        ("from tandem.config import (\n    Norm,\n    Plan,\n)\n", NORM + PLAN),
        ("from tandem.config import norm\n", "from tandem.spec import norm\n"),
        ("from tandem.config.choices import cached\n", "from tandem.planner.choices import cached\n"),
        ("from tandem.config import old\n", "from tandem.spec import new as old\n"),
        ("import tandem.config.norm\n", "import tandem.spec.norm\n"),
        ('patch("tandem.config.norm.eps")\n', 'patch("tandem.spec.norm.eps")\n'),
        ("x = norm.spared + spared_bytes\n", "x = norm.reserved + spared_bytes\n"),
        ("from tandem.config import Other\n", "from tandem.config import Other\n"),
        ("import tandem.config.normal\n", "import tandem.config.normal\n"),
    ],
)  # fmt: skip
def test_code(before: str, after: str) -> None:
    indented = f"if True:\n{before}" if before.startswith(" ") else before
    expected = f"if True:\n{after}" if before.startswith(" ") else after
    assert script.renamed(indented, TABLE, python=True) == expected
    assert script.renamed(expected, TABLE, python=True) == expected


def test_paths_in_prose() -> None:
    text = "See `config/norm.py`, config/choices/cached.py and tests/config/norm.py or ~/.config/norm.py."
    expected = "See `spec/norm.py`, planner/choices/cached.py and tests/config/norm.py or ~/.config/norm.py."
    assert script.renamed(text, TABLE, python=False) == expected


def test_a_line_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="not a line of a table: move a b"):
        script.read_table("move a b")


@pytest.mark.parametrize(
    ("line", "path", "before", "after"),
    [
        ("word fold update src/a/", "src/a/b.py", "fold = x.fold  # fold\n", "update = x.update  # update\n"),
        ("word fold update src/a/", "src/b.py", "fold = 1\n", "fold = 1\n"),
        ("code row line", "a.py", 'row = f"{row} row {x.row}"  # a row\n', 'line = f"{line} row {x.line}"  # a row\n'),
        ("code row line", "a.py", '"""A row: `row`."""\nrow(\n row=1)\n', '"""A row: `line`."""\nline(\n line=1)\n'),
        ("code row line", "a.py", 'x = {"row": "a row"}\n', 'x = {"line": "a row"}\n'),
        ("text '--two rows' --row-count\nname rows lines", "a.md", "--two rows rows\n", "--row-count lines\n"),
        ("code row line", "a.cc", 'row = r.row;  // a row\nf("a row", "\\"", row);\n',
         'line = r.line;  // a row\nf("a row", "\\"", line);\n'),
        ("code row line", "a.md", "A row of `x.row`; `rows`.\n", "A row of `x.line`; `rows`.\n"),
    ],
)
def test_words_of_some_files_and_of_code(line: str, path: str, before: str, after: str) -> None:
    table = script.read_table(line)
    assert script.renamed(before, table, path.endswith(".py"), path) == after
    assert script.renamed(after, table, path.endswith(".py"), path) == after


TWO_IMPORTS = """
def f() -> None:
    from rich import Row as R
    from tandem.a import {0}

    {0}


def g() -> None:
    from tandem.a.b import Row

    Row
"""


def test_a_class_is_renamed_where_it_is_imported() -> None:
    before = {
        "tandem.a": "class Row:\n    Row2 = 1\n\n\ndef f() -> list[Row]: ...\n",
        "tandem.a.b": "class Row:\n    pass\n",
        "tandem": "from tandem.a import Row as Row\n",
        "tests.w": "import tandem.a as b\nb.Row\n",
        "tests.x": 'from tandem import a, Row\na.Row; Row; x.Row; "tandem.a.Row"; setattr(a, "Row", 1)\n',
        "tests.y": "from tandem.a.b import Row\nfrom tandem.a import Row as Other\nRow, Other\n",
        "tests.z": TWO_IMPORTS.format("Row"),
    }
    after = {
        "tandem.a": "class Line:\n    Row2 = 1\n\n\ndef f() -> list[Line]: ...\n",
        "tandem.a.b": before["tandem.a.b"],
        "tandem": "from tandem.a import Line as Line\n",
        "tests.w": "import tandem.a as b\nb.Line\n",
        "tests.x": 'from tandem import a, Line\na.Line; Line; x.Row; "tandem.a.Line"; setattr(a, "Line", 1)\n',
        "tests.y": "from tandem.a.b import Row\nfrom tandem.a import Line as Other\nRow, Other\n",
        "tests.z": TWO_IMPORTS.format("Line"),
    }
    classes = script.read_table("class tandem.a Row Line").classes
    assert script.with_classes(before, classes) == after
    assert script.with_classes(after, classes) == after


def test_files_that_have_old_words_for_a_reason_are_left_alone() -> None:
    assert script.read_table("leave a.py b.md\nname x y").left_alone == ["a.py", "b.md"]
