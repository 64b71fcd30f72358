"""`scripts/rename.py`: what a table does to code, strings and prose; twice is as once."""

from __future__ import annotations

import pytest

from repo_scripts import script_module

script = script_module("rename")
TABLE = script.read_table(
    """
# houses
module tandem.config.norm tandem.spec.norm
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
