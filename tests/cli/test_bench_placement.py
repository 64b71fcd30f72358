"""`kt bench experts`: simulated rows, what is refused, and the dimensions that models are known by."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tandem.bench.architectures import CONFIGS, named_config
from tandem.bench.placement.request import PlacementFlags, numbers, traffic
from tandem.bench.placement.simulated import simulated_rows, step_cost
from tandem.bench.placement.traces import TraceShape, Zipf, expert_counts, generate
from tandem.cli.app import app
from tandem.errors import ConfigError

REQUEST = PlacementFlags(
    "qwen3-512e", "zipf", (0.1, 0.5), ("uniform", "frequency", "dynamic"), "INT4", 4, 300, 21, gpu_step_ms=0.2
)


def test_the_simulated_sweep_orders_the_strategies_and_says_simulated() -> None:
    rows = list(simulated_rows(REQUEST))
    assert [(r["gpu_share"], r["strategy"]) for r in rows] == [
        (share, strategy) for share in (0.1, 0.5) for strategy in REQUEST.strategies
    ]
    assert {r["bench"] for r in rows} == {"experts_simulated"}
    for uniform, frequency, dynamic in (rows[:3], rows[3:]):
        assert dynamic["tok_s"] > frequency["tok_s"] > uniform["tok_s"]
        assert dynamic["hit"] > frequency["hit"] > uniform["hit"]
        assert dynamic["swaps"] > 0 == uniform["swaps"]


def test_a_step_costs_its_bytes() -> None:
    """All 40 experts of a token from CPU memory."""
    (row,) = simulated_rows(dataclasses.replace(REQUEST, shares=(0.0,), strategies=("uniform",)))
    nbytes = 40 * 3 * 2048 * 512 * (0.5 + 2 / 32)
    assert row["tok_s"] == pytest.approx(1 / (0.2e-3 + nbytes / 130e9), rel=1e-3)
    assert row["hit"] == 0


def test_the_gpus_part_is_estimated_from_what_was_measured() -> None:
    whole = dataclasses.replace(REQUEST, config="qwen3-30b-a3b", layers=None, gpu_step_ms=None)
    assert step_cost(whole, named_config("qwen3-30b-a3b", None)).gpu_step_seconds == pytest.approx(
        2.27e-3, 0.02
    )


def test_a_recorded_stream_is_split_into_before_and_now(tmp_path: Path) -> None:
    trace = generate(TraceShape(600, 4, 512, 10), Zipf(), 3)
    torch.save(trace, tmp_path / "trace.pt")
    request = dataclasses.replace(REQUEST, routing=str(tmp_path / "trace.pt"))
    seen = traffic(request, named_config("qwen3-512e", 4))
    assert torch.equal(seen.trace, trace[300:])
    assert torch.equal(seen.counts, expert_counts(trace[:300], 512))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"strategies": ("uniform", "best")}, "--strategies best: these exist: random"),
        ({"shares": (0.5, 1.1)}, "percentages from 0 to 100"),
        ({"shares": (float("nan"),)}, "percentages from 0 to 100"),
        ({"fmt": "INT3"}, "--format INT3: give BF16"),
        ({"routing": "zip"}, "--routing zip: give zipf, mild, steady, uniform, adversarial"),
    ],
)
def test_what_does_not_exist_is_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(REQUEST, **change).check()


def test_shares_that_are_no_numbers_are_named() -> None:
    assert numbers("0,12.5,100") == (0.0, 0.125, 1.0)
    with pytest.raises(ConfigError, match="--shares 'a few'"):
        numbers("a few")


def test_the_command_writes_rows_table_and_picture(tmp_path: Path) -> None:
    words = "bench experts --config qwen3-30b-a3b --layers 2 --tokens 60 --shares 0,50 --strategies uniform,dynamic"
    files = ["--out", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    done = CliRunner().invoke(app, [*words.split(), "--routing", "uniform", "--simulate", *files])
    assert done.exit_code == 0, done.output
    assert "SIMULATED" in done.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 4
    assert all(r["bench"] == "experts_simulated" and "simulation" in r["machine"] for r in rows)
    assert {"config", "routing", "strategy", "gpu_share", "tok_s", "hit", "commit", "command", "date"} <= set(
        rows[0]
    )
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235), ("glm-4.5-air", 107), ("glm-4.6", 353)],
)
def test_named_dimensions_are_the_real_models(name: str, billions: float) -> None:
    """By their published numbers of parameters, without GLM's draft layer."""
    found = named_config(name, None).weight_bytes("bfloat16", "bf16") / 2e9
    assert found == pytest.approx(billions, rel=0.02)
    assert set(CONFIGS) >= {name}


def test_an_unknown_configuration_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"these are: qwen3-30b-a3b, .*glm-4.6, .*qwen3-512e"):
        named_config("qwen9", None)
