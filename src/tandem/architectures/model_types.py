"""Which model types run, and how: a table that `scripts/model_table.py` made by running each of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

TABLE_FILE = Path(__file__).parents[1] / "data" / "models.json"

How = Literal["native", "paged", "alone", "refused"]


@dataclass(frozen=True, slots=True)
class Runs:
    """how: "native", by code of ours; by Transformers' modules "paged", or "alone", one sequence at a time; or
    "refused". why: of the last two."""

    model_type: str
    how: How
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Table:
    """transformers: the version whose types these are."""

    transformers: str
    rows: tuple[Runs, ...]

    def row(self, model_type: str) -> Runs | None:
        return next((row for row in self.rows if row.model_type == model_type), None)


def read_table() -> Table:
    found = json.loads(TABLE_FILE.read_text())
    return Table(found["transformers"], tuple(Runs(**row) for row in found["types"]))
