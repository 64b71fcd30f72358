"""What plans read of a model's files: enough before the download, and all that a start would refuse after it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from plans import GIB
from tandem.bench import probes
from tandem.cli.app import app
from tandem.engine.start.planning import planned
from tandem.errors import CheckpointError, ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.this_machine import these_cpus
from tandem.machine.gpus import Gpu
from tandem.planner.forecast.speeds import Speeds

MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "intermediate_size": 128, "max_position_embeddings": 512, "rope_theta": 1e4,
}  # fmt: skip
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Speeds().having("measured", dram_gbps=50.0, cpu_flops=1e12)
    monkeypatch.setattr(probes, "cpu_speeds", lambda _machine, _tier: found)


def described(folder: Path, name: str, **more: object) -> Path:
    """A directory with config.json alone."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(MODEL | more))
    return folder / name


def host(gpus: int = 0):
    there = tuple(Gpu("a GPU", 24 * GIB, 23 * GIB, "", i, "", (9, 0)) for i in range(gpus))
    return replace(these_cpus(), gpus=there, gpu_missing=())


def test_experts_of_another_directory_are_planned_before_either_is_fetched(tmp_path: Path) -> None:
    """As the tutorial's line has them; the model's directory may be whole already, or the experts'."""
    dense, experts = described(tmp_path, "dense"), described(tmp_path, "experts", **FP8)
    shown = CliRunner().invoke(app, ["plan", str(dense), "--kt-weight-path", str(experts), "--json"])
    assert shown.exit_code == 0, shown.output
    choices = {choice["name"]: choice["value"] for choice in json.loads(shown.stdout)["choices"]}
    assert choices["expert format"] == "fp8 32x32" and choices["expert weights"] == "experts"
    itself = EngineConfig.from_args([str(dense), "--kt-weight-path", str(dense)])
    assert planned(itself, host()).stored.experts.name == "bf16"
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        planned(EngineConfig.from_args([str(dense), "--kt-weight-path", str(empty)]), host())


def test_a_whole_model_beside_experts_that_are_not_there_yet(tiny_models, tmp_path: Path) -> None:
    whole = tiny_models["qwen3_moe"]
    config = json.loads((whole / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | FP8))
    for model, experts, name in ((whole, tmp_path, "fp8 32x32"), (tmp_path, whole, None)):
        config = EngineConfig.from_args([str(model), "--kt-weight-path", str(experts)])
        found = planned(config, host()).stored
        assert found.experts.quantised == (name is not None) and name in (None, found.experts.name)


@pytest.mark.parametrize(
    ("written", "says"),
    [(b"", "--init-expert-location .*counts.pt"), ({"logical_count": torch.zeros(3, 5)}, "holds counts of")],
)
def test_statistics_that_place_no_experts_are_refused_by_the_plan(tmp_path: Path, written: object, says: str) -> None:
    """A start would open the file after it has read the weights."""
    file = tmp_path / "counts.pt"
    if isinstance(written, bytes):
        file.write_bytes(written)
    else:
        torch.save(written, file)
    flags = ["--kt-expert-placement-strategy", "frequency", "--init-expert-location", str(file)]
    argv = [str(described(tmp_path, "model")), *flags, "--kt-gpu-experts-ratio", "0.5"]
    with pytest.raises(ConfigError, match=says):
        planned(EngineConfig.from_args(argv), host(gpus=1))
    error = CliRunner().invoke(app, ["plan", *argv, "--gpu", "24GB"]).exception
    assert isinstance(error, ConfigError) and "--init-expert-location" in str(error)


def test_statistics_that_fit_are_planned(tmp_path: Path) -> None:
    torch.save({"logical_count": torch.ones(4, 8)}, file := tmp_path / "counts.pt")
    flags = ["--kt-expert-placement-strategy", "frequency", "--init-expert-location", str(file)]
    argv = [str(described(tmp_path, "model")), *flags, "--kt-gpu-experts-ratio", "0.5"]
    plan = planned(EngineConfig.from_args(argv), host(gpus=1)).plan
    assert plan.gpu is not None and plan.gpu.statistics == str(file)


def test_plan_only_says_that_the_tokenizer_is_missing(tiny_models, tmp_path: Path) -> None:
    """Where the weights are there, as a start does; before they are, nothing of the sort is."""
    whole = tiny_models["qwen3_moe"]
    for file in whole.glob("*"):
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    shown = CliRunner().invoke(app, ["serve", str(tmp_path), "--plan-only"])
    assert isinstance(shown.exception, CheckpointError) and "tokenizer.json" in str(shown.exception)
    assert "kernel tier" in shown.stdout
    described(tmp_path, "later")
    assert CliRunner().invoke(app, ["serve", str(tmp_path / "later"), "--plan-only"]).exit_code == 0


def test_a_draft_layer_that_the_files_lack_is_not_spoken_of(tiny_models, tmp_path: Path) -> None:
    """config.json has one, and Transformers write none."""
    whole = tiny_models["deepseek_v3"]
    for file in whole.glob("*"):
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    keys = json.loads((whole / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert not [each for each in planned(EngineConfig(model=str(tmp_path)), host()).plan.notices if "draft" in each]
    for asked in ("EAGLE", "NEXTN"):
        with pytest.raises(ConfigError, match=f"--speculative-algorithm {asked}: .*layer: there is no tensor"):
            planned(EngineConfig.from_args([str(tmp_path), "--speculative-algorithm", asked]), host())
    for names, spoken in (({"model.layers.0.x.weight": "a"}, False), ({}, True)):
        (folder := tmp_path / f"index-{spoken}").mkdir()
        (folder / "config.json").write_text(json.dumps(keys))
        if names:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        notices = planned(EngineConfig(model=str(folder)), host()).plan.notices
        assert any("draft layer" in each for each in notices) == spoken
