"""Families that are data over known mechanisms, on a GPU or in Triton's interpreter.

Every expert is chosen where routers choose with a bias: rounding changes who is chosen, which says nothing of kernels.
On a GPU the reference is the same model in float32 on the CPU, which is compared with Transformers elsewhere, and the
tolerance is the error that bfloat16 has there, half as much again. The interpreter computes in float32, against
Transformers.
"""

from __future__ import annotations

import json
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hub_copies
from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from gpu_sessions import PROMPT, ROWS, Session, on_the_cpu, rms
from sessions import Session as PlainSession
from sessions import ours, reference, worst
from tandem import _core
from tandem.checkpoint import load_model_config
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.gpu, needs_triton]
VARIANTS = [
    "dots1-window", "ernie4_5_moe", "gemma4_text", "glm4_moe_lite", "hy_v3", "laguna", "mimo_v2_flash", "minimax_m2",
    "mistral4", "afmoe", "exaone_moe", "hunyuan_v1_moe", "laguna-element", "lfm2_moe",
    "granitemoeshared", "granitemoehybrid", "nemotron_h", "nemotron_h-latent", "kimi_linear", "solar_open",
    "bailing_hybrid", "bailing_hybrid-plain", "glm5_next", "glm5_next-pools", "qwen4_exp", "qwen4_exp-tables",
]  # fmt: skip
FOLDING = [
    "qwen3_next", "granitemoehybrid", "nemotron_h", "nemotron_h-latent", "kimi_linear", "lfm2_moe", "bailing_hybrid",
    "glm5_next", "qwen4_exp",
]  # fmt: skip
"""Whose memory of a sequence has a constant size, in all layers but some."""

COPIES = {
    "bailing_moe_v2": ("glm4_moe", hub_copies.ling),
    "glm4v_moe": ("glm4_moe", partial(hub_copies.nested, model_type="glm4v_moe", inner="glm4v_moe_text")),
    "kimi_vl": ("deepseek_v3-plain", partial(hub_copies.nested, model_type="kimi_vl", inner="deepseek_v3")),
    "qwen3_vl_moe": ("qwen3_moe", partial(hub_copies.nested, model_type="qwen3_vl_moe", inner="qwen3_vl_moe_text")),
    "qwen3_omni_moe": ("qwen3_moe", hub_copies.omni),
}
"""Families that are another's text, and that one."""


@pytest.fixture(scope="module")
def copied(tiny_models, tmp_path_factory) -> Callable[[str], Path]:
    """A copy of one of `COPIES`, or Step-3.5."""

    @cache
    def path_of_copy(name: str) -> Path:
        path = tmp_path_factory.mktemp("copies") / name
        if name == "step3p5":
            return every_expert(hub_copies.step_text(hub_copies.step(path.with_name("whole")), path))
        source, made = COPIES[name]
        return made(path_of(tiny_models, source), path)

    return path_of_copy


def every_expert(path: Path) -> Path:
    keys = hub_copies.keys_of(path)
    (path / "config.json").write_text(json.dumps(keys | {"num_experts_per_tok": keys["n_routed_experts"]}))
    return path


def path_of(tiny_models, variant: str) -> Path:
    config = load_model_config(tiny_models[variant])
    looks = any(getattr(mixer, "index", None) is not None for mixer in config.mixers)
    return tiny_models.unchosen(variant) if looks or config.moe.router.has_bias else tiny_models[variant]


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 on a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_equal_transformers(tiny_models, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Prompts in chunks, several sequences together, decode steps; experts are plain torch's."""
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    for name in ("experts", "mlp"):
        monkeypatch.setattr(ops, name, getattr(TorchOps(), name))
    assert worst(ours(PlainSession(tiny_models[variant], ops=ops)), reference(tiny_models[variant])) < 1e-4


@needs_cuda
@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_placement_does_not_change_the_logits(tiny_models, variant, share, graphs, together) -> None:
    check(path_of(tiny_models, variant), share, graphs, together)


@needs_cuda
@pytest.mark.parametrize("variant", FOLDING)
def test_rows_that_fill_up_a_graph_change_nothing(tiny_models, variant: str) -> None:
    """Five rows in a graph of eight give the bits that they give among eight, step after step, and the three others go
    on from where they were."""
    whole, few = (Session(path_of(tiny_models, variant), 1.0, (8,)) for _ in range(2))
    everyone = list(range(ROWS))
    for session in (whole, few):
        session.step(everyone, 0, PROMPT)
    expected = torch.cat(whole.decoded(everyone), 1)
    assert torch.equal(torch.cat(few.decoded(everyone[:5]), 1), expected[:5])
    assert torch.equal(torch.cat(few.decoded(everyone[5:]), 1), expected[5:])


@needs_cuda
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("name", [*COPIES, "step3p5"])
def test_copies_of_other_families_compute_the_same(copied, name: str, graphs: tuple[int, ...]) -> None:
    if name == "step3p5" and "step3p7" not in CONFIG_MAPPING_NAMES:
        pytest.skip("this Transformers does not have it")
    check(copied(name), 0.5, graphs, together=False)


def check(path: Path, share: float, graphs: tuple[int, ...], together: bool) -> None:
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    got = Session(path, share, graphs).logits(together)
    assert rms(got, exact) < 1.5 * rms(theirs, exact)
