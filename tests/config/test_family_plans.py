"""Every family at its published size on a machine with a GPU: hybrid, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig

from plans import GIB, with_gpu
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import named_config
from tandem.bench.stored import FORMATS, stored_as
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.model_config import ModelConfig
from tiny import settings

# model type: what differs from its class's defaults, and how many billions its authors count
PUBLISHED: dict[str, tuple[dict[str, object], float]] = {
    "glm4_moe_lite": (settings(), 30),
    "dots1": (
        settings(
            hidden_size=4096,
            n_routed_experts=128,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
        ),
        142,
    ),
    "minimax_m2": (settings(rotary_dim=64), 229),
    "hy_v3": (settings(), 295),
    "mistral4": (settings(), 119),
    "ernie4_5_moe": (settings(), 21.8),
    "laguna": (settings(), 33.4),
}


def config_of(model_type: str, **changes: object) -> ModelConfig:
    config = AutoConfig.for_model(model_type, **(PUBLISHED[model_type][0] | changes)).to_dict()
    return config_from_dict({"rope_theta": 1e6} | config)


def planned(model: ModelConfig, **flags: object) -> Plan:
    machine = replace(with_gpu(80 * GIB), available_memory=700 * GIB, flashinfer="0.6.0")
    config = EngineConfig.from_keywords(
        "m", kt_method="INT4", context_length=2048, max_running_requests=4, **flags
    )
    return resolve(config, model, machine)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_experts_are_divided_between_gpu_and_cpu(model_type: str) -> None:
    model = config_of(model_type)
    plan = planned(model, kt_gpu_experts_ratio=0.1)
    assert plan.gpu is not None and plan.gpu.sizes.experts == round(0.1 * model.routed_experts)
    assert model.unread_keys == ()


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_parameters_are_as_many_as_its_authors_say(model_type: str) -> None:
    model = config_of(model_type)
    embedding = 0 if model.tied_embeddings else model.vocab * model.hidden
    billions = (model.dense_params + model.routed_params + embedding) / 1e9
    assert billions == pytest.approx(PUBLISHED[model_type][1], rel=0.02)


def test_a_backend_for_equal_heads_is_refused_where_layers_differ() -> None:
    model = config_of("laguna", num_attention_heads_per_layer=[48, 64] * 20)
    with pytest.raises(ConfigError, match="as many heads in every layer; .* \\(48, 8\\), \\(64, 8\\); take .* triton"):
        planned(model, attention_backend="flashinfer")
    assert planned(model, attention_backend="triton").gpu is not None


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "glm-5"])
def test_what_never_stays_codes_does_not_lower_the_mean_of_the_others(name: str) -> None:
    """Heads' matrices and what connects blocks: every other matrix counts as it is stored, to the byte."""
    model = named_config(name, 8)
    stored = stored_as(model, "fp8")
    plain = model.vocab * model.hidden + model.hidden * model.moe.router.num_experts * len(model.moe_layers)
    heads = sum(mixer.head_params for mixer in model.mixers)
    streams = [block.hyper for layer in model.layers for block in layer.blocks if block.hyper is not None]
    codes = model.dense_params - plain - heads - sum(each.params(model.hidden) for each in streams)
    numbers = 2 * (plain + heads) + sum(each.matrix_bytes(model.hidden, 2) for each in streams)
    assert abs(model.dense_bytes("bfloat16", stored) - codes * FORMATS["fp8"].bytes_per_weight - numbers) <= 1
