"""The bound that `kt bench prefill` prints, against sums by hand; and what it says without a GPU."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tandem.bench.architectures import named_config
from tandem.bench.prefill import Rates, Work, work_of
from tandem.bench.probes import GpuSpeeds
from tandem.cli.app import app
from tandem.errors import ConfigError
from tandem.machine.machine import Machine

GPU = GpuSpeeds(4000.0, 50.0, 50.0, 8e14, 1e-6, 1e-5)
RATES = Rates(dram_gbps=100.0, cpu_flops=2e13, gpu=GPU)


def test_all_on_the_gpu_is_bound_by_its_operations_or_its_bytes() -> None:
    assert Work(8e14, 1.0, 8e14, 1.0, 1.0).bound_seconds(RATES) == pytest.approx(2.0)
    assert Work(1.0, 4e12, 1.0, 4e12, 1.0).bound_seconds(RATES) == pytest.approx(2.0)


def test_bus_and_cpu_share_what_is_elsewhere() -> None:
    """100 GB of experts: 2 s over the bus, or 1 s of DRAM: together 2/3 s, to a hundredth of the experts."""
    work = Work(1.0, 1.0, 1e12, 1e11, 0.0)
    assert 2 / 3 <= work.bound_seconds(RATES) <= 2 / 3 + 0.02
    half = Work(1.0, 1.0, 1e12, 1e11, 0.5)
    assert half.bound_seconds(RATES) == pytest.approx(work.bound_seconds(RATES) / 2)
    slow_cpu = Work(1.0, 1.0, 2e14, 1e11, 0.0)  # 10 s of operations
    assert 2 * 10 / 12 <= slow_cpu.bound_seconds(RATES) <= 2 * 10 / 12 + 0.02


def test_the_work_of_a_prompt() -> None:
    config = named_config("qwen3-30b-a3b", None)
    work, longer = (work_of(config, config.expert_bytes("int4"), tokens, 0.5) for tokens in (2048, 4096))
    assert work.expert_flops == 2 * 2048 * 8 * 3 * 2048 * 768 * 48 == longer.expert_flops / 2
    everyone = 48 * 128 * config.expert_bytes("int4")
    assert 0.99 * everyone < work.expert_bytes <= longer.expert_bytes <= everyone
    assert work_of(config, config.expert_bytes("int4"), 1, 0.5).expert_bytes == pytest.approx(everyone / 16)
    attention = 48 * 4 * 32 * 128 * 2048 * 2049 / 2
    dense = 2 * 2048 * (config.dense_params - config.vocab * config.hidden)
    assert work.dense_flops == pytest.approx(dense + attention + 2 * config.vocab * config.hidden)
    assert longer.dense_flops > 2 * work.dense_flops


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "detect", staticmethod(lambda: Machine.__new__(Machine)))
    monkeypatch.setattr(Machine, "gpus", (), raising=False)
    result = CliRunner().invoke(app, ["bench", "prefill", "--tokens", "64"])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError | SystemExit)
