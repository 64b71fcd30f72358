"""docs/models/ says what `kt plan` says. After a change: python scripts/model_pages.py --write"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from page_lines import lines_of
from repo_scripts import script_module
from tandem.architectures.model_types import read_table
from tandem.bench import probes
from tandem.cli.app import app
from tandem.engine.start.planning import planned
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.forecast.machine_spec import SYSTEM_BYTES, wished_machine
from tandem.planner.forecast.prediction import Range
from tandem.planner.memory import DEFAULT_FRACTION

ROOT = Path(__file__).parents[2]
script: ModuleType = script_module("model_pages")
MODELS = script.headlines()
QUICK = ("glm-4.5-air", "gpt-oss-120b")  # the others: make test-all
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MODELS]
EXPECTED = {
    "deepseek-v3", "deepseek-v3.2", "deepseek-v4-flash", "qwen3-next", "qwen3.5-35b", "qwen3.5-397b", "qwen3-235b",
    "qwen3-coder-480b", "qwen3.8-flash-next", "glm-4.5-air", "glm-4.6", "glm-5", "glm-5.3-flash", "gpt-oss-120b",
    "kimi-k2.5", "minimax-m2",
}  # fmt: skip


def page_of(name: str) -> str:
    text: str = (script.PAGES / f"{name}.md").read_text(encoding="utf-8")
    return text


def commands(name: str) -> list[list[str]]:
    """All command lines of a page, as a shell divides them."""
    return [line.words for line in lines_of(script.PAGES / f"{name}.md")]


def described(folder: Path, name: str) -> str:
    """A stand-in for the hub's first file: its configuration alone."""
    (folder / "config.json").write_text(json.dumps(MODELS[name].config_json()), encoding="utf-8")
    return str(folder)


def test_every_headline_model_has_a_page() -> None:
    assert set(MODELS) == EXPECTED
    assert {path.stem for path in script.PAGES.glob("*.md")} == EXPECTED | {"README"}
    assert (script.PAGES / "README.md").read_text(encoding="utf-8") == script.index(MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_kt_plan_says(name: str) -> None:
    assert page_of(name) == script.page(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_page_has_its_parts(name: str) -> None:
    text, model = page_of(name), MODELS[name]
    for heading in ("What to expect", "Which file", "What to change", "Known traps"):
        assert f"\n## {heading}\n" in text
    assert "`kt plan` says this; nothing in the table is measured" in text
    assert [words[:2] for words in commands(name)] == [["kt", "serve"], ["kt", "plan"]]
    assert all(words[2] == model.hub_name for words in commands(name))


@pytest.mark.parametrize("name", NAMES)
def test_its_line_of_kt_serve_is_planned_on_its_machine(name: str, tmp_path: Path) -> None:
    """As `--plan-only` does, from config.json alone."""
    serve, _ = commands(name)
    machine = wished_machine(MODELS[name].places[0].wish, script.ANYTHING)
    plan = planned(EngineConfig.from_args([described(tmp_path, name), *serve[3:]]), machine).plan
    assert (plan.gpu is None) == (not machine.gpus) and plan.context_length > 4096


@pytest.mark.parametrize("name", NAMES)
def test_its_line_of_kt_plan_says_that_it_fits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the machine is said, so nothing is measured, and the speeds are those of the page."""
    monkeypatch.delattr(probes, "cpu_speeds")
    _, line = commands(name)
    shown = CliRunner().invoke(app, ["plan", described(tmp_path, name), *line[3:], "--json"])
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    decode = said["predicted"]["decode"]["1"]
    row = page_of(name).partition("| --- |")[2].splitlines()[1]
    assert script.shown(Range(decode["low"], decode["high"], 0.0, {})) in row
    assert said["assumed"] == ""


def test_their_types_run_natively() -> None:
    native = {row.model_type for row in read_table().rows if row.how == "native"}
    assert {model.config_json()["model_type"] for model in MODELS.values()} <= native


@pytest.mark.parametrize("name", NAMES)
def test_draft_layers_and_caches_are_as_the_page_says(name: str) -> None:
    """With so much memory that nothing else refuses."""
    model = MODELS[name]
    place = next(place for place in model.places if place.wish.gpus != "none")
    roomy = replace(place.wish, ram="3TB")
    for flag, taken in (
        ("--speculative-algorithm NEXTN", bool(model.draft)),
        ("--kv-cache-dtype fp8_e4m3", "fp8_e4m3` is refused" not in page_of(name)),
    ):
        if flag.split()[0] == "--kv-cache-dtype" and "fp8_e4m3" not in page_of(name):
            continue
        asked = script.question(model, replace(place, wish=roomy, flags=flag))
        if taken:
            asked.plan()
        else:
            with pytest.raises(ConfigError, match=flag.split()[0]):
                asked.plan()


def test_the_rule_of_thumb_is_arithmetic() -> None:
    """docs/quantisation.md: bits a weight to GiB a billion, and CPU memory to billions, rounded down."""
    text = (ROOT / "docs" / "quantisation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!\d+ GB)[^|]+ \| ([\d.]+) \| ([\d.]+) \| ", text, re.M)
    assert len(rows) == 10
    assert all(f"{float(bits) * 1e9 / 8 / 2**30:.2f}" == each for bits, each in rows)
    memories = re.findall(r"^\| (\d+) GB \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert len(memories) == 6
    for total, *billions in (map(int, row) for row in memories):
        free = total - max(SYSTEM_BYTES / 2**30, 0.03 * total)
        for bits, most in zip((16, 8.25, 4.5), billions, strict=True):
            fits = DEFAULT_FRACTION * free / (bits * 1e9 / 8 / 2**30)
            assert most <= fits < 1.25 * most, (total, bits, fits)
