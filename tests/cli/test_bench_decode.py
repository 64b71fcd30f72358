"""`kt bench decode`: its arithmetic, and what it says when a peer is missing."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fake_model import VOCAB, fake_engine, fake_plan
from tandem.architectures.load import load_config
from tandem.bench import decode as bench_decode
from tandem.bench import peers as bench_peers
from tandem.cli.app import app
from tandem.errors import ConfigError
from tandem.planner.forecast.bound import bytes_per_step
from tandem.spec.model_config import STORED, ModelConfig
from tandem.spec.stored import StoredFormat, StoredFormats


@pytest.fixture(scope="module")
def demo_config(demo_dir) -> ModelConfig:
    return load_config(demo_dir)


def test_one_token_reads_its_experts_and_many_read_them_all(demo_config) -> None:
    plan = fake_plan(dtype="bfloat16", expert_format="bf16")
    one = bytes_per_step(demo_config, plan.dtype, plan.expert_format, 1)
    assert one == pytest.approx(348e6, rel=0.01)
    many = bytes_per_step(demo_config, plan.dtype, plan.expert_format, 10_000)
    assert many == pytest.approx(demo_config.weight_bytes("bfloat16", "bf16"), rel=1e-6)


def test_every_step_counts_one_token_per_sequence(monkeypatch) -> None:
    """The clock advances one second per reading, so a window of steps takes one; memory is read once a window."""
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(bench_decode, "perf_counter", lambda: float(next(ticks)))
    readings = iter((30.0, 50.0, 40.0))
    monkeypatch.setattr(bench_decode, "_read_gbps", lambda _: next(readings))
    engine = fake_engine(num_pages=128)
    request = bench_decode.DecodeFlags("demo", ("BF16",), (3,), 5, 3, False, False, None)
    assert bench_decode.decode_rate(engine, VOCAB, 3, request) == (15.0, 40.0)
    assert not engine.has_work() and engine.stats().running == 0


def test_all_sequences_are_in_every_window_however_long_their_prompts_take(monkeypatch) -> None:
    ticks = iter(range(1_000_000))
    monkeypatch.setattr(bench_decode, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(bench_decode, "_read_gbps", lambda _: 40.0)
    engine = fake_engine(num_pages=256)  # 16 tokens a step: the first prompts are done long before the last
    request = bench_decode.DecodeFlags("demo", ("BF16",), (8,), 2, 1, False, False, None)
    assert bench_decode.decode_rate(engine, VOCAB, 8, request) == (16.0, 40.0)


def test_sequences_that_never_run_together_are_an_error() -> None:
    request = bench_decode.DecodeFlags("demo", ("BF16",), (8,), 2, 1, False, False, None)
    with pytest.raises(ConfigError, match="smaller --batch"):
        bench_decode.decode_rate(fake_engine(max_running_requests=4, num_pages=256), VOCAB, 8, request)


def test_rows_are_written_as_json(monkeypatch, tmp_path, capsys) -> None:
    request = bench_decode.DecodeFlags("demo", ("BF16",), (1,), 4, 1, False, False, None)
    row = bench_decode._row(request, "tandem", "bf16", 1, 60.0, 100.0, 34.8)
    assert row.share == 0.6 and row.config == "demo"
    monkeypatch.setattr(bench_decode, "measure", lambda *_: [row])
    monkeypatch.setattr(bench_decode, "_stored", lambda _: StoredFormats())
    bench_decode.run(request, tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [dataclasses.asdict(row)]
    assert "60%" in capsys.readouterr().out


def test_what_takes_seconds_is_told_before_it_is_done(monkeypatch) -> None:
    """Nothing was shown for 20 seconds: a user does not know if anything happens."""
    parts = SimpleNamespace(plan=fake_plan(expert_format="bf16"), model_config=SimpleNamespace(vocab=VOCAB))
    told, loaded = [], []
    monkeypatch.setattr(bench_decode, "load_parts", lambda _: loaded.append(len(told)) or parts)
    monkeypatch.setattr(bench_decode.Engine, "from_parts", lambda _: None)
    monkeypatch.setattr(bench_decode, "decode_rate", lambda *_: (float(len(told)), 1.0))
    monkeypatch.setattr(bench_decode, "bytes_per_step", lambda *_: 1.0)
    monkeypatch.setattr(bench_decode, "model_directory", lambda name: name)
    monkeypatch.setattr(bench_decode, "_stored", lambda _: StoredFormats())
    request = bench_decode.DecodeFlags("demo", ("BF16",), (1, 8), 4, 1, False, False, 2)
    rows = list(bench_decode.measure(request, told.append))
    assert told == ["loading demo with BF16 experts", "measuring BF16, batch 1", "measuring BF16, batch 8"]
    assert loaded == [1] and [row.tok_s for row in rows] == [2.0, 3.0]


def test_a_quantised_file_is_measured_as_it_is_stored(monkeypatch, capsys) -> None:
    """Without --format its experts were decoded to bf16, and that was measured."""
    experts = StoredFormat("q4_k", quantised=True, bytes_per_weight=0.5, shares=(("q4_k", 1.0),), methods=("GGUF",))
    parts = SimpleNamespace(plan=fake_plan(expert_format=STORED), model_config=SimpleNamespace(vocab=VOCAB))
    configs, bounds = [], []
    monkeypatch.setattr(bench_decode, "load_parts", lambda config: configs.append(config) or parts)
    monkeypatch.setattr(bench_decode.Engine, "from_parts", lambda _: None)
    monkeypatch.setattr(bench_decode, "decode_rate", lambda *_: (2.0, 1.0))
    monkeypatch.setattr(bench_decode, "bytes_per_step", lambda *given: bounds.append(given[-1].experts.name) or 1.0)
    monkeypatch.setattr(bench_decode, "model_directory", lambda name: name)
    monkeypatch.setattr(bench_decode, "_stored", lambda _: StoredFormats(experts=experts))
    request = bench_decode.DecodeFlags("m.gguf", (None,), (1,), 4, 1, False, False, 2, int8_activations=True)
    (row,) = bench_decode.measure(request)
    assert (row.bench, row.format, bounds) == ("tandem, int8 activations", "q4_k", ["q4_k"])
    assert configs[0].kt_method is None and configs[0].kt_int8_activations
    monkeypatch.setattr(bench_decode, "measure", lambda *_: [row])
    monkeypatch.setattr(bench_decode, "resolve_model", lambda name: name)
    bench_decode.run(request, None)
    assert "Q4_K A8: KL " in capsys.readouterr().out


def test_a_missing_peer_is_named_before_anything_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda _: None)
    request = bench_decode.DecodeFlags("demo", ("BF16",), (1,), 4, 1, False, True, None)
    with pytest.raises(ConfigError, match=r"--llama-cpp needs llama-cpp-python: pip install"):
        bench_decode.run(request, None)


@pytest.mark.parametrize("other", ["--config qwen3-30b-a3b", "--speculative NGRAM", "--explain"])
def test_int8_activations_are_of_a_models_files(other: str) -> None:
    done = CliRunner().invoke(app, f"bench decode --kt-int8-activations {other}".split())
    assert isinstance(done.exception, ConfigError) and "leave out --config" in str(done.exception)
