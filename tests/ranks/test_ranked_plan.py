"""What `--tp` makes of a plan, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantised_models import BLOCKS, everything, experts_only, save_quantised
from tandem.engine.start.planning import planned
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import TIERS, Core, Machine
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import own_side
from tiny import VARIANTS, TinyModels, settings

CORES = tuple(Core(cpu, cpu // 4, cpu // 4) for cpu in range(8))
MACHINE = Machine("Test CPU", CORES, TIERS[:2], 64 << 30, 48 << 30, None)


def of(path, machine: Machine = MACHINE, **flags) -> Plan:
    return planned(EngineConfig.from_keywords(str(path), device=flags.pop("device", "cpu"), **flags), machine).plan


def taken(plan: Plan, name: str) -> int:
    return next(entry.nbytes for entry in plan.ledgers[0].entries if entry.name == name)


def test_each_rank_has_its_share(tiny_models) -> None:
    path = tiny_models["qwen3_moe"]  # four heads of queries and of keys
    whole, half = of(path, max_total_tokens=256), of(path, tp=2, max_total_tokens=256)
    assert (whole.cpus, half.cpus) == (tuple(range(8)), tuple(range(4)))
    assert half.ledgers[0].budget_bytes == whole.ledgers[0].budget_bytes // 2
    assert taken(whole, "experts") == 2 * taken(half, "experts")
    assert taken(whole, "KV cache") == 2 * taken(half, "KV cache")
    assert taken(whole, "dense weights") > taken(half, "dense weights") > taken(whole, "dense weights") // 2
    assert half.decisions[0].name == "ranks" and not any(each.name == "ranks" for each in whole.decisions)


def test_threads_that_are_asked_for_are_all_ranks_together(tiny_models) -> None:
    assert len(of(tiny_models["qwen3_moe"], tp=2, kt_cpuinfer=6).cpus) == 3
    assert of(tiny_models["qwen3_moe"], tp=2, kt_numa_nodes=(1,)).cpus == (4, 5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"kt_max_deferred_experts_per_token": 1, "kt_enable_dynamic_expert_update": True},
            "would be deferred on one rank",
        ),
        ({"map_experts": "always"}, "leave --map-experts out"),
        ({"kt_method": "INT4"}, r"28 rows of experts, which have groups of 32, cannot .* possible: 1$"),
    ],
)
def test_what_ranks_cannot_do_is_refused(tiny_models, flags, says) -> None:
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size 2: .*{says}"):
        of(tiny_models["qwen3_moe"], tp=2, **flags)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (everything("fp8 blocks"), ["256 inputs of o_proj", "256 rows of dense layers", "256 rows of experts"]),
        (experts_only("fp8 blocks"), ["256 rows of experts"]),
        (everything("int8 per channel"), []),
    ],
)
def test_groups_of_dense_matrices_stay_whole(tmp_path, choice, says) -> None:
    """Loading would refuse them; what has one scale a row can be cut anywhere."""
    family, changes = VARIANTS["glm4_moe"]
    wide = settings(moe_intermediate_size=256, intermediate_size=256, num_key_value_heads=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS, "glm4_moe-wide", (family, changes | BLOCKS | wide))
        path = save_quantised(TinyModels(tmp_path / "tiny")["glm4_moe-wide"], tmp_path, choice)[0]
    if not says:
        assert of(path, tp=4).decisions[0].value == "4"
        return
    assert of(path, tp=4).decisions[0].value == "4"  # a group of 128 becomes two
    named = " and ".join(f"{each}, which have groups of 64," for each in says)
    with pytest.raises(ConfigError, match=f"8: {named} cannot be divided among 8 ranks; possible: 1, 2, 4$"):
        of(path, tp=8)


H200 = Gpu("NVIDIA H200", 141 << 30, 139 << 30, "gen5 x16", 0, "GPU-a", (9, 0))
OTHER = replace(H200, name="NVIDIA H100", number=1, uuid="GPU-b")
SECOND = replace(H200, number=1, uuid="GPU-b", free_bytes=100 << 30)


def test_each_rank_has_a_gpu_and_the_same_plan(tiny_models) -> None:
    machine = replace(MACHINE, gpus=(SECOND, H200))  # nvidia-smi's order is by free memory
    config = EngineConfig.from_keywords(str(tiny_models["qwen3_moe"]), tp=2)
    first, second = (own_side(config, machine, rank)[1] for rank in range(2))
    assert [gpu.uuid for gpu in (*first.gpus, *second.gpus)] == ["GPU-a", "GPU-b"]
    assert [gpu.free_bytes for gpu in (*first.gpus, *second.gpus)] == [100 << 30, 100 << 30]
    plan = of(tiny_models["qwen3_moe"], machine, tp=2, device="auto")
    assert plan.gpu is not None and plan.gpu.uuid == "GPU-a" and plan.gpu.sizes.prompt_sizes == ()


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ((H200,), "each rank needs a GPU, and there is one; leave --tp out, .*or add --device cpu"),
        ((H200, OTHER), "on equal GPUs, not on NVIDIA H100 and NVIDIA H200; .*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_ranks_cannot_use_are_refused(tiny_models, gpus, says) -> None:
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size 2: .*{says}"):
        of(tiny_models["qwen3_moe"], replace(MACHINE, gpus=gpus), tp=2, device="auto")


def test_sums_between_gpus_need_their_package_and_have_a_limit(tiny_models) -> None:
    machine = replace(MACHINE, gpus=(H200, SECOND), gpu_missing=("cuda-core",))
    with pytest.raises(ConfigError, match="cuda-core is missing, which sums between GPUs need: pip install"):
        of(tiny_models["qwen3_moe"], machine, tp=2, device="auto")
    many = replace(MACHINE, cores=tuple(Core(cpu, cpu, 0) for cpu in range(16)),
                   gpus=tuple(replace(H200, number=i) for i in range(16)))  # fmt: skip
    with pytest.raises(ConfigError, match="sums between GPUs are of at most 8 ranks; give fewer"):
        of(tiny_models["qwen3_moe"], many, tp=16, device="auto")


def test_ranks_may_share_a_gpu_in_tests(tiny_models, monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    config = EngineConfig.from_keywords(str(tiny_models["qwen3_moe"]), tp=2)
    both = [own_side(config, replace(MACHINE, gpus=(H200,)), rank)[1].gpus[0] for rank in range(2)]
    assert [(gpu.uuid, gpu.free_bytes) for gpu in both] == [("GPU-a", H200.free_bytes // 2)] * 2


def test_a_rank_needs_a_core(tiny_models) -> None:
    with pytest.raises(ConfigError, match="this process may use 1 cores, and each rank needs one"):
        of(tiny_models["qwen3_moe"], replace(MACHINE, cores=CORES[:1]), tp=2)
