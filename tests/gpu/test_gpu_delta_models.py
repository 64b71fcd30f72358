"""Whole models of gated delta nets and gated attention, on a GPU or in Triton's interpreter.

On a GPU the reference is the same model in float32 on the CPU, which is compared with Transformers elsewhere, and the
tolerance is the error that bfloat16 has there, half as much again. The interpreter computes in float32, against
Transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from fake_model import FakeTokenizer
from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from gpu_sessions import DECODED, PROMPT, ROWS, Session, check_answers, on_the_cpu, rms
from sessions import Session as PlainSession
from sessions import ours, reference, worst
from sessions import plan as plain_plan
from tandem import LLM, SamplingParams, _core
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.engine.engine import Engine
from tandem.engine.start.parts import EngineParts
from tandem.engine.state.slots import SlotPool
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.models import build

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, needs_triton]
ANSWER = 16  # tokens
PROMPT_IDS = list(range(40, 58))
VARIANTS = ["qwen3_next", "qwen3_next-dense", "qwen3_5_moe_text"]


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 on a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_equal_transformers(
    tiny_models, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Prompts in chunks, several sequences together, decode steps; experts are plain torch's."""
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    for name in ("experts", "mlp"):
        monkeypatch.setattr(ops, name, getattr(TorchOps(), name))
    session = PlainSession(tiny_models[variant], ops=ops)
    assert worst(ours(session), reference(tiny_models[variant])) < 1e-4


@pytest.mark.skipif(not INTERPRETED, reason="the same on a GPU is below, with its own runner")
def test_interpreted_answers_from_snapshots_and_after_preemption(
    tiny_models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's slots and snapshots under the GPU's kernels: greedy text equals that of plain torch."""
    path = tiny_models["qwen3_next"]
    gpu = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    for name in ("experts", "mlp"):
        monkeypatch.setattr(gpu, name, getattr(TorchOps(), name))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    found = []
    for ops in (gpu, TorchOps()):
        llm = interpreted_engine(path, ops)
        first = llm.generate([PROMPT_IDS], sampling)[0].token_ids
        second = llm.generate([[*PROMPT_IDS, *first, 7, 8, 9]], sampling)[0]
        assert second.cached_tokens >= len(PROMPT_IDS) - 4
        crowded = llm.generate([[n, *PROMPT_IDS[:7]] for n in range(3)], sampling)
        assert llm.engine.stats().preemptions > 0
        found.append([first, second.token_ids, *(each.token_ids for each in crowded)])
    assert found[0] == found[1]


def interpreted_engine(path: Path, ops: GpuOps | TorchOps) -> LLM:
    """With fewer pages than three answers take."""
    config = load_model_config(path)
    small = replace(
        plain_plan(), num_pages=8, num_slots=1 + 3 * 3, max_running_requests=3, radix_cache=True, max_step_tokens=32,
    )  # fmt: skip
    model = build(config, small, open_checkpoint(path), ops)
    return LLM.from_engine(Engine.from_parts(EngineParts(small, config, model, FakeTokenizer())))


def check(path: Path, got: torch.Tensor, first: int = 0) -> None:
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    assert rms(got, exact[:, first:]) < 1.5 * rms(theirs[:, first:], exact[:, first:])


@needs_cuda
@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_placement_does_not_change_the_logits(tiny_models, variant, share, graphs, together) -> None:
    check(tiny_models[variant], Session(tiny_models[variant], share, graphs).logits(together))


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_cut_prompts_go_on_from_their_state(tiny_models, variant: str) -> None:
    """Then they are computed anew, as after preemption, in slots that hold something else."""
    path, everyone = tiny_models[variant], list(range(ROWS))
    session = Session(path, 0.5, (1, 8))
    parts = [session.step(everyone, first, count) for first, count in ((0, 3), (3, 9), (12, PROMPT - 12))]
    check(path, torch.cat([*parts, *session.decoded(everyone)], 1))
    again = torch.cat(
        [session.step(everyone, 0, PROMPT + 4), session.step(everyone, PROMPT + 4, DECODED - 4)], 1
    )
    check(path, again)


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_is_filled_up_with_copies_that_fold_nothing(tiny_models, variant: str) -> None:
    """Three rows in a graph of eight give the bits that they give among eight, step after step."""
    whole, few = (Session(tiny_models[variant], 0.5, (8,)) for _ in range(2))
    for session in (whole, few):
        session.step(list(range(ROWS)), 0, PROMPT)
    for i in range(DECODED):
        expected = whole.step(list(range(ROWS)), PROMPT + i, 1)
        assert torch.equal(few.step([0, 1, 2], PROMPT + i, 1), expected[:3])
    assert few.slots[0].eq(0).all()


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_snapshot_on_the_device_is_the_state(tiny_models, variant: str) -> None:
    session, everyone = Session(tiny_models[variant], 0.5, (1, 8)), list(range(ROWS))
    pool, spare = SlotPool(session.slots), ROWS + 1
    session.step(everyone, 0, PROMPT)
    pool.copy(3, spare, PROMPT)  # of sequence 2
    first = torch.cat(session.decoded([2]), 1)
    pool.copy(spare, 3, PROMPT)
    assert torch.equal(torch.cat(session.decoded([2]), 1), first)


@needs_cuda
@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5_moe_text"])
def test_answers_from_snapshots_and_after_preemption(tiny_models, variant: str) -> None:
    path, sampling = tiny_models[variant], SamplingParams(
        temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0
    )
    flags = {
        "device": "cuda", "kt_cpuinfer": 2, "page_size": 4, "kt_gpu_experts_ratio": 0.5, "max_running_requests": 4,
    }  # fmt: skip
    cached = LLM(str(path), **flags)
    prompts = [list(range(40, 90))]
    answers = cached.generate(prompts, sampling)
    prompts.append([*prompts[0], *answers[0].token_ids, 7, 8, 9])
    answers += cached.generate(prompts[1:], sampling)
    assert answers[1].cached_tokens >= len(prompts[1]) - 3 - 2 * 4
    tight = LLM(str(path), **flags, max_total_tokens=160)
    many = [list(range(40 + n, 81 + n)) for n in range(6)]  # nothing is shared, so four do not fit
    answers += tight.generate(many, sampling)
    assert tight.engine.stats().preemptions > 0
    check_answers(path, [*prompts, *many], answers)
