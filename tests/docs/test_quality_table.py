"""docs/quality.md's table by format is that of the rows. After a change: python scripts/quality_table.py --write"""

from __future__ import annotations

import json
import re
from types import ModuleType

from repo_scripts import script_module
from tandem.bench.known_quality import quality_lines

script: ModuleType = script_module("quality_table")


def test_the_table_is_that_of_the_newest_rows() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(page) == page
    rows = script.rows_kept()
    assert {row["what"] for row in rows} >= {
        script.UNROUNDED,
        "2 late experts",
        "`--kt-method INT4`",
        *script.STORED,
    }
    assert len({row["tokens"] for row in rows}) == len({row["reference_perplexity"] for row in rows}) == 1


def test_what_kt_bench_decode_says_is_in_the_table() -> None:
    known = json.loads(script.DEMO_FILE.read_text(encoding="utf-8"))
    assert known == script.of_methods() and {"INT8", "INT4", "Q4_K", "Q2_K", "MXFP4"} <= set(known)
    (int4,) = quality_lines("demo", True, ["BF16", "int4"])
    assert f"KL {known['INT4']['kl']:.4f} ± " in int4 and f"{known['INT4']['same_top']:.1%}" in int4
    (other,) = quality_lines("org/name", False, ["INT4"])
    assert "kt quality org/name --format INT4 measures it" in other
    assert list(quality_lines("demo", True, ["BF16"])) == []


def test_what_the_page_says_of_a_row_is_in_the_table() -> None:
    """92 %, every twelfth token, 2 % less likely: INT4's."""
    page = script.PAGE.read_text(encoding="utf-8")
    (row,) = (row for row in script.rows_kept() if row["what"] == "`--kt-method INT4`")
    (percent,) = re.findall(r"at (\d+) %, greedy answers", page)
    assert round(100 * row["same_top"]) == int(percent) and round(1 / (1 - row["same_top"])) in (12, 13)
    assert round(row["kl"], 2) == 0.02
