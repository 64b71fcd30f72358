"""A model in stages computes what the whole one does, bit for bit, kernel by kernel and in graphs of stages."""

from __future__ import annotations

import pytest
import torch

from sessions import Session, ours, prompts
from staged_sessions import StagedSession, logits_of, without_gpu
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps

VARIANTS = ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "glm4_moe", "minimax_m2"]
TIER = _core.supported_tiers()[-1]


@pytest.fixture(scope="module")
def pool() -> _core.WorkerPool:
    return _core.WorkerPool([-1, -1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_give_the_bits_of_one(tiny_models, pool, variant: str) -> None:
    path = tiny_models[variant]
    whole = ours(Session(path, "bfloat16", ops=CpuOps(pool, TIER)))
    staged = ours(StagedSession(path, 2, [CpuOps(pool, TIER) for _ in range(2)], "bfloat16"))
    assert all(map(torch.equal, staged, whole))


@pytest.mark.parametrize("stages", [2, 3])
def test_graphs_of_stages_give_the_bits_of_kernels(monkeypatch, tiny_models, pool, stages: int) -> None:
    """Rows that fill a graph up, too; each stage's graph runs once a step, in order."""
    path, calls = tiny_models["glm4_moe"], list[str]()
    without_gpu(monkeypatch, calls)
    eager, session = (StagedSession(path, stages, [CpuOps(pool, TIER) for _ in range(stages)]) for _ in range(2))
    runner = session.runner((1, 4))
    first = [(s, tokens[:9]) for s, tokens in enumerate(prompts()) if len(tokens) > 9]
    assert torch.equal(logits_of(runner, session.batch(first)), torch.cat(eager.step(first)))
    assert not calls
    for position in range(9, 14):
        for group in (first, first[:1]):
            step = [(s, [prompts()[s][position]]) for s, _ in group]
            calls.clear()
            assert torch.equal(logits_of(runner, session.batch(step)), torch.cat(eager.step(step)))
            assert calls == [f"stage {number}" for number in range(stages)]


def test_each_stage_counts_its_own_experts(monkeypatch, tiny_models) -> None:
    """In graphs, whose copies do not count, and kernel by kernel."""
    without_gpu(monkeypatch, [])
    session = StagedSession(tiny_models["glm4_moe"], 2, [TorchOps(), TorchOps()], counted=True)
    runner = session.runner((4,))
    first = [(s, tokens[:9]) for s, tokens in enumerate(prompts()) if len(tokens) > 9]
    logits_of(runner, session.batch(first))
    for position in range(9, 12):
        logits_of(runner, session.batch([(s, [prompts()[s][position]]) for s, _ in first]))
    tokens, top_k = session.usage.read().tokens, session.config.moe.router.top_k
    assert tokens.shape == session.usage.shape and tokens.sum(1).eq(len(first) * 12 * top_k).all()
    assert session.usage.sides().cpu_tokens.eq(tokens.sum(1)).all()


def test_each_stage_has_its_own_layers_and_states(tiny_models) -> None:
    session = StagedSession(tiny_models["qwen3_next"], 2, [TorchOps(), TorchOps()])
    ops = [{id(block.residual.ops) for block in layer.blocks} for layer in session.model.layers]
    assert [each.pop() for each in ops] == [
        id(stage.ops) for stage in session.model.stages for _ in range(stage.first, stage.end)
    ]
    assert len(session.states) == len(session.config.states)
