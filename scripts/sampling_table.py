"""The table of sampling parameters in docs/http.md, made from `engine/sampling/parameters.py`.

    PYTHONPATH=src python scripts/sampling_table.py --check   # exit code 1 where the page says something else
    PYTHONPATH=src python scripts/sampling_table.py --write
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

from tandem.engine.sampling.parameters import Bounds, Dialect, Row, recommended, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "http.md"
BEGIN, END = "<!-- sampling: scripts/sampling_table.py writes this -->", "<!-- /sampling -->"


def lines() -> str:
    head = ["parameter", "default", "range", "computed", *(f"`{d}`" if d.startswith("/") else d for d in Dialect)]
    rows = [head, ["---"] * len(head), *map(_cells, table().values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(row: Row) -> list[str]:
    mark = "†" if row.name in recommended() else ""
    names = (row.parameter.name_in(d, row.name) if d in row.parameter.dialects else "" for d in Dialect)
    cells = (("✓" if name == row.name else f"`{name}`") if name else "" for name in names)
    return [f"`{row.name}`{mark}", _default(row), _range(row.parameter.range), row.parameter.place, *cells]


def _default(row: Row) -> str:
    nothing = row.default is None or not isinstance(row.default, bool | int | float)
    return "–" if nothing else str(row.default).lower() if isinstance(row.default, bool) else f"{row.default:g}"


def _range(bounds: Bounds | None) -> str:
    if bounds is None:
        return ""
    lowest = "−2⁶³" if bounds.lowest == -(2**63) else f"{bounds.lowest:g}".replace("-", "−")
    powers = {float(2**64 - 1): "2⁶⁴ − 1", float(2**31): "2³¹"}
    if bounds.highest == math.inf:
        return f"{'≥' if bounds.inclusive else '>'} {lowest}"
    highest = powers.get(float(bounds.highest), f"{bounds.highest:g}")
    return f"{lowest} to {highest}" if bounds.inclusive else f"above {lowest}, to {highest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    write = parser.parse_args().write
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    after = pattern.sub(lambda _: f"{BEGIN}\n{lines()}\n{END}", text)
    if write:
        PAGE.write_text(after, encoding="utf-8")
    elif after != text:
        sys.exit(f"{PAGE} is not what the table says: {__file__} --write")


if __name__ == "__main__":
    main()
