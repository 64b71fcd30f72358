"""`kt bench decode --speculative`: turns with guesses and without, and what a row says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.bench import speculation as bench_speculation
from tandem.cli.app import app

KEYS = {
    "bench", "config", "algorithm", "acceptance", "overlap", "steps", "governor", "batch", "gpu_share", "tok_s",
    "plain_tok_s", "ratio", "task", "format", "machine", "commit", "command", "date",
}  # fmt: skip


@pytest.fixture
def short_tasks(monkeypatch) -> None:
    monkeypatch.setattr(bench_speculation, "TASKS", {"copy": "abc abc abc abc"})


def rows(tmp_path: Path, *argv: str) -> list[dict]:
    out = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["bench", "decode", *argv, "--out", str(out)])
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


def test_a_row_has_both_rates_and_their_ratio(tiny_models, tmp_path: Path, short_tasks) -> None:
    model = str(tiny_models["qwen3_moe"])
    line = "--speculative ngram --steps 12 --repeats 3 --batch 2 --threads 1 --speculative-num-steps 3"
    [row] = rows(tmp_path, model, *line.split())
    assert set(row) == KEYS
    said = (row["bench"], row["task"], row["algorithm"], row["steps"], row["governor"], row["batch"])
    assert said == ("speculation", "copy", "NGRAM", 3, True, 2)
    assert row["tok_s"] > 0 and row["plain_tok_s"] > 0 and row["ratio"] > 0


def test_a_forced_acceptance_is_what_comes_out(tiny_models, tmp_path: Path, short_tasks, monkeypatch) -> None:
    """All guesses right: with 3 guesses a step has 4 tokens; none right: one."""
    seen = []
    ratios = bench_speculation._Turns.ratios
    monkeypatch.setattr(
        bench_speculation._Turns, "ratios", lambda self, a: seen.append(ratios(self, a)) or seen[-1]
    )
    line = "--speculative NGRAM --no-governor --acceptance 0 --acceptance 1 --steps 33 --repeats 1 --threads 1"
    found = rows(tmp_path, str(tiny_models["qwen3_moe"]), *line.split(), "--speculative-num-steps", "3")
    assert [(row["algorithm"], row["acceptance"], row["governor"]) for row in found] == [
        ("foretold", 0.0, False), ("foretold", 1.0, False),
    ]  # fmt: skip
    (_, never), (_, always) = seen
    assert never.right_guesses == 0 < never.guesses
    assert always.right_guesses == always.guesses
    assert always.guess_step_tokens == 4 * always.guess_steps


def test_an_algorithm_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "decode", "--speculative", "NEXTN"])
    assert done.exit_code != 0 and "has no draft layer" in str(done.exception or done.output)
