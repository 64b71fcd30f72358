"""Ling 3 as served: every cut, prefixes, preemption; limits of activations; files and configurations of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny
from gguf_files import write_gguf
from hub_copies import keys_of
from plans import machine
from sessions import Session, ours, prompts, reference, worst
from tandem import _core
from tandem.architectures.load import config_from_dict, load_config
from tandem.bench.architectures import CONFIGS, named_config
from tandem.checkpoint import load_model_config, open_checkpoint
from tandem.errors import CheckpointError, ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.latent.shape import Latent
from tandem.planner.gpu_plan import without_kernels
from tandem.planner.resolve import resolve
from tandem.spec.activation import Activation

VARIANTS = ["bailing_hybrid", "bailing_hybrid-plain"]
FLASH = "ling-3.0-flash"


@pytest.fixture(params=["torch", "core"])
def ops(request: pytest.FixtureRequest):
    torch_ops = request.param == "torch"
    return TorchOps() if torch_ops else CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_of_a_prompt_equals_transformers(tiny_models, ops, variant: str) -> None:
    """The core's bits are the same, too, wherever a prompt is cut."""
    prompt, expected = prompts()[0][:23], reference(tiny_models[variant])[0][:23]
    session, whole = Session(tiny_models[variant], ops=ops), None
    for cut in range(23):
        session.lengths = [0, 0, 0]
        parts = [session.step([(0, part)])[0] for part in (prompt[:cut], prompt[cut:]) if part]
        assert worst([torch.cat(parts)], [expected]) < 1e-4
        whole = torch.cat(parts) if whole is None else whole
        assert isinstance(ops, TorchOps) or torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("change", [{"kda_lower_bound": -4.0}, {"kda_safe_gate": False}], ids=str)
def test_the_floor_matters(tiny_models, tmp_path: Path, change: dict[str, object]) -> None:
    """So the tests above see it at work."""
    path = _with(tiny_models["bailing_hybrid"], tmp_path, **change)
    assert worst(ours(Session(path)), reference(tiny_models["bailing_hybrid"])) > 1e-3


def _with(model: Path, to: Path, **keys: object) -> Path:
    for file in model.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "config.json").write_text(json.dumps(keys_of(to) | keys))
    return to


# -- limits of activations ---

LIMITS = {"expert_swiglu_limit_list": [0, 0, 0.05, 0.1, 0.2], "share_expert_swiglu_limit_list": [0, 0.03, 0, 0.02]}
"""Longer by a draft layer's in one of them, as a file may have it."""


class _Clamped(torch.nn.Module):
    """A gated feed-forward of Transformers', times limits as vLLM has them: silu(gate) at most, up within."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def _clamp(model: Any) -> None:
    routed, shared = (keys[:4] for keys in LIMITS.values())
    for layer, of_routed, of_shared in zip(model.model.layers, routed, shared, strict=True):
        if of_routed:
            _clamp_experts(layer.mlp.experts, _Clamped(of_routed))
        if of_shared:
            _clamp_mlp(layer.mlp.shared_experts, _Clamped(of_shared))


def _clamp_mlp(mlp: Any, clamped: _Clamped) -> None:
    mlp.forward = lambda x: mlp.down_proj(clamped(mlp.gate_proj(x), mlp.up_proj(x)))


def _clamp_experts(experts: Any, clamped: _Clamped) -> None:
    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("td,egd->teg", x, experts.gate_up_proj).chunk(2, -1)
        each = torch.einsum("teg,edg->ted", clamped(gate, up), experts.down_proj)
        share = torch.zeros(len(x), each.shape[1]).scatter_(1, chosen, weights)
        return (each * share[..., None]).sum(1)

    experts.forward = forward


@pytest.fixture(scope="module")
def limited(tiny_models, tmp_path_factory) -> tuple[Path, list[Tensor]]:
    """A model with limits in some layers, and what Transformers makes of it with the same."""
    path = _with(tiny_models["bailing_hybrid"], tmp_path_factory.mktemp("limited"), **LIMITS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    _clamp(model)
    with torch.inference_mode():
        return path, [model(torch.tensor([p])).logits[0] for p in prompts()]


def test_limits_of_some_layers(tiny_models, limited, ops) -> None:
    path, expected = limited
    assert load_model_config(path).unread_keys == ()
    assert worst(ours(Session(path, ops=ops)), expected) < 1e-4
    assert worst(reference(tiny_models["bailing_hybrid"]), expected) > 1e-2


# -- files of the hub ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_hubs_own_names_are_what_is_read(tiny_models, variant: str) -> None:
    """Transformers saves under the names of the hub, and holds others."""
    stored = str(list(open_checkpoint(tiny_models[variant])._shards.names()))
    for name in ("model.word_embeddings.weight", ".attention.dense.", ".attention.f_proj.", ".gate.expert_bias"):
        assert name in stored


@pytest.mark.parametrize("source", ["plain", "limited"])
def test_a_gguf_file_is_the_same_model(limited, tmp_path: Path, monkeypatch, source: str) -> None:
    """Heads' matrices are divided in a file, so they are multiplied in another order. Its decays are not negative."""
    family, sizes = tiny.VARIANTS["bailing_hybrid"]
    plain = {"rope_type": "default", "rope_theta": 3000.0}
    monkeypatch.setitem(tiny.VARIANTS, "ling", (family, sizes | {"rope_parameters": plain}))
    tiny.save_tiny("ling", tmp_path / "source")
    limits = {key: limits[:4] for key, limits in LIMITS.items()} if source == "limited" else {}
    path = _with(tmp_path / "source", tmp_path, **limits)
    file = write_gguf(path, tmp_path / "m.gguf")
    found, expected = load_model_config(file), load_config(path)
    assert found.unread_keys == () and found.layers == expected.layers
    assert worst(ours(Session(file)), ours(Session(path))) < 1e-5


def test_a_gguf_file_without_a_floor_is_refused(tiny_models, tmp_path: Path) -> None:
    from gguf_files import rewritten

    file = write_gguf(tiny_models["bailing_hybrid"], tmp_path / "m.gguf")
    other = rewritten(file, tmp_path / "other.gguf", {"bailingmoe3.kda.safe_gate": False})
    with pytest.raises(CheckpointError, match=r"bailingmoe3\.kda\.safe_gate is false"):
        load_model_config(other)


# -- configurations ---

HUB = CONFIGS[FLASH] | {
    "architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True, "use_kda_lora": False, "group_norm_size": 1,
    "gated_attention_proj_granularity_type": "head_wise", "linear_silu": True, "max_window_layers": 20,
    "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 768, "mtp_loss_scaling_factor": 0,
    "mtp_use_kda": False, "num_kv_heads_for_linear_attn": 0, "output_dropout": 0.0, "embedding_dropout": 0.0,
    "partial_rotary_factor": 0.5, "qk_head_dim": 192, "rope_interleave": True, "rope_scaling": None, "rotary_dim": 64,
    "router_dtype": "fp32", "score_function": "sigmoid", "scale_router_input": False, "topk_method": "noaux_tc",
    "use_bias": False, "use_mla_nope": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True,
    "value_norm": False, "num_nextn_predict_layers": 0, "expert_swiglu_limit_list": [0] * 35 + [4] * 8,
    "share_expert_swiglu_limit_list": [0] * 34 + [5] * 6 + [7] * 2 + [0],
}  # fmt: skip


def test_ling_flash_is_what_its_authors_say_it_is() -> None:
    """35 delta nets, 7 latent attentions, 124 billion weights, of which a token uses 5; limits behind layer 34."""
    config = config_from_dict(HUB)
    assert config.unread_keys == ()
    deltas = [mixer for mixer in config.mixers if isinstance(mixer, ChannelDelta)]
    attentions = [mixer for mixer in config.mixers if isinstance(mixer, Latent)]
    assert len(deltas) == 35 and {(d.floor, d.full_rank, d.inner) for d in deltas} == {(-5.0, True, 4096)}
    assert len(attentions) == 7 and {a.gate_rows for a in attentions} == {32}
    assert config.state_layout("bfloat16").token_bytes == 7 * 576 * 2
    weights = config.dense_params + config.routed_params + config.vocab * config.hidden
    used = config.dense_params + 40 * 8 * config.expert_params
    assert 123e9 < weights < 125e9 and 4.8e9 < used < 5.3e9
    blocks = [layer.moe for layer in config.layers if layer.moe is not None]
    assert [moe.experts.activation.limit for moe in blocks] == [0.0] * 33 + [4.0] * 7
    assert [moe.shared and moe.shared.activation.limit for moe in blocks] == [0.0] * 32 + [5.0] * 6 + [7.0] * 2
    assert not config.moe.fusible_shared
    assert [type(layer.blocks[1].body) for layer in config.layers[:3]] == [Dense, Dense, Moe]


def test_without_limits_shared_experts_count_as_routed_ones() -> None:
    config = named_config(FLASH, None)
    assert config.moe.fusible_shared == 1 and config.moe.experts.activation == Activation()


def test_layers_behind_the_last_whole_group_are_attention() -> None:
    """As in the vendor's code, where no list says it."""
    mixers = config_from_dict(CONFIGS[FLASH] | {"num_hidden_layers": 8}).mixers
    assert [isinstance(mixer, Latent) for mixer in mixers] == [False] * 5 + [True] * 3


@pytest.mark.parametrize(("changes", "message"), [
    ({"architectures": ["BailingMoeV2_5ForCausalLM"]}, r"Ling 2\.6, gated linear attention.*BailingMoeV3ForCausalLM"),
    ({"no_kda_lora": False}, "no_kda_lora = False is not supported"),
    ({"use_mla_nope": True}, "use_mla_nope = True is not supported"),
    ({"multi_gate": True}, "multi_gate = True is not supported"),
    ({"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise' is not supported"),
    ({"linear_attention": "gla"}, "linear_attention = 'gla' is not supported"),
    ({"layer_group_size": [4, 6]}, r"layer_group_size is \[4, 6\], not a int"),
    ({"layer_group_size": 0}, "layer_group_size is 0, and must be at least 1"),
    ({"layer_types": ["linear_attention"] * 42}, "layer_types has no full_attention"),
    ({"layer_types": ["sliding_attention"] * 42}, "'sliding_attention' is not supported"),
    ({"kda_lower_bound": 0.0}, "kda_lower_bound is 0.0, and must be below 0; try -5.0"),
    ({"moe_shared_expert_intermediate_size": 512}, "moe_shared_expert_intermediate_size = 512 is not supported"),
    ({"expert_swiglu_limit_list": [4] * 3}, "expert_swiglu_limit_list must be a list of 42"),
    ({"expert_swiglu_limit_list": ["4"] * 42}, "expert_swiglu_limit_list has '4', and must have numbers"),
    ({"share_expert_swiglu_limit_list": [-1] * 42}, "has -1, and must have numbers of 0 or more"),
    ({"short_conv_kernel_size": 9}, "short_conv_kernel_size is 9, and must be 2 to 7"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported here"),
])  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict(CONFIGS[FLASH] | changes)


def test_its_draft_layer_is_named_and_left_out() -> None:
    config = config_from_dict(HUB | {"num_nextn_predict_layers": 1})
    assert config.drafts is not None and not config.unread_keys
    plan = resolve(EngineConfig(model="m"), config, machine(free=512 << 30))
    assert any("a draft layer, which is not loaded" in notice for notice in plan.notices)


def test_its_draft_layer_has_limits_of_its_own() -> None:
    """Behind those of all layers; none where a list ends before."""
    lists = {"expert_swiglu_limit_list": [0.0] * 41 + [7.0, 5.0], "share_expert_swiglu_limit_list": [0.0] * 41 + [8.0]}
    config = config_from_dict(HUB | {"num_nextn_predict_layers": 1} | lists)
    assert config.drafts is not None
    for layer, routed, shared in ((config.layers[-1], 7.0, 8.0), (config.drafts.layer, 5.0, 0.0)):
        moe = layer.moe
        assert moe is not None and moe.shared is not None and moe.separate_shared
        assert (moe.experts.activation.limit, moe.shared.activation.limit) == (routed, shared)


def test_it_has_kernels_for_a_gpu() -> None:
    assert not without_kernels(named_config(FLASH, None))
