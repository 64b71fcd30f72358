"""Steps that are run before the start, so that their kernels are loaded: every size once. Nothing is left of them."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sessions import plan
from tandem import _core
from tandem.architectures.load import load_config
from tandem.checkpoint import open_checkpoint
from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.sampling import logits
from tandem.engine.start.warm_kernels import kinds_of_layers, row_counts, warm_kernels
from tandem.engine.state.arrays import allocate
from tandem.engine.step.batch import StepShape
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.kernel_loads import KernelLoads
from tandem.models import build
from tandem.models.batch import ForwardBatch
from tandem.spec.state import Pages
from tiny import save_tiny

PAGE, PAGES, MOST, RUNNING, SLOTS = 16, 4, 40, 6, 3
CPU = torch.device("cpu")
EACH_KIND = (
    "qwen3_next", "deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_linear", "bailing_hybrid", "granitemoehybrid",
    "lfm2_moe", "gpt_oss", "mistral4", "nemotron_h",
)  # fmt: skip


class AllOnCpu:
    """An `ExpertStore` of hybrids whose experts are all in CPU memory, so that no GPU is needed."""

    def __init__(self, ops: CpuOps, handoff: Handoff) -> None:
        self._ops, self._handoff = ops, handoff

    def layer(self, index: int, count: int, width: int, fmt: str, *activation: Any) -> HybridExperts:
        cpu = self._ops.experts(count, self._handoff.sizes.hidden, width, fmt, *activation)
        return HybridExperts(torch.full((count,), -1, dtype=torch.int32), None, cpu, self._handoff)


class Watched:
    """A model that notes its steps and layers."""

    def __init__(self, model: Any) -> None:
        self._model, self.layers, self.depth = model, model.layers, model.depth
        self.rows, self.indices = list[tuple[int, int]](), set[int]()

    def begin(self, batch: ForwardBatch) -> Any:
        self.rows.append((len(batch.input_ids), len(batch.seq_lens)))
        return self._model.begin(batch)

    def layer(self, p: Any, index: int, states: Any) -> None:
        self.indices.add(index)
        self._model.layer(p, index, states)

    def logits(self, p: Any, states: Any) -> torch.Tensor:
        return self._model.logits(p, states)


def warmed(path: Path, seconds: float) -> tuple[Watched, ExpertUsage, Handoff]:
    model, usage, handoff, _, _ = with_state(path, seconds)
    return model, usage, handoff


def with_state(path: Path, seconds: float) -> tuple[Watched, ExpertUsage, Handoff, list[Any], torch.Tensor]:
    """Also page arrays of each state, and the slots' bytes, after the steps."""
    config, ops = load_config(path), CpuOps(_core.WorkerPool([-1, -1]), "scalar")
    top_k = config.moe.router.top_k + config.moe.fusible_shared
    handoff = Handoff(HandoffSizes(8, MOST, config.expert_channels, top_k), CPU, 20.0)
    usage = ExpertUsage(len(config.moe_layers), config.moe.router.num_experts)
    store: Any = AllOnCpu(ops, handoff)
    built = build(config, plan("bfloat16"), open_checkpoint(path), ops, None, store, usage=usage)
    layout = config.state_layout("bfloat16", PAGE)
    model, states = Watched(built), allocate(layout, PAGES, None, SLOTS)
    runner: Any = GpuRunner(model, states.arrays, handoff, GraphPlan((), PAGES), StepShape(PAGE, MOST), usage=usage)
    numbers = SimpleNamespace(
        max_step_tokens=MOST, context_length=1000, max_running_requests=RUNNING, page_size=PAGE
    )
    warm_kernels(
        runner, SimpleNamespace(plan=numbers, model=model, model_config=config, handoff=handoff, begin_step=None),
        seconds,
    )
    assert runner._model is model and runner._usage is usage and runner._live is None
    kept = zip(layout.states, states.arrays, strict=True)
    pages = [array for state, arrays in kept if isinstance(state, Pages) for array in arrays]
    return model, usage, handoff, pages, states.slots


def test_sizes_are_spread_and_powers_of_two_come_first() -> None:
    for most in (1, 2, 7, 300, 8192):
        sizes = row_counts(most)
        assert len(set(sizes)) == len(sizes) and min(sizes) == 1 and max(sizes) == most
        ordered = sorted(sizes)
        assert all(b <= 1.25 * a + 1 for a, b in pairwise(ordered))
        powers = [size for size in sizes if size & (size - 1) == 0]
        assert sizes[: len(powers)] == sorted(powers)


def test_every_size_of_prompts_and_batches_runs_once_with_a_layer_of_each_kind(tiny_models: Any) -> None:
    model, _, _ = warmed(tiny_models["qwen3_moe"], 600.0)
    prompts = sorted(rows for rows, sequences in model.rows if sequences == 1 and rows > 1)
    batches = sorted(rows for rows, sequences in model.rows if sequences == rows)
    assert prompts == sorted(set(row_counts(MOST)) - {1})
    assert batches == sorted([1, *row_counts(RUNNING)])
    assert model.indices == set(kinds_of_layers(model, load_config(tiny_models["qwen3_moe"]).layers))
    assert len(model.indices) < model.depth


def test_steps_before_the_start_are_neither_counted_nor_computed_by_the_cpu(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU counts as many rows as `begin` says, of all steps until the next one; a CPU counts all."""
    counted, begin = list[int | torch.Tensor](), ExpertUsage.begin
    monkeypatch.setattr(ExpertUsage, "begin", lambda self, rows: counted.append(rows) or begin(self, rows))
    _, _, handoff = warmed(tiny_models["qwen3_moe"], 600.0)
    assert counted == [0] and "failed" not in caplog.text
    assert handoff.times().posts == 0 and handoff.copies.computes


def test_rows_with_masks_are_chosen_from_before_the_start(tiny_models: Any, monkeypatch: Any) -> None:
    """Structured output has kernels of its own; they were the driver's late loads."""
    rows, original = list[int](), logits.without_forbidden_rows
    monkeypatch.setattr(logits, "without_forbidden_rows", lambda *of: rows.append(len(of[0])) or original(*of))
    warmed(tiny_models["qwen3_moe"], 600.0)
    assert rows and all(0 < count <= RUNNING for count in rows)


@pytest.mark.parametrize("variant", EACH_KIND)
def test_every_mechanism_runs_them_and_they_touch_nobody_s_state(
    tiny_models: Any, variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They use page 0, which nobody has yet, and slot 0, which is nobody's."""
    _, _, _, pages, slots = with_state(tiny_models[variant], 600.0)
    assert "failed" not in caplog.text
    assert all(not array[1:].any() for array in pages) and not slots[1:].any()
    assert any(array[0].any() for array in pages) or slots[0].any()


def test_layers_that_take_another_s_choice_run_behind_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The layers that choose are of one kind, and only the first would be run."""
    choices, sparse = ["full"] * 3 + ["shared"] * 3 + ["full", "shared"], ["dense"] + ["sparse"] * 7
    save_tiny("glm_moe_dsa", tmp_path / "model", num_hidden_layers=8, indexer_types=choices, mlp_layer_types=sparse)
    model, _, _ = warmed(tmp_path / "model", 600.0)
    assert "failed" not in caplog.text
    assert {2, 3} <= model.indices and len(model.indices) < 8


def test_they_end_when_their_time_is_up(tiny_models: Any) -> None:
    model, _, _ = warmed(tiny_models["qwen3_moe"], 0.0)
    assert len(model.rows) == 0


def test_layers_of_one_kind_are_run_once() -> None:
    def layer(gpu: object, cpu: object) -> Any:
        return SimpleNamespace(moe=SimpleNamespace(experts=SimpleNamespace(gpu=gpu, cpu=cpu)))

    model = SimpleNamespace(
        layers=[SimpleNamespace(moe=None), *[layer(1, 1)] * 2, layer(None, 1), layer(1, 1)]
    )
    assert kinds_of_layers(model, ["dense", "moe", "moe", "moe", "moe"]) == [0, 1, 3]


def test_kernels_are_counted_and_late_ones_named(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = KernelLoads()
    loads.begin()
    loads.end("Triton", "early")
    loads.ready()
    assert (loads.count, loads.late, caplog.text, capsys.readouterr().out) == (1, 0, "", "")
    with caplog.at_level(logging.WARNING):
        loads.begin()
        loads.end("NVRTC", "post, collect")
    assert (loads.count, loads.late) == (2, 1) and "post, collect" in caplog.text and "NVRTC" in caplog.text


def test_a_long_compilation_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    loads = KernelLoads()
    loads._shown -= 60.0
    loads.begin()
    loads._threads.began -= 60.0
    loads.end("Triton", "slow")
    assert "compiling GPU kernels: 1 in 60 s, the last is slow" in capsys.readouterr().out
    loads.ready()
    assert "compiled 1 kinds of GPU kernels in 60 s" in capsys.readouterr().out
