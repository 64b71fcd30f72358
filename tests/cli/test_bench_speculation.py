"""`kt bench decode --speculative`: turns with draft tokens and without, and what a row says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.bench import speculation as bench_speculation
from tandem.bench.architectures import CONFIGS
from tandem.bench.speculation import governed_text
from tandem.cli.app import app
from tandem.engine.speculation.nextn import NextN

KEYS = {
    "bench", "config", "algorithm", "acceptance", "overlap", "steps", "governor", "batch", "gpu_share", "tok_s",
    "plain_tok_s", "ratio", "widths", "believed_ms", "believed_chances", "task", "format", "machine", "commit",
    "command", "date",
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
    assert len(row["widths"]) == len(row["believed_ms"]) == 4 and sum(row["widths"]) > 4 * 2 * 3
    assert row["believed_ms"][0] > 0 and all(0 <= chance <= 1 for chance in row["believed_chances"])


@pytest.mark.parametrize(("argv", "method"), [((), None), (("--format", "INT4"), "INT4")])
def test_without_a_format_experts_are_as_they_are_stored(tiny_models, monkeypatch, argv, method) -> None:
    """A quantised file was decoded to bf16, and that was measured."""
    configs = []
    monkeypatch.setattr(bench_speculation, "load_parts", lambda config: configs.append(config) or 1 / 0)
    words = ["bench", "decode", str(tiny_models["qwen3_moe"]), "--speculative", "ngram", *argv]
    assert isinstance(CliRunner().invoke(app, words).exception, ZeroDivisionError)
    assert [config.kt_method for config in configs] == [method]


def test_a_line_says_what_the_governor_chose_and_believed() -> None:
    row = {"widths": [40, 0, 0, 9], "believed_ms": [20.0, 22.0, 25.0, 28.0], "believed_chances": [0.41, 0.3]}
    assert governed_text(row) == (
        "widths chosen 0: 40, 3: 9; believed: a step 20.0 ms, with drafts 1.10, 1.25, 1.40 x; accepted 0.41, 0.30"
    )
    assert governed_text({"widths": [0, 5], "believed_ms": [], "believed_chances": []}) == "widths chosen 1: 5"


def test_a_forced_acceptance_is_what_comes_out(tiny_models, tmp_path: Path, short_tasks, monkeypatch) -> None:
    """All accepted: with 3 draft tokens a step has 4 tokens; none: one."""
    seen = []
    ratios = bench_speculation._TimedAnswers.ratios
    monkeypatch.setattr(
        bench_speculation._TimedAnswers, "ratios", lambda self, a: seen.append(ratios(self, a)) or seen[-1]
    )
    line = "--speculative NGRAM --no-governor --acceptance 0 --acceptance 1 --steps 33 --repeats 1 --threads 1"
    found = rows(tmp_path, str(tiny_models["qwen3_moe"]), *line.split(), "--speculative-num-steps", "3")
    assert [(row["algorithm"], row["acceptance"], row["governor"]) for row in found] == [
        ("foretold", 0.0, False), ("foretold", 1.0, False),
    ]  # fmt: skip
    (_, never), (_, always) = seen
    assert never.accepted_tokens == 0 < never.draft_tokens
    assert always.accepted_tokens == always.draft_tokens
    assert always.draft_step_tokens == 4 * always.draft_steps


def test_a_draft_layer_of_made_up_weights_does_its_work(tmp_path: Path, short_tasks, monkeypatch) -> None:
    """Its draft tokens are replaced by accepted ones, and it has made as many."""
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["glm-4.5-air"] | {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 300,
    })  # fmt: skip
    drawn, draw = [], NextN.draw
    monkeypatch.setattr(NextN, "draw", lambda self, wanted: drawn.append(draw(self, wanted)) or drawn[-1])
    line = "--speculative EAGLE --config small --layers 3 --no-governor --acceptance 1 --steps 33 --repeats 1"
    [row] = rows(tmp_path, *line.split(), "--threads", "1", "--speculative-num-steps", "3")
    assert (row["config"], row["algorithm"], row["acceptance"]) == ("small", "NEXTN, foretold", 1.0)
    assert len(drawn) == 2 * 8 and all(len(draft) == 3 for [draft] in drawn)  # the first run warms up


def test_an_algorithm_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "decode", "--config", "gpt-oss-120b", "--speculative", "NEXTN"])
    assert done.exit_code != 0 and "has no draft layer" in str(done.exception or done.output)
