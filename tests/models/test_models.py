"""Logits of every family against Transformers, on tiny random models: one runner over all of them.

What is compared: a prompt at once, in chunks, token by token through the cache, and several sequences of different
lengths and phases in one batch; per-expert and fused checkpoints; shared experts fused and not.
"""

from __future__ import annotations

import pytest
import torch

from covering import one_of_each_type, pairwise
from sessions import Session, ours, plan, prompts, reference, rms, worst
from tandem import _core
from tandem.architectures import FAMILIES
from tandem.architectures.load import config_from_dict, load_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import ConfigError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.reference import TorchOps
from tandem.models import build
from tiny import VARIANTS

KNOWN = ", ".join(sorted(FAMILIES))
SHARED = (
    "glm4", "qwen2", "deepseek", "dots1", "hy_v3", "mistral4", "ernie4_5_moe", "laguna", "solar",
)  # fmt: skip
"""Have shared experts."""


WAYS = ("torch", *_core.supported_tiers())
QUESTIONS = "chunked", "at once", "bfloat16"


def rows(question: str) -> pytest.MarkDecorator:
    """Every variant meets every way and every question; the rest of the product is full."""
    made = [row for row in pairwise(QUESTIONS, WAYS, VARIANTS) if row.values[0] == question]
    cases = [pytest.param(*row.values[1:], marks=row.marks) for row in made]
    return pytest.mark.parametrize(("ops", "variant"), cases, indirect=["ops"])


def in_turn(variants: list[str]) -> pytest.MarkDecorator:
    """Every variant in plain torch and in one tier, every tier in some; the rest is full."""
    cases = [
        pytest.param(way, variant, marks=() if not w or w == i % len(WAYS[1:]) + 1 else pytest.mark.full)
        for i, variant in enumerate(variants)
        for w, way in enumerate(WAYS)
    ]
    return pytest.mark.parametrize(("ops", "variant"), cases, indirect=["ops"])


@pytest.fixture(scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    """Plain torch, and the C++ core in every tier that this machine runs."""
    if request.param == "torch":
        return TorchOps()
    return CpuOps(_core.WorkerPool([-1, -1]), request.param)


@rows("chunked")
def test_float32_logits_equal_transformers(tiny_models, ops, variant):
    assert worst(ours(Session(tiny_models[variant], ops=ops)), reference(tiny_models[variant])) < 1e-4


@rows("at once")
def test_prefill_at_once_equals_transformers(tiny_models, ops, variant):
    session = Session(tiny_models[variant], ops=ops)
    got = [session.step([(s, prompt)])[0] for s, prompt in enumerate(prompts())]
    assert worst(got, reference(tiny_models[variant])) < 1e-4


@pytest.mark.parametrize("variant", one_of_each_type(VARIANTS))
def test_fused_checkpoint_gives_the_same_bits(tiny_models, variant):
    each, fused = Session(tiny_models[variant]), Session(tiny_models.fused(variant))
    for a, b in zip(ours(each), ours(fused), strict=True):
        assert torch.equal(a, b)


@in_turn([v for v in VARIANTS if v.startswith(SHARED)])
def test_shared_experts_apart_equal_transformers(tiny_models, ops, variant):
    session = Session(tiny_models[variant], fuse=False, ops=ops)
    assert worst(ours(session), reference(tiny_models[variant])) < 1e-4


@rows("bfloat16")
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16_is(tiny_models, ops, variant):
    """The tolerance is Transformers' own rounding error; half as much again, since rounding points differ.

    Where experts are chosen with a bias, all of them are: scores of a sigmoid lie close together, so rounding changes
    who is chosen, and such a change says nothing about how exactly either side computes."""
    path = tiny_models[variant]
    if load_model_config(path).moe.router.has_bias:
        path = tiny_models.unchosen(variant)
    exact = reference(path)
    theirs = rms(reference(path, torch.bfloat16), exact)
    assert rms(ours(Session(path, "bfloat16", ops=ops)), exact) < 1.5 * theirs


def test_an_unknown_family_is_refused_with_what_is_missing(tiny_models):
    config = load_config(tiny_models["olmoe"])
    with pytest.raises(ConfigError, match="'gpt2' is not supported: .* `kt models` lists the types that run"):
        config_from_dict({"model_type": "gpt2"})
    object.__setattr__(config, "model_type", "gpt2")
    with pytest.raises(ConfigError, match=KNOWN):
        build(config, plan(), open_checkpoint(tiny_models["olmoe"]), TorchOps())


def test_loading_reports_progress_up_to_the_end(tiny_models):
    path, seen = tiny_models["glm4_moe"], []
    config, checkpoint = load_config(path), open_checkpoint(path)
    build(config, plan(), checkpoint, TorchOps(), lambda *report: seen.append(report))
    assert len(seen) == len(config.layers) + 1
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2] == checkpoint.nbytes()
