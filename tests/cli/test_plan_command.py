"""`kt plan` as it is typed, and what `kt serve` and `kt bench report` say by the same sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from plans import plan, with_gpu
from tandem.bench import probes, sample
from tandem.cli import plan_text
from tandem.cli.app import app
from tandem.errors import CheckpointError, ConfigError, HubError
from tandem.planner.forecast.speeds import Speeds
from tandem.server.engine_process import print_plan

MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 128, "max_position_embeddings": 512, "rope_theta": 1e4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Speeds().having("measured", dram_gbps=50.0, cpu_flops=1e12)
    monkeypatch.setattr(probes, "cpu_speeds", lambda _machine, _tier: found)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def kt(*argv: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in argv], env={"COLUMNS": "160", "TERM": "dumb"})


def test_config_json_alone_is_enough(model_dir: Path) -> None:
    shown = kt("plan", model_dir)
    assert shown.exit_code == 0, shown.output
    for part in ("It fits.", "RAM", "dense weights", "together", "Choices", "decoding, 1 sequence", "prompt of 512",
                 "RAM 50 GB/s (measured)"):  # fmt: skip
        assert part in shown.stdout


def test_json_says_the_same(model_dir: Path) -> None:
    shown = kt("plan", model_dir, "--json", "--compare", "--kt-method", "INT4", "--gpu", "4090")
    found = json.loads(shown.stdout)
    assert found["fits"] and {ledger["place"] for ledger in found["ledgers"]} == {"VRAM", "RAM"}
    assert found["predicted"]["decode"]["1"]["low"] < found["predicted"]["decode"]["1"]["high"]
    assert {choice["name"]: choice["value"] for choice in found["choices"]}["expert format"] == "int4"
    assert found["speeds"]["sources"]["gpu_gbps"] == "the maker's" and len(found["compared"]) > 2


def test_a_question_about_another_machine() -> None:
    flags = "--gpu 4090 --ram 256GB --bandwidth 80GB/s --cpu 16 --isa avx512_bf16".split()
    shown = kt("plan", "--config", "deepseek-v3", *flags)
    assert shown.exit_code == 2
    for part in (
        "It does not run there",
        "take 645.4 GiB",
        "missing",
        "To make it fit",
        "of RAM: fits",
        "(lossy)",
    ):
        assert part in shown.stdout
    larger = ["768GB" if word == "256GB" else word for word in flags]
    shown = kt("plan", "--config", "deepseek-v3", *larger, "--mem-fraction-static", "0.95")
    assert shown.exit_code == 0 and "It fits." in shown.stdout


def test_what_would_make_it_fit_comes_before_the_tables() -> None:
    shown = kt("plan", "--config", "glm-4.5-air", "--gpu", "4090", "--ram", "128GB", "--isa", "avx512_bf16").stdout
    parts = "It does not run there", "To make it fit", "--kt-method INT4: fits", "VRAM"
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_a_plan_reads_without_knowing_the_program() -> None:
    """For a laptop with a small GPU: the context is in the first lines, a default is called one, no key is unknown."""
    machine = "--gpu 7.75GB@250GB/s --ram 32GB --bandwidth 60GB/s --pcie 12GB/s --cpu 8 --isa avx2".split()
    shown = kt("plan", "--config", "qwen3.5-35b-a3b", *machine, "--kt-method", "INT4").stdout
    first = shown.splitlines()[1]
    assert first.startswith("It fits.") and " of a prompt. Context: 1" in first
    for part in ("default: as many of each layer", "less GPU memory is left to other programs", "at best"):
        assert part in shown.replace("\n", " ")
    assert "not understood" not in shown
    asked = kt("plan", "--config", "qwen3.5-35b-a3b", *machine, "--kt-method", "INT4",
               "--kt-expert-placement-strategy", "uniform").stdout  # fmt: skip
    assert "default: as many" not in asked


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M", "kt plan --config qwen3-30b-a3b$"),
        ("deepseek-ai/DeepSeek-V3.2@main", "kt plan --config deepseek-v32$"),
        ("zai-org/GLM-4.5-Air-FP8", "kt plan --config glm-4.5-air-fp8$"),
        ("moonshotai/Kimi-K2.5", "--config knows the sizes of .*kimi-k2,"),
    ],
)
def test_where_no_hub_answers_named_architectures_are_told(
    model: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="(?m)HF_HUB_OFFLINE is set.*\n.*" + hint):
        app(["plan", model], standalone_mode=False)


def test_all_that_stands_in_the_way_is_listed(model_dir: Path) -> None:
    shown = kt("plan", model_dir, "--tp", "2", "--device", "cuda", "--kt-method", "AWQ", "--context-length", "9999")
    assert shown.exit_code == 2
    for part in ("--device cuda: no GPU was found", "--kt-method AWQ", "--context-length is 9999"):
        assert f"  * {part}" in shown.stdout


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no model is named; try kt plan DIRECTORY"),
        (["--config", "gpt-7"], "--config 'gpt-7' is not known; these are: qwen3-30b-a3b"),
        (["demo", "--ram", "much"], "--ram 'much' is no size"),
        (["demo", "--ram", "64GB", "--verify"], "--verify measures this machine; leave --gpu"),
    ],
)
def test_wrong_lines(argv: list[str], says: str) -> None:
    error = kt("plan", *argv).exception
    assert isinstance(error, ConfigError) and says in str(error)


def test_a_path_that_is_not_there_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "cpu_speeds", lambda *_: pytest.fail("measured"))
    assert isinstance(kt("plan", "/no/such/model").exception, CheckpointError)


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "gpt-oss:20b"])
def test_a_name_without_its_organisation_says_what_knows_its_sizes(model: str) -> None:
    error = kt("plan", model).exception
    assert isinstance(error, CheckpointError) and "is no name of the hub" in str(error)
    assert f"kt plan --config {model.lower().replace(':', '-')}" in str(error)


def test_verify_measures_some_layers(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "PROMPT_SECONDS", 0.5)
    shown = kt("plan", model_dir, "--verify", "--context", "64", "--prompt", "64")
    assert shown.exit_code == 0, shown.output
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith("decoding, 1 sequence"))
    assert len(line.split()) > 7 and float(line.split()[7]) > 0  # predicted low, to, high, bound, measured


def test_a_shorter_prompt_is_predicted_as_it_was_measured(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of all tokens would take too long, and a token of it looks back at more."""
    monkeypatch.setattr(sample, "PROMPT_SECONDS", 0.0)
    found = json.loads(kt("plan", model_dir, "--verify", "--context", "64", "--prompt", "64", "--json").stdout)
    assert found["predicted"]["prompt_tokens"] == 16 and "prompt of 16" in found["measured"]


def test_verify_measures_layers_that_share_a_choice(tiny_models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers of GLM-5.2 take the choice of one that is not among them."""
    monkeypatch.setattr(sample, "PROMPT_SECONDS", 0.5)
    shown = kt("plan", tiny_models["glm_moe_dsa"], "--verify", "--context", "64", "--prompt", "64", "--json")
    assert shown.exit_code == 0, shown.output
    assert all(rate > 0 for rate in json.loads(shown.stdout)["measured"].values())


def test_a_report_to_send(model_dir: Path, tmp_path: Path) -> None:
    done = kt(
        "bench",
        "report",
        model_dir,
        "--kt-method",
        "INT4",
        "--api-key",
        "secret",
        "--out",
        tmp_path / "r.json",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.count(" tokens/s measured, ") == done.stdout.count(" predicted\n") == 2
    text = (tmp_path / "r.json").read_text()
    found = json.loads(text)
    assert set(found["measured"]) == {"decoding, 1 sequence", "prompt of 512"} and found["flags"] == {
        "kt_method": "INT4"
    }
    assert found["plan"]["predicted"] and found["machine"]["cores"] >= 1 and found["software"]["torch"]
    assert "secret" not in text and str(tmp_path) not in text
    beside = kt("bench", "compare", tmp_path / "r.json", tmp_path / "r.json")
    assert beside.exit_code == 0 and beside.stdout.count("(1.00 ×)") == 2 and "--kt-method INT4" in beside.stdout


def test_serve_logs_the_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    p = plan(with_gpu(), kt_gpu_experts_ratio=0.5)
    print_plan(p, [])
    shown = capsys.readouterr().out
    assert "  VRAM: dense weights " in shown and "  RAM: experts " in shown
    assert plan_text.ledger_table(p.ledgers[0]).row_count == len(p.ledgers[0].entries) + 3
