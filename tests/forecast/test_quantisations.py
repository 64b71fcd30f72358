"""KL of a GGUF file, as far as rounding to its experts' types was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import MODEL, machine
from tandem.flags.engine_config import EngineConfig
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.quantisations import compare_quantisations, known_figures, known_kl
from tandem.planner.forecast.speeds import Speeds
from tandem.spec.stored import StoredFormat, StoredFormats


def question(*shares: tuple[str, float], bytes_per_weight: float = 2.0) -> PlanQuestion:
    name = " + ".join(each for each, _ in shares)
    experts = StoredFormat(name, bytes_per_weight=bytes_per_weight, quantised=True, shares=shares, methods=("GGUF",))
    stored = replace(StoredFormats(), experts=experts)
    return PlanQuestion(EngineConfig(model="m"), MODEL, machine(), stored, Speeds())


def test_types_are_weighed_by_their_weights() -> None:
    kl = {name: figures["kl"] for name, figures in known_figures().items()}
    assert known_kl(question(("q4_k", 0.75), ("q6_k", 0.25))) == pytest.approx(0.75 * kl["Q4_K"] + 0.25 * kl["Q6_K"])
    assert known_kl(question(("bf16", 1.0))) == 0.0
    assert known_kl(question(("q2_k", 0.5), ("f16", 0.5))) == pytest.approx(kl["Q2_K"] / 2)


def test_a_type_that_was_not_measured_is_not_estimated() -> None:
    assert known_kl(question(("q4_k", 0.9), ("a new type", 0.1))) is None
    assert known_kl(question()) is None


def test_the_largest_file_comes_first_and_all_are_planned() -> None:
    small, large = (question(("q2_k", 1.0), bytes_per_weight=0.33), question(("q8_0", 1.0), bytes_per_weight=1.06))
    rows = compare_quantisations([("m:Q2_K", 5, small), ("m:Q8_0", 9, large)])
    assert [row.name for row in rows] == ["m:Q8_0", "m:Q2_K"] and all(row.fits for row in rows)
    assert rows[0].plan.ram_bytes > rows[1].plan.ram_bytes and rows[0].kl < rows[1].kl  # type: ignore[operator]
