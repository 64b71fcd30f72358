"""Routed experts for another engine: right sums beside Transformers' own modules, whatever that engine has set up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import plans
from tandem.backends import Host, ModelExperts, experts_config, model_experts
from tandem.backends.planning import share_of, with_spare_core
from tandem.errors import ConfigError, DoesNotFit, TandemError
from tandem.kernels.this_machine import these_cpus
from tandem.spec.shard import RankShard
from tiny import TinyModels

WHERE = "--additional-config"
TOLERANCE = 2e-5  # of float32 sums of some tens of products, in another order, beside values of about 1


def opened(path: Path, host: Host | None = None, **options: object) -> ModelExperts:
    return ModelExperts(experts_config(str(path), options, "float32", WHERE), host or Host())


def batch(experts: ModelExperts, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    moe = experts.config.moe
    ids = torch.stack([torch.randperm(moe.experts.count)[: moe.router.top_k] for _ in range(rows)])
    return torch.randn(rows, experts.config.expert_channels), ids, torch.rand(ids.shape)


@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_sums_are_those_of_transformers(tiny_models: TinyModels, variant: str) -> None:
    experts = opened(tiny_models[variant])
    x, ids, weights = batch(experts)
    number = experts.config.moe_layers[-1]
    module = AutoModelForCausalLM.from_pretrained(tiny_models[variant], dtype=torch.float32).model.layers[number].mlp
    with torch.inference_mode():
        wanted = module.experts(x, ids, weights)
    torch.testing.assert_close(experts.layer(number)(x, ids, weights), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss"])
def test_parts_of_ranks_add_up(tiny_models: TinyModels, variant: str) -> None:
    """A bias is added once."""
    whole, parts = opened(tiny_models[variant]), [opened(tiny_models[variant], Host(RankShard(i, 2))) for i in range(2)]
    x, ids, weights = batch(whole)
    number = whole.config.moe_layers[0]
    added = sum((part.layer(number)(x, ids, weights) for part in parts), torch.zeros_like(x))
    torch.testing.assert_close(added, whole.layer(number)(x, ids, weights), rtol=TOLERANCE, atol=TOLERANCE)


def test_an_engine_may_have_defaults_of_its_own(tiny_models: TinyModels) -> None:
    plain = opened(tiny_models["gpt_oss"])
    x, ids, weights = batch(plain)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            layer = opened(tiny_models["gpt_oss"]).layer(0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(layer(x, ids, weights), plain.layer(0)(x, ids, weights))


def test_pairs_of_no_expert_add_nothing(tiny_models: TinyModels) -> None:
    experts = opened(tiny_models["qwen3_moe"])
    layer, (x, ids, weights) = experts.layer(0), batch(experts)
    masked = ids.clone()
    masked[:, 1] = -1
    assert torch.equal(layer(x, masked, weights), layer(x, ids, weights * torch.tensor([1.0, 0.0, 1.0])))


def test_packed_experts_are_kept_for_the_next_start(tiny_models: TinyModels, tmp_path: Path) -> None:
    results = list[Tensor]()
    for _ in range(2):
        experts = opened(tiny_models["qwen3_moe"], packed_cache=str(tmp_path))
        layers = [experts.layer(number) for number in experts.config.moe_layers]
        results.append(torch.stack([layer(*batch(experts)) for layer in layers]))
    assert len(list(tmp_path.glob("*.packed"))) == 1
    assert torch.equal(*results)


def test_each_rank_keeps_its_part(tiny_models: TinyModels, tmp_path: Path) -> None:
    """In a file of its own, whose numbers are that rank's."""
    path, results = tiny_models["qwen3_moe"], list[Tensor]()
    for rank in (0, 1, 0, 1):
        experts = opened(path, Host(RankShard(rank, 2)), packed_cache=str(tmp_path))
        results.append(torch.stack([experts.layer(at)(*batch(experts)) for at in experts.config.moe_layers]))
    assert len(list(tmp_path.glob("*.packed"))) == 2
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def test_only_some_layers_may_be_asked_for(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Pipeline ranks have some: the packed file is complete when theirs are."""
    opened(tiny_models["qwen3_moe"], Host(loads=frozenset({1})), packed_cache=str(tmp_path)).layer(1)
    assert len(list(tmp_path.glob("*.packed"))) == 1


@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss"])
def test_made_up_weights_need_no_files(tiny_models: TinyModels, tmp_path: Path, variant: str) -> None:
    """For measurements: the configuration is enough."""
    (tmp_path / "config.json").write_bytes((tiny_models[variant] / "config.json").read_bytes())
    experts = opened(tmp_path, Host(made_up=True), kt_method="INT8")
    layer, (x, ids, weights) = experts.layer(0), batch(experts)
    assert layer(x, ids, weights).abs().sum() > 0
    assert experts.plan.expert_format == "int8"


def test_a_thread_is_where_the_caller_is(tiny_models: TinyModels) -> None:
    experts = opened(tiny_models["qwen3_moe"], Host(cpus=frozenset({core.cpu for core in these_cpus().cores})))
    at = experts.plan.cpus[-1]
    assert model_experts.beginning_at(experts.plan, at)[0] == at
    assert sorted(model_experts.beginning_at(experts.plan, at)) == sorted(experts.plan.cpus)


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(16, 1, 15), (8, 1, 7), (7, 1, None), (16, 4, None), (32, 2, 15)]
)
def test_a_core_is_left_to_an_engine_on_a_gpu(cores: int, ranks: int, threads: int | None) -> None:
    """A core of the rank's own, unless it has few. On a CPU both work in turns, so all compute."""
    config, gpu = experts_config("m", {}, "bfloat16", WHERE), torch.device("cuda", 0)
    host = Host(RankShard(0, ranks), gpu)
    own, machine = share_of(config, plans.machine(cores), host)
    assert with_spare_core(own, machine, host).kt_cpuinfer == threads
    assert with_spare_core(own, machine, Host(RankShard(0, ranks))) is own
    few = replace(own, kt_cpuinfer=cores)
    assert with_spare_core(few, machine, host) is few


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kt_metod": "INT4"}, "--additional-config has no option 'kt_metod'; did you mean kt_method?"),
        ({"port": 1}, "no option 'port'"),
        ({"kt_method": "INT3"}, "--additional-config: --kt-method"),
        ({"kt_gpu_experts_ratio": 0.5}, "need a GPU"),
        ({"kt_weight_path": "/nowhere"}, "/nowhere"),
    ],
)
def test_bad_options_say_what_to_change(tiny_models: TinyModels, options: dict[str, object], said: str) -> None:
    with pytest.raises(TandemError, match=said):
        opened(tiny_models["qwen3_moe"], **options)


def test_what_cannot_be_is_refused(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tiny_models["qwen3_moe"]
    with pytest.raises(ConfigError, match="not float16: take --dtype bfloat16"):
        experts_config(str(path), {}, "float16", WHERE)
    with pytest.raises(ConfigError, match=r"layer 7 .* has no experts .* 0, 1, 2"):
        opened(path).layer(7)
    with pytest.raises(ConfigError, match=r"28 rows of experts cannot be divided among 3 ranks; possible: 1, 2, 4, 7"):
        opened(path, Host(RankShard(0, 3)))
    monkeypatch.setattr(model_experts, "these_cpus", lambda _cpus: replace(these_cpus(), available_memory=1000))
    with pytest.raises(DoesNotFit, match="36 experts in f32 take"):
        opened(path)
