"""Whole models with latent attention: DeepSeek-V2 and V3, with YaRN and without, on a GPU or in Triton's interpreter.

On a GPU the reference is the same model in float32 on the CPU, which is compared with Transformers elsewhere, and the
tolerance is the error that bfloat16 has there, half as much again. The interpreter computes in float32, against
Transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from gpu_sessions import DECODED, PROMPT, ROWS, Session, by_row, on_the_cpu, rms
from sessions import Session as PlainSession
from sessions import ours, reference, worst
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.mechanisms.latent.gpu import decode, heads, prompt

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, needs_triton]
VARIANTS = ["deepseek_v3", "deepseek_v3-plain", "deepseek_v2", "deepseek_v2-greedy"]


@pytest.fixture
def from_keys_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of five rows and more are not absorbed, and prefixes are cut into pieces."""
    monkeypatch.setattr(heads, "FEW_ROWS", 4)
    for name, value in {"PIECE": 16, "ROUND_ROWS": 8, "ROUND_KEYS": 8}.items():
        monkeypatch.setattr(prompt, name, value)


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 on a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_equal_transformers(
    tiny_models, monkeypatch: pytest.MonkeyPatch, from_keys_of_each_head: None, variant: str
) -> None:
    """Prompts in chunks on a cached prefix, several sequences together, decode steps; experts are plain torch's."""
    monkeypatch.setattr(decode, "PARTS", 16)
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    for name in ("experts", "mlp"):
        monkeypatch.setattr(ops, name, getattr(TorchOps(), name))
    session = PlainSession(tiny_models[variant], ops=ops)
    assert worst(ours(session), reference(tiny_models[variant])) < 1e-4


def check(path: Path, got: Tensor, wanted: Tensor | None = None) -> None:
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    assert rms(got, exact if wanted is None else wanted) < 1.5 * rms(theirs, exact)


@needs_cuda
@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_placement_does_not_change_the_logits(tiny_models, variant, share, graphs, together) -> None:
    check(tiny_models[variant], Session(tiny_models[variant], share, graphs).logits(together))


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_from_keys_of_each_head(tiny_models, from_keys_of_each_head: None, variant: str) -> None:
    """A prompt at once, and cut on a cached prefix; then all of it anew, as after preemption, while others decode."""
    path, everyone = tiny_models[variant], list(range(ROWS))
    check(path, Session(path, 0.5, (1, 8)).logits(True))
    session = Session(path, 0.5, (1, 8))
    parts = [session.step(everyone, first, count) for first, count in ((0, 3), (3, 9), (12, PROMPT - 12))]
    check(path, torch.cat([*parts, *session.decoded(everyone)], 1))
    again = torch.cat(
        [session.step(everyone, 0, PROMPT + 4), session.step(everyone, PROMPT + 4, DECODED - 4)], 1
    )
    check(path, again)


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_cut_prompts_give_the_same_rows_in_absorbed_form(tiny_models, variant: str) -> None:
    """Chunks of few rows are asked like rows that decode, so attention is the same however a prompt is cut; what is
    left is PyTorch's and the experts' order of sums."""
    path = tiny_models[variant]
    session = Session(path, 1.0, ())
    parts = [session.step([2], first, count) for first, count in ((0, 1), (1, 7), (8, PROMPT - 8))]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    got = by_row(torch.cat(parts, 1)[0], exact[2, :PROMPT])
    assert got.median() < 2 * by_row(theirs, exact).median()


@needs_cuda
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v3-plain", "deepseek_v2-greedy"])
def test_foresight_changes_no_bit(tiny_models, variant, share) -> None:
    found = []
    for foresight in (False, True):
        session = Session(tiny_models[variant], share, (1, 4, 8), foresight=foresight)
        session.step(list(range(ROWS)), 0, PROMPT)
        found.append(torch.cat([session.step(rows, PROMPT, 1) for rows in ([0, 1, 2], [5])]))
        hints = session.side.handoff.hints()
        assert (0 < hints.hits <= hints.hinted) if foresight else hints == (0, 0, 0)
    assert torch.equal(*found)
