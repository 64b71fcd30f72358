"""What is known of a family of Transformers before a weight is read, and who imports it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from foreign_models import ALONE, COMMON, PAGED
from plans import with_gpu
from tandem.architectures.foreign import registry
from tandem.architectures.foreign.gates import activation_of
from tandem.architectures.foreign.masks import seen_through
from tandem.architectures.load import config_from_dict
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.resolve import resolve
from tandem.spec.activation import Activation
from tandem.spec.model_config import why_alone

NATIVE = """
import sys
from tandem import LLM, SamplingParams
llm = LLM({path!r}, device="cpu", dtype="float32", max_total_tokens=64)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
assert "transformers" not in sys.modules, "a family of ours imported transformers"
"""


def values_of(model_type: str, **changes: object) -> dict[str, object]:
    config = AutoConfig.for_model(model_type, **(COMMON | PAGED.get(model_type, {}) | changes))
    return config.to_dict()


def test_a_native_family_does_not_import_transformers(tiny_models):
    script = NATIVE.format(path=str(tiny_models["qwen3_moe"]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sizes_are_those_of_the_modules():
    """flex_olmo: 3 layers of 6 experts; k and v of 2 heads of 16."""
    config = config_from_dict(values_of("flex_olmo"))
    assert config.routed_params == 3 * 6 * 3 * 48 * config.moe.experts.width
    assert config.state_layout("float32").token_bytes == 3 * 2 * 2 * 16 * 4
    assert config.moe.router.top_k == 3 and config.moe_layers == (0, 1, 2)
    dense = 3 * (48 * (64 + 32 + 32) + 64 * 48 + 48 * 6 + 2 * 48) + 48 + 263 * 48
    norms = 3 * (64 + 32)  # of q and k
    assert config.dense_params == dense + norms


def test_windows_are_those_of_the_masks():
    assert seen_through(lambda b, h, q, k: k <= q).window == 0
    assert seen_through(lambda b, h, q, k: (k <= q) & (k > q - 9)).window == 9
    assert "neither" in seen_through(lambda b, h, q, k: k <= q + 1).wrong
    assert "neither" in seen_through(lambda b, h, q, k: (k <= q) & (k // 64 == q // 64)).wrong
    assert "cannot be asked" in seen_through(lambda b, h, q, k: torch.ones(3)[k] > 0).wrong


def planned(model_type: str, **changes: object):
    values = values_of(model_type, **(ALONE.get(model_type, {}) | changes))
    plan = resolve(EngineConfig(model="m"), config_from_dict(values), with_gpu())
    return plan, {each.name: each.reason for each in plan.decisions}


def test_paged_families_run_beside_a_gpu_without_graphs():
    plan, reasons = planned("mellum")
    assert plan.gpu is not None and plan.gpu.graph_sizes == () and plan.gpu.attention == "triton"
    assert "may wait for the GPU" in reasons["CUDA graphs"] and "windows of their own" in reasons["attention"]


def test_others_stay_on_the_cpu():
    plan, reasons = planned("jamba")
    assert plan.gpu is None and "modules and cache run on the CPU" in reasons["device"]
    plan, reasons = planned("flex_olmo", head_dim=512, hidden_size=2048)
    assert plan.gpu is None and "heads of at most 256 channels, not 512" in reasons["device"]


class Gate:
    has_gate, is_concatenated = True, True

    def __init__(self, formula, concatenated=True):
        self.formula, self.is_concatenated = formula, concatenated

    def _apply_gate(self, both):
        if self.is_concatenated:
            return self.formula(*both.chunk(2, dim=-1))
        return self.formula(both[..., 0::2], both[..., 1::2])


@pytest.mark.parametrize(
    ("formula", "activation"),
    [
        (lambda g, u: torch.nn.functional.silu(g) * u, Activation("silu")),
        (lambda g, u: torch.nn.functional.gelu(g) * u, Activation("gelu")),
        (lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u, Activation("gelu_tanh")),
        (
            lambda g, u: torch.nn.functional.silu(g.clamp(max=10)) * u.clamp(-10, 10),
            Activation("swiglu_clamp", limit=10.0),
        ),
        (
            lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
            Activation("swiglu_oai", 1.702, 7.0),
        ),
        (lambda g, u: torch.nn.functional.silu(g).clamp(max=7) * u.clamp(-7, 7), None),
        (lambda g, u: torch.relu(g).square() * u, None),
        (lambda g, u: torch.nn.functional.silu(u) * g, None),
        (lambda g, u: g.sigmoid() * u.undefined, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("concatenated", [True, False])
def test_activations_are_known_by_their_numbers(formula, activation, concatenated):
    assert activation_of(Gate(formula, concatenated)) == activation


def test_experts_without_a_gate_are_known_by_their_numbers():
    class Ungated:
        has_gate = False

        def __init__(self, formula):
            self.act_fn = formula

    assert activation_of(Ungated(lambda up: torch.relu(up).square())) == Activation("relu2")
    assert activation_of(Ungated(torch.nn.functional.gelu)) is None
    assert activation_of(Ungated(None)) is None


@pytest.mark.parametrize(
    ("model_type", "changes", "why"),
    [
        ("gpt2", {}, "it has no experts, and Tandem is for models that have"),
        ("dbrx", {"attn_config": {"rope_theta": 1e4}}, r"in code of its own \(DbrxExperts\)"),
        ("dbrx", {"attn_config": {}}, "it asks DbrxAttentionConfig for 'rope_theta', which is not there"),
        ("switch_transformers", {}, "it reads with an encoder"),
        ("flex_olmo", {"hidden_act": "relu"}, "its activation is none of those that are known"),
        ("no_such_model", {}, "has no 'no_such_model' either"),
    ],
)
def test_what_is_missing_is_named(model_type, changes, why):
    values = {"model_type": model_type} if model_type.startswith("no") else values_of(model_type, **changes)
    with pytest.raises(ConfigError, match=why):
        config_from_dict(values)


def test_a_missing_or_old_package_is_named(monkeypatch):
    for found, why in (("", "which is not installed"), ("5.9.1", "5.10 or newer, this is 5.9.1")):
        monkeypatch.setattr(registry, "installed_version", lambda found=found: found)
        with pytest.raises(ConfigError, match=why):
            config_from_dict({"model_type": "flex_olmo"})


def test_a_rotation_that_depends_on_the_batch_runs_alone():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = config_from_dict(values_of("flex_olmo", rope_parameters=rope))
    assert "rotation (dynamic)" in why_alone(config)
