"""The whole program on quantised directories: `LLM` generates, `--plan-only` says what is stored and what is held."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantised_models import experts_only, save_quantised
from tandem import LLM, SamplingParams
from tandem.cli.app import app
from tandem.errors import ConfigError
from tiny import VARIANTS, TinyModels, settings


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    """(int4 experts, the same numbers as float32)."""
    family, changes = VARIANTS["qwen3_moe"]
    sizes = settings(hidden_size=128, num_hidden_layers=2, moe_intermediate_size=64, num_experts=8)
    VARIANTS["qwen3_moe-int4"] = (family, changes | sizes)
    plain = TinyModels(tmp_path_factory.mktemp("plain"))["qwen3_moe-int4"]
    del VARIANTS["qwen3_moe-int4"]
    return save_quantised(plain, tmp_path_factory.mktemp("int4"), experts_only("int4 packed g32"))


def test_generates_what_the_numbers_generate(directories):
    """In float32 codes are decoded exactly, so every token is the same."""
    answers = []
    for path in directories:
        llm = LLM(str(path), dtype="float32", kt_cpuinfer=2, max_total_tokens=128)
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        answers.append([a.token_ids for a in llm.generate(["Hello", "a longer text"], greedy)])
    assert answers[0] == answers[1]


def test_answers_from_codes(directories):
    llm = LLM(str(directories[0]), kt_method="RAWINT4", kt_cpuinfer=2, max_total_tokens=128)
    (answer,) = llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert len(answer.token_ids) == 5


def test_the_plan_says_what_is_stored(directories):
    shown = CliRunner().invoke(app, ["serve", str(directories[0]), "--plan-only"])
    assert shown.exit_code == 0, shown.output
    line = next(line for line in shown.output.splitlines() if line.startswith("expert format"))
    assert "int4 g32" in line and "as the checkpoint has it" in line


def test_another_format_than_the_stored_one_is_refused(directories):
    with pytest.raises(ConfigError, match="--kt-method FP8: the checkpoint's experts are int4 g32"):
        LLM(str(directories[0]), kt_method="FP8")
