"""An engine whose model is in stages answers as one on the CPU: prompts in chunks, graphs, prefixes, preemption."""

from __future__ import annotations

import pytest
import torch

from fake_model import check_pages, request, run, token_ids
from staged_engines import PROMPTS, staged, whole
from staged_sessions import without_gpu
from tandem import _core
from tandem.engine.stages.runner import StagedRunner
from tandem.models.staged import StagedModel


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_next"])
def test_answers_are_those_of_the_whole_model(monkeypatch, tiny_models, variant: str) -> None:
    """Twice, so that prefixes are found again; of delta nets from copied slots."""
    path, pool, calls = tiny_models[variant], _core.WorkerPool([-1, -1]), list[str]()
    asks = [request(name, prompt, max_tokens=12, ignore_eos=True) for name, prompt in PROMPTS.items()]
    expected = {name: token_ids(outputs) for (name, _), outputs in run(whole(path, pool), *asks).items()}
    without_gpu(monkeypatch, calls)
    engine = staged(path, pool, (1, 2, 3, 4))  # a CPU's delta nets do not know rows that fill a graph up
    assert isinstance(engine.gpu_runner, StagedRunner)
    for _ in range(2):
        got = {name: token_ids(outputs) for (name, _), outputs in run(engine, *asks).items()}
        assert got == expected
        check_pages(engine)
    assert engine.stats().cached_tokens > 0 and calls.count("stage 0") == calls.count("stage 1") > 0


def test_a_preempted_sequence_begins_again_in_all_stages(monkeypatch, tiny_models) -> None:
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    asks = [request(name, prompt, max_tokens=20, ignore_eos=True) for name, prompt in PROMPTS.items()]
    expected = {name: token_ids(outputs) for (name, _), outputs in run(whole(path, pool), *asks).items()}
    without_gpu(monkeypatch, [])
    engine = staged(path, pool, num_pages=14)
    got = {name: token_ids(outputs) for (name, _), outputs in run(engine, *asks).items()}
    assert got == expected and engine.stats().preemptions > 0


def test_a_failing_stage_costs_its_step_alone(monkeypatch, tiny_models) -> None:
    path, pool = tiny_models["qwen3_moe"], _core.WorkerPool([-1, -1])
    without_gpu(monkeypatch, [])
    engine = staged(path, pool)
    layer = StagedModel.layer

    def failing(self, p, index, states) -> None:
        if index == len(self.layers) - 1:
            raise RuntimeError("CUDA out of memory")
        layer(self, p, index, states)

    with monkeypatch.context() as broken:
        broken.setattr(StagedModel, "layer", failing)
        outputs = run(engine, request("a", PROMPTS["a"]))
    assert outputs[("a", 0)][-1].finish_reason == "error"
    again = run(engine, request("b", PROMPTS["b"], max_tokens=4, ignore_eos=True))
    assert len(token_ids(again[("b", 0)])) == 4
    check_pages(engine)


def test_states_of_both_stages_have_the_model_s_order(monkeypatch, tiny_models) -> None:
    without_gpu(monkeypatch, [])
    engine = staged(tiny_models["qwen3_next"], _core.WorkerPool([-1, -1]))
    layout = engine.model_config.state_layout("float32", 8)
    shapes = [[tuple(array.shape[1:]) for array in arrays] for arrays in engine.gpu_runner._states]
    assert len(shapes) == len(layout.states) and all(shapes)
    assert all(isinstance(array, torch.Tensor) for arrays in engine.gpu_runner._states for array in arrays)
