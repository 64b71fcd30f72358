"""`compare_quantisations`: the GGUF files of one model beside each other: memory, speed, and what rounding costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.compare import ComparedPlan, compared_plan

KNOWN_FILE = Path(__file__).parents[2] / "data" / "demo_quality.json"
"""{format: {kl, kl_error, same_top}} of the demo model's experts; scripts/quality_table.py writes it."""
UNROUNDED = ("f32", "f16", "bf16")
INT8_ACTIVATIONS = " A8"  # behind a format's name in that file: activations are rounded, too


@dataclass(frozen=True, slots=True)
class Quantisation:
    """One of a model's GGUF files, whole: its bytes, what its experts' types are, and its plan on the machine. kl:
    nats, a mean over the experts' types weighed by their weights, as they cost the demo model; None: not known."""

    name: str
    file_bytes: int
    types: str
    plan: ComparedPlan
    kl: float | None = None

    @property
    def fits(self) -> bool:
        return self.plan.decode is not None


def compare_quantisations(files: Iterable[tuple[str, int, PlanQuestion]]) -> list[Quantisation]:
    """files: (name, bytes, question) of each. The largest file first."""
    rows = [
        Quantisation(name, nbytes, question.stored.experts.name, compared_plan(question), known_kl(question))
        for name, nbytes, question in files
    ]
    return sorted(rows, key=lambda row: (-row.file_bytes, row.name))


def known_kl(question: PlanQuestion) -> float | None:
    """KL of the experts as they are stored; None where one of their types was not measured."""
    total, shares = 0.0, question.stored.experts.shares
    for name, share in shares:
        figures = figures_of(name)
        if figures is None:
            return None
        total += share * figures["kl"]
    return total if shares else None


def figures_of(name: str, int8_activations: bool = False) -> dict[str, float] | None:
    """{kl, kl_error, same_top} of the demo model with experts in this format; None: not measured."""
    if name.lower() in UNROUNDED and not int8_activations:
        return dict.fromkeys(("kl", "kl_error"), 0.0) | {"same_top": 1.0}
    return known_figures().get(name.upper() + (INT8_ACTIVATIONS if int8_activations else ""))


@cache
def known_figures() -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = json.loads(KNOWN_FILE.read_text(encoding="utf-8"))
    return figures


def as_dict(row: Quantisation) -> dict[str, object]:
    """For JSON."""
    return dataclasses.asdict(row) | {"fits": row.fits}
