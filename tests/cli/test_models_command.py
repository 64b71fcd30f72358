"""`kt models`, its table, and docs/models.md, which are made by running every type."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from typer.testing import CliRunner

from every_type import every_type
from repo_scripts import script_module
from tandem.architectures import FAMILIES
from tandem.architectures.model_types import PUBLISHED, Runs, read_table, type_of_name
from tandem.cli.app import app
from tandem.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]
TABLE = read_table()
UNLISTED = {"llama", "glm5_next_text"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module("model_table")


def told(*words: str) -> tuple[str, int]:
    result = CliRunner().invoke(app, ["models", *words], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output, result.exit_code


def test_the_families_of_ours_are_the_native_ones() -> None:
    assert {row.model_type for row in TABLE.rows if row.how == "native"} == set(FAMILIES) - UNLISTED


@pytest.mark.skipif(
    transformers.__version__ != TABLE.transformers, reason="another Transformers than the table's"
)
def test_every_type_of_transformers_is_in_the_table() -> None:
    """After a new family or version: python scripts/model_table.py --write TYPE"""
    assert [row.model_type for row in TABLE.rows] == every_type()


def test_the_page_says_what_the_table_says(script) -> None:
    """After a change: python scripts/model_table.py --write"""
    assert script.PAGE.read_text() == script.page(TABLE.rows, TABLE.transformers)


def test_whoever_does_not_run_packed_has_a_reason() -> None:
    assert all(bool(row.why) == (row.how in ("alone", "refused")) for row in TABLE.rows)


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "axk1", "gemma4_text", "qwen3_vl_moe", "glm4v_moe", "jamba", "muse_spark", "jetmoe"]
)
def test_types_run_as_the_table_says(script, model_type) -> None:
    assert script.tried(model_type) == TABLE.row(model_type)


@pytest.mark.full
@pytest.mark.parametrize("model_type", [row.model_type for row in TABLE.rows])
def test_every_type_runs_as_the_table_says(script, model_type) -> None:
    assert script.tried(model_type) == TABLE.row(model_type)


def test_results_that_differ_are_refused(script, monkeypatch) -> None:
    monkeypatch.setattr(script, "_run", lambda model_type, path: ("paged", "", 0.3))
    assert script.tried("afmoe") == Runs(
        "afmoe", "refused", "its results are not those of Transformers (by 0.3)"
    )


def test_all_types_are_printed() -> None:
    text, code = told()
    assert code == 0 and all(row.model_type in text for row in TABLE.rows)
    assert f"native: {len(FAMILIES) - len(UNLISTED)}, Tandem's own code" in text
    listed = json.loads(told("--json")[0])
    assert listed["transformers"] == TABLE.transformers and len(listed["types"]) == len(TABLE.rows)


def test_types_whose_images_are_read(script) -> None:
    seeing = {"qwen3_5_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe"}
    assert {row.model_type for row in TABLE.rows if row.images} == seeing
    assert all(script.reads_images(model_type) for model_type in seeing)
    assert not any(script.reads_images(model_type) for model_type in ("glm4v_moe", "kimi_k25", "qwen3_5_moe_text"))
    text, _ = told("qwen3_vl_moe")
    assert text == "qwen3_vl_moe: native, Tandem's own code, on the CPU or beside a GPU; reads images\n"
    assert json.loads(told("qwen3_vl_moe", "--json")[0])["images"] is True
    assert "images" in told("qwen3")[0].splitlines()[0]


def test_one_type_is_explained() -> None:
    assert told("qwen3_moe") == ("qwen3_moe: native, Tandem's own code, on the CPU or beside a GPU\n", 0)
    text, code = told("jetmoe")
    assert code == 1 and "refused, does not run: " in text and "in code of its own (JetMoeMoE)" in text
    entry = json.loads(told("jamba", "--json")[0])
    assert entry["how"] == "alone" and "states of their own" in entry["why"]


def test_a_directory_is_looked_at(tiny_models, tmp_path) -> None:
    assert told(str(tiny_models["minimax_m2"]))[0].startswith("minimax_m2: native")
    (tmp_path / "config.json").write_text('{"model_type": "nllb-moe"}')
    text, code = told(str(tmp_path))
    assert code == 1 and "refused" in text and "it reads with an encoder" in text


@pytest.mark.parametrize("written", ["", '{"model_type": "qwen3_moe",'])
def test_what_is_no_model_is_an_error_and_not_a_model_that_is_refused(tmp_path, written) -> None:
    if written:
        (tmp_path / "config.json").write_text(written)
    with pytest.raises(CheckpointError, match="config.json"):
        told(str(tmp_path))
    for name in (str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(CheckpointError, match="nowhere does not exist"):
            told(name)


def test_a_name_that_is_nothing_is_an_error_with_near_ones() -> None:
    with pytest.raises(ConfigError, match="known by the name glm4_mo3; near it: .*glm4_moe"):
        told("glm4_mo3")
    with pytest.raises(ConfigError, match="near it: .*Qwen3-30B-A3B"):
        told("Qwen3-30B-A4B")
    with pytest.raises(ConfigError, match="known by the name nothing. Tandem"):
        told("nothing")


def test_a_number_of_a_name_is_whole() -> None:
    """Qwen2.5-7B is dense. Without its dashes and dots it is how Qwen2-57B-A14B begins."""
    for dense in ("Qwen2.5-7B", "qwen2.5"):
        with pytest.raises(ConfigError, match="no model with experts"):
            told(dense)


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("glm", "glm4_moe", {"glm_moe_dsa", "glm4v_moe", "glm5_next"}),
        ("Qwen3", "qwen3_5_moe", {"qwen3_moe", "qwen3_next"}),
        ("DeepSeek-V4", "deepseek_v4", set()),
    ],
)
def test_how_names_begin_shows_all_of_them(name, first, others) -> None:
    text, code = told(name)
    assert code == 0 and text.split("\n")[0 if not others else 1].startswith(first)
    assert all(f"\n{other} " in text for other in others)
    assert "native" in text and "mixtral" not in text


def test_one_type_may_be_written_as_people_write_it() -> None:
    assert told("Mixtral") == told("mixtral")


def test_several_types_are_one_list_of_json() -> None:
    found = json.loads(told("minimax", "--json")[0])  # a type's own name, and not the others that begin so
    assert found["model_type"] == "minimax"
    found = json.loads(told("deepseek", "--json")[0])
    assert {"deepseek_v3", "deepseek_v4"} <= {each["model_type"] for each in found}


def test_dbrx_says_what_is_missing_in_our_words() -> None:
    text, code = told("databricks/dbrx-instruct")
    assert code == 1 and "experts in code of its own" in text and "Error" not in text


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3_moe"),
        ("unsloth/DeepSeek-V3.2-GGUF:Q4_K_M", "deepseek_v32"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3"),
        ("zai-org/GLM-5.3-Flash", "glm5_next"),
        ("Qwen/Qwen3.8-Flash-Next", "qwen4_exp"),
        ("Qwen3.8-Flash-Next-FP8", "qwen4_exp"),
        ("mixtral-8x7b", "mixtral"),
        ("inclusionAI/Ling-mini-2.0", "bailing_moe_v2"),
        ("moonshotai/Kimi-VL-A3B-Instruct", "deepseek_v3"),
        ("Qwen/Qwen3.5-27B", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", None),
        ("zai-org/GLM-4.6V-Flash", None),
    ],
)
def test_a_published_name_says_its_type(name: str, model_type: str | None) -> None:
    assert type_of_name(name) == model_type


def test_published_names_are_of_types_in_the_table() -> None:
    assert {*PUBLISHED} <= {row.model_type for row in TABLE.rows}
    names = [name.lower() for names in PUBLISHED.values() for name in names]
    assert len(names) == len(set(names))
    assert all(type_of_name(name) == each for each, names in PUBLISHED.items() for name in names)


def test_a_name_of_the_hub_is_explained() -> None:
    text, code = told("google/gemma-4-26B-A4B-it")
    heads = "the GPU kernels read heads of at most 256 channels, not 512"
    assert (text, code) == (f"gemma4: native, Tandem's own code, on the CPU: {heads}\n", 0)
    with pytest.raises(Exception, match="kt plan some/thing-7b looks at its configuration"):
        told("some/thing-7b")


def test_help_has_an_example() -> None:
    assert "Example: kt models Qwen3-30B-A3B" in told("--help")[0]
