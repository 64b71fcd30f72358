"""`resolve`: what is chosen for made-up models and machines, and what is said when it cannot work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from plans import GIB, INT4, MODEL, MOE, machine, model_of, plan, reason, with_gpu
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import TIERS, Machine
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Experts, Moe
from tandem.mechanisms.router.shape import Router
from tandem.planner.memory import (
    DEFAULT_KV_BYTES,
    DEFAULT_PREFILL_TOKENS,
    GRAMMAR_BYTES,
    RESULT_BYTES,
    WORKSPACE_BYTES,
)
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.model_config import ModelConfig, rope_bytes
from tandem.spec.stored import StoredFormat, StoredFormats

KV_BYTES = 2 * 30 * 3 * 64 * 2  # K and V × layers × heads × head_dim × bf16


def test_defaults() -> None:
    p = plan(machine())
    assert (p.dtype, p.expert_format, p.tier) == ("bfloat16", "bf16", "avx2")
    assert (p.cpus, p.context_length, p.radix_cache, p.fuse_shared_experts) == (
        (0, 1, 2, 3),
        8192,
        True,
        True,
    )
    assert p.max_step_tokens >= p.max_running_requests
    assert all(d.value and d.reason for d in p.decisions)


def test_float32_keeps_experts_unrounded() -> None:
    p = plan(machine(), dtype="float32")
    assert (p.dtype, p.expert_format) == ("float32", "f32")


@pytest.mark.parametrize(
    ("method", "fmt"), [("INT4", "int4"), ("AMXINT8", "int8"), ("BF16", "bf16"), ("AMXINT4", "int4")]
)
def test_kt_method_names_the_packed_format(method: str, fmt: str) -> None:
    p = plan(machine(), kt_method=method)
    assert p.expert_format == fmt
    assert method in reason(p, "expert format")


FP8 = StoredFormat("fp8 128x128", True, 1.03, ("FP8",), 128)


def stored_plan(experts: StoredFormat, shared: StoredFormat, dense: StoredFormat, **flags: object) -> Plan:
    config = EngineConfig(model="demo", **flags)  # type: ignore[arg-type]
    return resolve(config, MODEL, machine(), StoredFormats(experts, shared, dense))


def test_quantised_weights_stay_as_they_are_stored() -> None:
    p = stored_plan(INT4, StoredFormat(), FP8)
    assert (p.expert_format, p.dense_codes, p.fuse_shared_experts) == ("stored", True, False)
    shown = {d.name: d.value for d in p.decisions}
    assert (shown["expert format"], shown["dense format"]) == ("int4 g32", "fp8 128x128")
    for method in ("RAWINT4", "INT4", "AMXINT4"):
        assert stored_plan(INT4, INT4, FP8, kt_method=method).expert_format == "stored"


def test_stored_formats_are_converted_only_when_asked() -> None:
    p = stored_plan(INT4, INT4, FP8, kt_method="INT8")
    assert p.expert_format == "int8"
    assert "int4 g32 is decoded and rounded again" in reason(p, "expert format")
    p = stored_plan(INT4, INT4, FP8, dtype="float32")
    assert (p.expert_format, p.dense_codes) == ("f32", False)
    with pytest.raises(
        ConfigError, match="--kt-method FP8: the checkpoint's experts are int4 g32; leave the flag out"
    ):
        stored_plan(INT4, INT4, FP8, kt_method="FP8")
    with pytest.raises(ConfigError, match="--kt-method AWQ: the checkpoint's experts are bf16"):
        plan(machine(), kt_method="AWQ")


def test_shared_experts_of_the_same_format_are_fused_where_groups_are_not_cut() -> None:
    assert stored_plan(INT4, INT4, FP8).fuse_shared_experts  # a width of 192 is 6 groups of 32
    assert not stored_plan(FP8, FP8, FP8).fuse_shared_experts
    assert not stored_plan(INT4, FP8, FP8).fuse_shared_experts


def test_memory_counts_what_is_held() -> None:
    sizes = StoredFormats(INT4, INT4, FP8)
    experts = MODEL.routed_params * 0.5625
    head = MODEL.vocab * MODEL.hidden  # the embedding, which is not quantised
    dense = 1.03 * (MODEL.dense_params - MODEL.shared_params - head) + 0.5625 * MODEL.shared_params + 2 * head
    assert MODEL.tied_embeddings and MODEL.shared_params > 0
    assert MODEL.weight_bytes("bfloat16", "stored", sizes) == pytest.approx(experts + dense)
    assert MODEL.weight_bytes("float32", "stored", sizes) == pytest.approx(experts + 4 * MODEL.dense_params)
    model = big_model()
    with pytest.raises(ConfigError, match=r"with int4 g32 experts take .* Free some memory"):
        resolve(EngineConfig(model="demo"), model, machine(), sizes)


def test_threads_never_exceed_cores() -> None:
    p = plan(machine(cores=4), kt_cpuinfer=60)
    assert p.cpus == (0, 1, 2, 3)
    assert "60, but 4 physical cores" in reason(p, "threads")
    assert len(plan(machine(cores=4), kt_cpuinfer=3).cpus) == 3


def test_threads_never_exceed_the_quota_and_are_not_pinned_under_one() -> None:
    p = plan(machine(cores=8, quota=2.5))
    assert p.cpus == (-1, -1)
    assert "quota is 2.5" in reason(p, "threads")
    assert plan(machine(cores=8, quota=8.0)).cpus == tuple(range(8))


def test_numa_nodes() -> None:
    two = machine(cores=8, nodes=2)
    # The memory of both nodes is worth more than neighbouring cores.
    assert plan(two, kt_cpuinfer=4).cpus == (0, 1, 4, 5)
    assert plan(two, kt_numa_nodes=(1,)).cpus == (4, 5, 6, 7)
    with pytest.raises(ConfigError, match="node 2 has no core.*these have: 0, 1"):
        plan(two, kt_numa_nodes=(2,))


def test_weights_are_divided_among_the_nodes_of_pinned_threads() -> None:
    two = machine(cores=8, nodes=2)
    assert plan(two, kt_cpuinfer=3).parts == (0, 0, 1)
    assert "weights in 2 parts" in reason(plan(two), "threads")
    p = plan(two, kt_threadpool_count=2)
    assert (p.parts, p.part_nodes) == ((0,) * 4 + (1,) * 4, (0, 1))
    assert plan(two, kt_threadpool_count=1).parts == ()
    assert plan(two, kt_numa_nodes=(1,)).parts == ()
    assert plan(machine(cores=8, nodes=2, quota=4.0)).parts == ()
    # One node: as on a host with several, to try it out.
    p = plan(machine(cores=4), kt_threadpool_count=2)
    assert (p.parts, p.part_nodes) == ((0, 0, 1, 1), ())
    p = plan(two, kt_numa_nodes=(1,), kt_threadpool_count=2)  # nothing is asked of a node that was not named
    assert (p.parts, p.part_nodes) == ((0, 0, 1, 1), ())


@pytest.mark.parametrize(
    ("host", "asked", "parts", "why"),
    [
        (machine(cores=8, nodes=4), 2, (0, 0, 1, 1, 2, 2, 3, 3), "among the 4 NUMA nodes"),
        (machine(cores=8, nodes=2, quota=4.0), 2, (), "under the CPU quota threads are not pinned"),
        (machine(cores=2), 4, (), "only 2 threads on one NUMA node"),
    ],
)
def test_a_tutorial_s_number_of_parts_does_no_harm_elsewhere(
    host: Machine, asked: int, parts: tuple[int, ...], why: str
) -> None:
    p = plan(host, kt_threadpool_count=asked)
    assert p.parts == parts
    assert [
        n for n in p.notices if n.startswith(f"--kt-threadpool-count {asked} changes nothing: ") and why in n
    ]


def test_kernel_tier() -> None:
    assert plan(machine(), kernel_tier="scalar").tier == "scalar"
    with pytest.raises(ConfigError, match="this CPU cannot run it; it can: scalar, avx2"):
        plan(machine(), kernel_tier="amx")


def test_amx_says_that_batches_show_in_the_last_bits() -> None:
    host = replace(machine(), tiers=TIERS)
    assert plan(host).tier == "amx"
    assert f"{SAME_BITS} keeps them the same" in reason(plan(host), "kernel tier")
    assert "last bits" not in reason(plan(host, kernel_tier="avx512_bf16"), "kernel tier")


def test_default_kv_cache_leaves_a_laptop_room() -> None:
    small, large = plan(machine(free=4 * GIB)), plan(machine(free=512 * GIB))
    assert kv_bytes(small) < GIB
    assert kv_bytes(large) <= DEFAULT_KV_BYTES + small.page_size * KV_BYTES
    assert small.context_length == large.context_length == 8192


RESULTS = 4 * DEFAULT_PREFILL_TOKENS * MODEL.moe.router.top_k * MODEL.hidden
WORKSPACE = WORKSPACE_BYTES + GRAMMAR_BYTES + RESULTS + rope_bytes(MODEL, MODEL.max_positions)


def kv_bytes(p: Plan) -> int:
    return p.num_pages * p.page_size * KV_BYTES


def test_one_full_context_is_kept_when_it_just_fits() -> None:
    weights = MODEL.weight_bytes("bfloat16", "bf16")
    free = int((weights + WORKSPACE + 8200 * KV_BYTES) / 0.8)
    assert plan(machine(free=free)).context_length == 8192
    p = plan(machine(free=free - 4096 * KV_BYTES))
    assert 256 < p.context_length < 8192
    assert "the model could do 8192" in reason(p, "context length")


def test_mem_fraction_static_fills_what_it_says() -> None:
    p = plan(machine(free=4 * GIB), mem_fraction_static=0.5)
    used = MODEL.weight_bytes("bfloat16", "bf16") + WORKSPACE + kv_bytes(p)
    assert 2 * GIB - p.page_size * KV_BYTES <= used <= 2 * GIB + p.page_size * KV_BYTES


def test_max_total_tokens_is_exact() -> None:
    p = plan(machine(), max_total_tokens=1000, page_size=16)
    assert (p.num_pages, p.context_length) == (63, 1000)
    with pytest.raises(ConfigError, match=r"--max-total-tokens 10000000 needs .* give at most \d+"):
        plan(machine(), max_total_tokens=10_000_000)
    with pytest.raises(ConfigError, match="--context-length 8192 needs .* holds 1000 tokens"):
        plan(machine(), max_total_tokens=1000, context_length=8192)


def test_context_length_is_bounded_by_the_model() -> None:
    assert plan(machine(), context_length=100).context_length == 100
    with pytest.raises(ConfigError, match="--context-length is 9000, but the model goes to 8192"):
        plan(machine(), context_length=9000)


def big_model() -> ModelConfig:
    moe = Moe(Router(num_experts=256, top_k=8), Experts(256, 2048), Dense(2048))
    return replace(model_of(moe), hidden=7168)


def test_a_model_that_does_not_fit_says_the_numbers_and_a_way_out() -> None:
    model = big_model()
    bf16, int4 = model.weight_bytes("bfloat16", "bf16") / GIB, model.weight_bytes("bfloat16", "int4") / GIB
    with pytest.raises(
        ConfigError, match=f"take {bf16:.1f} GiB, .*--kt-method INT4 fits: it takes {int4:.1f} GiB"
    ):
        plan(machine(free=256 * GIB), model)
    with pytest.raises(ConfigError, match=f"Even with --kt-method INT4 it takes {int4:.1f} GiB"):
        plan(machine(free=16 * GIB), model)
    assert plan(machine(free=256 * GIB), model, kt_method="INT4").expert_format == "int4"


def test_step_tokens() -> None:
    assert plan(machine(), chunked_prefill_size=128, max_running_requests=8).max_step_tokens == 128
    both = plan(machine(), chunked_prefill_size=128, max_prefill_tokens=64, max_running_requests=8)
    assert both.max_step_tokens == 64
    assert plan(machine(), chunked_prefill_size=-1).max_step_tokens == 8192
    p = plan(machine(), chunked_prefill_size=16, max_running_requests=100)
    assert p.max_step_tokens == 100
    assert "--chunked-prefill-size is less" in reason(p, "tokens per step")


def test_shared_experts_are_fused_only_where_that_is_the_same() -> None:
    assert plan(machine()).fuse_shared_experts
    assert not plan(machine(), disable_shared_experts_fusion=True).fuse_shared_experts
    assert not plan(
        machine(), kt_method="INT4"
    ).fuse_shared_experts  # it would be rounded with the routed ones
    assert plan(machine(), dtype="float32").fuse_shared_experts
    assert not plan(machine(), dtype="float32", kt_method="BF16").fuse_shared_experts  # so too
    gated = model_of(replace(MOE, shared_gate=True))
    uneven = model_of(replace(MOE, shared=Dense(100)))
    none = model_of(replace(MOE, shared=None))
    assert not any(plan(machine(), m).fuse_shared_experts for m in (gated, uneven, none))


def test_notices_and_switches_arrive() -> None:
    p = plan(machine(), disable_cuda_graph=True, disable_radix_cache=True)
    assert p.notices == ("--disable-cuda-graph changes nothing: the CPU engine has no CUDA graphs",)
    assert p.radix_cache is False


def test_keys_of_the_model_that_nobody_understood_are_named() -> None:
    p = plan(machine(), replace(MODEL, unread_keys=("use_xyz",)))
    assert p.notices == ("config.json: use_xyz is not understood and has no effect",)


@pytest.mark.parametrize(
    "flags",
    [{"kt_num_gpu_experts": 0}, {"cuda_graph_bs": (1, 2)}, {"kt_expert_placement_strategy": "random"}],
)
def test_gpu_flags_without_a_gpu_say_that_they_change_nothing(flags: dict[str, object]) -> None:
    (line,) = plan(machine(), **flags).notices
    assert re.match(r"--[a-z-]+ changes nothing: ", line)


WISHES = {
    "kt_num_gpu_experts": 8, "kt_gpu_experts_ratio": 0.5, "kt_enable_dynamic_expert_update": True,
    "disable_dynamic_expert_update": True,
    "attention_backend": "flashinfer", "disable_expert_foresight": True, "record_kt_gpu_expert_distribution": True,
    "init_expert_location": "/no/such/file", "prefill_reserved_sms": 16,
}  # fmt: skip


@pytest.mark.parametrize("field", WISHES)
def test_what_only_a_gpu_has_is_a_note_without_one(field: str) -> None:
    (line,) = plan(machine(), **{field: WISHES[field]}).notices
    assert line.startswith("--" + field.replace("_", "-")) and "CUDA graphs" not in line
    with pytest.raises(ConfigError, match="--device cuda: no GPU was found"):
        plan(machine(), device="cuda", **{field: WISHES[field]})


def test_all_that_stands_in_the_way_is_said_at_once() -> None:
    flags = {
        "kt_method": "AWQ", "kernel_tier": "amx", "context_length": 9000, "kt_numa_nodes": (7,), "device": "cuda",
        "kt_int8_activations": True, "max_total_tokens": 10_000_000,
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        plan(machine(), **flags)
    said = {re.match(r"--[a-z0-9-]+", reason)[0] for reason in refused.value.reasons}  # type: ignore[index]
    assert said >= {"--" + name.replace("_", "-") for name in flags}
    with pytest.raises(ConfigError) as refused:
        plan(machine(free=16 * GIB), big_model(), kernel_tier="amx")
    assert [reason.split()[0] for reason in refused.value.reasons] == ["--kernel-tier", "the"]


def test_a_smaller_prefill_bound_is_said_to_change_nothing() -> None:
    (line,) = plan(machine(), max_prefill_tokens=2048, chunked_prefill_size=512).notices
    assert line == "--max-prefill-tokens 2048 changes nothing: --chunked-prefill-size 512 is not larger"
    assert plan(machine(), max_prefill_tokens=256, chunked_prefill_size=512).notices == ()


def test_what_loses_nothing_is_advised_first() -> None:
    """DeepSeek-V3's shape in fp8 on 768 GB: more of the memory is enough."""
    model = replace(big_model(), layers=big_model().layers * 2)
    needed = model.weight_bytes("bfloat16", "stored", StoredFormats(FP8, FP8, FP8))
    with pytest.raises(ConfigError) as refused:
        config = EngineConfig(model="demo")
        resolve(config, model, machine(free=int(needed / 0.88)), StoredFormats(FP8, FP8, FP8))
    text = str(refused.value)
    assert 0 < text.index("--mem-fraction-static 0.") < text.index("--kt-method") < text.index("(lossy)")
    advised = float(re.search(r"--mem-fraction-static (0\.\d+)", text)[1])  # type: ignore[index]
    assert 0.88 < advised < 0.92
    config = EngineConfig(model="demo", mem_fraction_static=advised)
    assert resolve(config, model, machine(free=int(needed / 0.88)), StoredFormats(FP8, FP8, FP8))


def test_the_planner_counts_the_results_that_the_kernels_keep() -> None:
    source = (Path(__file__).parents[2] / "csrc/experts/run/down.cc").read_text()
    mebibytes = re.search(r"TANDEM_RESULT_BYTES \(int64_t\{(\d+)\} << 20\)", source)
    assert mebibytes is not None and int(mebibytes[1]) << 20 == RESULT_BYTES


def test_the_ledger_is_the_sum_that_was_made() -> None:
    p = plan(machine())
    (ram,) = p.ledgers
    assert ram.place == "RAM" and ram.budget_bytes == int(0.8 * 16 * GIB) and ram.free_bytes == 16 * GIB
    sizes = {entry.name: entry.nbytes for entry in ram.entries}
    assert sizes["dense weights"] + sizes["experts"] == MODEL.weight_bytes("bfloat16", "bf16")
    assert sizes["compiled grammars"] == GRAMMAR_BYTES
    assert sizes["KV cache"] == kv_bytes(p) and 0 < ram.left_bytes == ram.budget_bytes - sum(sizes.values())


def test_int8_activations_need_experts_with_codes() -> None:
    made = plan(machine(), kt_method="INT4", kt_int8_activations=True)
    assert made.int8_activations and "lossy" in reason(made, "expert activations")
    assert not plan(machine(), kt_method="INT4").int8_activations
    with pytest.raises(ConfigError, match="--kt-int8-activations: the experts are bf16.*--kt-method INT8"):
        plan(machine(), kt_int8_activations=True)


SAME_BITS = "--enable-deterministic-inference"


def test_the_deterministic_mode_is_said() -> None:
    p = plan(machine(), enable_deterministic_inference=True)
    assert p.deterministic and SAME_BITS in reason(p, "last bits")
    assert not plan(machine()).deterministic


def test_beside_a_gpu_the_deterministic_mode_takes_rows_one_by_one() -> None:
    p = plan(with_gpu(), enable_deterministic_inference=True, kt_gpu_experts_ratio=0.5)
    assert p.gpu is not None and p.deterministic and p.max_step_tokens == 256
    assert not p.gpu.sizes.ring_bytes and not p.gpu.sizes.prompt_sizes
    assert "place decides" in reason(p, "streamed experts")
    asked = {"enable_deterministic_inference": True, "attention_backend": "flashinfer"}
    p = plan(with_gpu(), **asked)
    assert p.gpu is None and SAME_BITS in reason(p, "device")
    with pytest.raises(ConfigError, match=f"--device cuda: --attention-backend flashinfer .*{SAME_BITS}"):
        plan(with_gpu(), device="cuda", **asked)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kt_enable_dynamic_expert_update": True}, "experts that move .* leave out one of the two"),
        ({"kt_max_deferred_experts_per_token": 2}, "experts are deferred .* leave out one of the two"),
        (
            {"kt_int8_activations": True, "kt_method": "INT8", "kernel_tier": "amx"},
            "AMX rounds .* --kernel-tier avx512_bf16",
        ),
    ],
)
def test_what_the_deterministic_mode_cannot_keep_is_refused(flags: dict[str, object], why: str) -> None:
    tiers = ("scalar", "avx2", "avx512", "avx512_bf16", "amx")
    with pytest.raises(ConfigError, match=f"{SAME_BITS} beside --[a-z0-9-]+: {why}"):
        plan(replace(machine(), tiers=tiers), enable_deterministic_inference=True, **flags)
