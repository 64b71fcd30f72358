"""benchmarks/scripted_drafts: answers, routing and accepted draft tokens as they are scripted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

import scripted_path  # noqa: F401
from scripted_drafts import __main__ as command
from scripted_drafts import rows as told_rows
from scripted_drafts import turns as told_turns
from scripted_drafts.paid import PricedDrafter
from scripted_drafts.parts import ScriptedCopies, told_tokens
from scripted_drafts.plot import lines
from scripted_drafts.routing import ScriptedRouting, chains, distinct
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import CONFIGS
from tandem.cli.app import app
from tandem.engine.engine import Engine
from tandem.engine.protocol import TokenOutput
from tandem.errors import ConfigError
from tandem.models.batch import ForwardBatch

SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 300,
}  # fmt: skip
V4 = {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 64, "q_lora_rank": 48, "n_routed_experts": 64,
    "moe_intermediate_size": 32, "sliding_window": 8, "o_groups": 2, "o_lora_rank": 32, "index_n_heads": 16,
    "index_head_dim": 32, "num_experts_per_tok": 4, "index_topk": 64, "num_hash_layers": 1, "qk_rope_head_dim": 16,
    "compress_ratios": [0, 4, 128, 4], "vocab_size": 300,
}  # fmt: skip
FIGURES = {
    "tok_s", "plain_tok_s", "ratio", "step_ms", "plain_step_ms", "share", "plain_share", "width", "right",
    "cpu_experts", "plain_cpu_experts", "widths", "believed_ms", "believed_chances",
}  # fmt: skip
SAID = {
    "bench", "config", "layers", "format", "dense", "algorithm", "acceptance", "overlap", "steps", "governor", "batch",
    "gpu_share", "context", "tokens", "draft_ms", "machine", "commit", "command", "date",
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["glm-4.5-air"] | SMALL)
    monkeypatch.setitem(CONFIGS, "small-v4", CONFIGS["deepseek-v4-flash"] | V4)
    block = {"dspark_noise_token_id": 9, "dspark_markov_rank": 8}
    monkeypatch.setitem(CONFIGS, "small-block", CONFIGS["deepseek-v4-flash-0731"] | V4 | block)


def rows(tmp_path: Path, line: str) -> list[dict[str, Any]]:
    out = tmp_path / "rows.json"
    common = "--speculative NGRAM --threads 1 --repeats 1 --context 40 --speculative-num-steps 3"
    done = CliRunner().invoke(command.app, [*common.split(), *line.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert ": weights\n" in done.stderr and "first steps without drafts\n" in done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("overlap", [0.0, 1 / 3, 0.5, 1.0])
def test_neighbours_share_so_many_experts(overlap: float) -> None:
    chain = chains(3, 40, 6, overlap, tokens=400)
    assert chain.sort(-1).values.diff(dim=-1).ne(0).all()  # nobody is chosen twice
    shared = [len(set(a.tolist()) & set(b.tolist())) for layer in range(3) for a, b in pairwise(chain[:, layer])]
    deviation = (0.25 * len(shared)) ** 0.5 / len(shared)  # of the mean: each is one of two neighbouring numbers
    assert sum(shared) / len(shared) == pytest.approx(6 * overlap, abs=4 * deviation)
    assert distinct(chain, 2) == pytest.approx(12 - 6 * overlap, abs=0.2)
    assert distinct(chain, 1) == 6.0


def test_few_experts_cannot_differ_from_neighbour_to_neighbour() -> None:
    with pytest.raises(ConfigError, match="twice as many experts"):
        chains(1, 7, 4, 0.5)


def batch_of(starts: list[int], positions: list[int], first_pages: list[int]) -> ForwardBatch:
    made = SimpleNamespace(
        input_ids=torch.zeros(len(positions)), positions=torch.tensor(positions),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        block_tables=torch.tensor(first_pages, dtype=torch.int32)[:, None],
    )  # fmt: skip
    return cast(ForwardBatch, made)


def test_rows_get_the_experts_of_their_places() -> None:
    """The same ones, whether a sequence's rows are one sequence or as many; other sequences have others."""
    routing = ScriptedRouting(config_from_dict(CONFIGS["glm-4.5-air"] | SMALL | {"num_hidden_layers": 3}), 0.5, 8)
    assert routing.chosen.shape == (2, 8, 4)
    routing.begin(batch_of([0, 3, 4], [5, 6, 7, 9], [0, 2]))
    together = routing.chosen.clone()
    routing.begin(batch_of([0, 1, 2, 3, 4], [5, 6, 7, 9], [0, 0, 0, 2]))
    assert torch.equal(routing.chosen, together)
    assert torch.equal(together[:, :3], routing.chain[5:8].transpose(0, 1))
    routing.begin(batch_of([0, 1, 2], [5, 5], [0, 2]))
    assert not torch.equal(routing.chosen[:, 0], routing.chosen[:, 1])


def test_a_row_says_all_that_was_asked(small, tmp_path: Path, monkeypatch) -> None:
    """Governed and fixed, right and wrong; the experts are those that were told."""
    seen: list[torch.Tensor] = []
    submit = ScriptedCopies.submit
    monkeypatch.setattr(
        ScriptedCopies,
        "submit",
        lambda self, x, routing: seen.append(self.chosen[: len(x)]) or submit(self, x, routing),
    )
    line = "--config small --layers 3 --overlap 0.25 --acceptance 0 --acceptance 1 --fixed 3 --batch 2 --steps 33"
    found = rows(tmp_path, line)
    keys = "acceptance", "governor", "steps", "batch", "overlap", "tokens"
    asked = [tuple(row[key] for key in keys) for row in found]
    assert asked == [(a, governed, 3, 2, 0.25, 33) for governed in (True, False) for a in (0.0, 1.0)]
    assert all(set(row) == SAID | FIGURES for row in found)
    assert all(row["bench"] == "speculation" and row["ratio"] > 0 < row["share"] < 1.0 for row in found)
    fixed = {row["acceptance"]: row for row in found if not row["governor"]}
    assert fixed[0.0]["right"] == 0.0 and fixed[1.0]["right"] == 1.0
    assert 2.5 < fixed[1.0]["width"] <= 3.0  # the last step has fewer
    assert seen


def test_answers_are_told_and_steps_are_fewer(small, tmp_path: Path, monkeypatch) -> None:
    """All accepted: four tokens a step; none: one, as without drafts."""
    steps: dict[tuple[str, float], int] = {}
    answer: list[int] = []
    timed, step = told_turns.TimedTurns.timed, Engine.step

    def watched(self: Engine) -> list[TokenOutput]:
        outputs = step(self)
        answer.extend(token for output in outputs for token in output.token_ids)
        return outputs

    def counted(self: told_turns.TimedTurns, engine: Engine) -> told_turns.Timed:
        before = engine.stats().steps
        answer.clear()
        found = timed(self, engine)
        assert answer == told_tokens(40, 33, 300)
        said = engine.stats().speculation
        right = 0.0 if said is None else said.accepted_tokens / max(1, said.draft_tokens)
        steps["plain" if said is None else "speculative", right] = engine.stats().steps - before
        return found

    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr(told_turns.TimedTurns, "timed", counted)
    line = "--config small --layers 3 --overlap 0.25 --acceptance 0 --acceptance 1 --no-governor --fixed 3 --steps 33"
    rows(tmp_path, line + " --batch 1")
    assert steps == {("plain", 0.0): 33, ("speculative", 0.0): 33, ("speculative", 1.0): 9}


def test_entries_of_several_tokens_take_drafts_too(small, tmp_path: Path) -> None:
    """DeepSeek-V4's."""
    line = "--config small-v4 --layers 4 --format MXFP4 --dense-format fp8 --overlap 0.25 --acceptance 1 --no-governor"
    [row] = rows(tmp_path, line + " --fixed 2 --batch 1 --steps 13")
    assert row["right"] == 1.0 and row["width"] > 1.5


def test_a_block_s_layers_work_as_they_would(small, tmp_path: Path) -> None:
    """And their draft tokens are replaced by accepted ones."""
    line = "--speculative DSPARK --config small-block --layers 4 --overlap 0.25 --acceptance 1 --no-governor"
    [row] = rows(tmp_path, line + " --speculative-num-steps 5 --fixed 5 --batch 1 --steps 19")
    assert row["right"] == 1.0 and row["width"] > 3.5 and row["algorithm"] == "DSPARK, foretold"


def test_routing_is_told_to_made_up_weights_alone() -> None:
    done = CliRunner().invoke(command.app, ["--speculative", "NGRAM", "--overlap", "0.5"])
    assert done.exit_code == 2 and "--config" in done.output


def test_widths_are_needed_without_a_governor() -> None:
    done = CliRunner().invoke(command.app, "--config glm-4.5-air --overlap 0.3 --no-governor".split())
    assert isinstance(done.exception, ConfigError) and "give --fixed 3, too" in str(done.exception)


def asked(**flags: Any) -> told_rows.ScriptedFlags:
    known = {
        "speculative": "NGRAM", "config": "small", "fmt": None, "gpu_share": None, "batch": [4], "acceptance": None,
        "overlap": 0.5, "num_steps": 3, "governor": True, "fixed": None, "layers": 3, "context": 40, "steps": 8,
        "repeats": 1, "threads": 1, "tier": "auto", "dense_format": "bf16", "draft_ms": None,
    }  # fmt: skip
    return told_rows.request(known | flags)


def test_steps_are_planned_for_the_most_drafts_that_any_has(small, monkeypatch) -> None:
    """Graphs count what the CPU's experts do: a wider step would be counted as none."""
    planned: list[int] = []

    def stopped(config: Any, *rest: object) -> None:
        planned.append(config.speculative_num_steps)
        raise InterruptedError

    monkeypatch.setattr(told_rows, "told_parts", stopped)
    for flags in ({}, {"fixed": [1, 5]}, {"fixed": [2]}):
        with pytest.raises(InterruptedError):
            list(told_rows.measure(asked(**flags)))
    assert planned == [3, 5, 3]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_steps": 4}, "--batch 4 with --speculative-num-steps 4 has 20 rows .* graph has 16"),
        ({"fixed": [3, 7]}, "--batch 4 with --fixed 7 has 32 rows"),
        ({"batch": [1, 5]}, "--batch 5 with --speculative-num-steps 3 has 20 rows"),
    ],
)
def test_a_step_of_more_rows_than_a_graph_is_refused(
    small, monkeypatch, flags: dict[str, Any], message: str
) -> None:
    gpu = SimpleNamespace(graph_sizes=(4, 8, 16))
    made = SimpleNamespace(parts=SimpleNamespace(plan=SimpleNamespace(gpu=gpu)))
    monkeypatch.setattr(told_rows, "told_parts", lambda *_: made)
    with pytest.raises(ConfigError, match=message):
        list(told_rows.measure(asked(**flags)))
    told_rows.check_rows(asked(fixed=[3]), gpu.graph_sizes)


def test_a_share_of_accepted_drafts_needs_drafts() -> None:
    done = CliRunner().invoke(app, "bench decode --acceptance 0.5".split())
    assert isinstance(done.exception, ConfigError)
    assert "--acceptance says nothing alone: give --speculative NGRAM, too" in str(done.exception)


def test_a_draft_layer_drafts_three_tokens_if_nothing_is_said(small) -> None:
    names = "NEXTN", "eagle", "dspark", "NGRAM"
    assert [asked(speculative=name, num_steps=None).most for name in names] == [3, 3, 5, 7]


def test_a_picture_has_a_line_for_each_width_and_share(small) -> None:
    row = {"format": "int4", "gpu_share": 0.5, "batch": 1, "steps": 3}
    points = [(0.9, True, 1.4), (0.0, True, 0.99), (0.9, False, 1.5)]
    made = lines([row | {"acceptance": a, "governor": g, "ratio": r} for a, g, r in points])
    assert made == [
        ("int4, 50% on the GPU, batch 1: up to 3", [0.0, 0.9], [0.99, 1.4]),
        ("int4, 50% on the GPU, batch 1: always 3", [0.9], [1.5]),
    ]


def test_a_draft_layer_takes_its_own_time(small) -> None:
    with pytest.raises(ConfigError, match="leave --draft-ms out, or give --speculative NGRAM"):
        asked(speculative="NEXTN", draft_ms=0.5)
    assert asked(speculative="NEXTN").algorithm == "NEXTN" and asked(draft_ms=0.5).draft_seconds == 0.0005


def test_a_draft_takes_the_time_that_is_said() -> None:
    sequences = [cast(Any, SimpleNamespace(request_id=str(i), index=0, answer_len=2)) for i in range(2)]
    drafter = PricedDrafter({("0", 0): range(10), ("1", 0): range(20, 30)}, 1.0, 300, 0.01)
    started = perf_counter()
    assert drafter.draw([(sequences[0], 3), (sequences[1], 1)]) == [(2, 3, 4), (22,)]
    assert perf_counter() - started >= 0.03
