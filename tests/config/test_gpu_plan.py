"""`resolve` on machines with a GPU: whether it is used, what goes there, and what is said when it cannot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from plans import ATTENTION, GIB, INT4, MODEL, MOE, NORM, machine, model_of, plan, reason, with_gpu
from tandem.architectures.load import config_from_dict
from tandem.bench.architectures import named_config
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.mechanisms.cost import cost_of
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Experts
from tandem.planner.cuda_graphs import (
    CHUNK_KERNELS,
    GRAPH_BYTES,
    KERNEL_BYTES,
    PART_KERNELS,
    prompt_graph_bytes,
)
from tandem.planner.cuda_graphs import SMALL_GRAPH_SIZES as SMALL
from tandem.planner.forecast.ledger import RAM, VRAM
from tandem.planner.gpu_plan import GPU_WORKSPACE_BYTES, dense_bytes, unpacking_bytes
from tandem.planner.memory import DEFAULT_FRACTION, GRAMMAR_BYTES, LONG_PREFILL_TOKENS
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.gpu_scratch import (
    LEAST_ROW_BYTES,
    MOST_ROW_BYTES,
    RING_BYTES,
    StepSize,
    expert_row_bytes,
    expert_scratch_bytes,
    experts_at_once,
    pair_bytes,
)
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig, rope_bytes
from tandem.spec.stored import StoredFormat, StoredFormats


def test_a_gpu_is_used_and_filled() -> None:
    p = plan(with_gpu())
    assert p.gpu is not None and "H100" in reason(p, "device")
    assert p.gpu.sizes.experts == 30 * 32  # a small model: all of them
    assert p.gpu.graph_sizes[0] == 1 and p.gpu.placement == "uniform"
    assert all(d.value and d.reason for d in p.decisions)


@pytest.mark.parametrize(
    ("machine_", "flags", "why"),
    [
        (with_gpu(), {"device": "cpu"}, "--device cpu"),
        (with_gpu(), {"dtype": "float32"}, "not float32"),
        (with_gpu(missing=("triton",)), {}, "triton is missing"),
    ],
)
def test_a_gpu_that_is_not_used_is_explained(machine_: Machine, flags: dict[str, object], why: str) -> None:
    p = plan(machine_, **flags)
    assert p.gpu is None and why in reason(p, "device")


def test_the_first_gpu_that_is_new_enough_is_used() -> None:
    old, new = (
        replace(with_gpu().gpus[0], capability=c, uuid=f"GPU-{c}", number=c[0]) for c in ((7, 5), (8, 0))
    )
    p = plan(replace(machine(), gpus=(old, new)))
    assert p.gpu is not None and p.gpu.uuid == new.uuid and reason(p, "device").startswith("GPU 8, H100")
    p = plan(replace(machine(), gpus=(old,)))
    assert p.gpu is None and "compute capability 7.5; the GPU kernels need 8.0" in reason(p, "device")
    with pytest.raises(ConfigError, match="--device cuda: H100 has compute capability 7.5"):
        plan(replace(machine(), gpus=(old,)), device="cuda")


def test_gpus_that_are_hidden_are_explained() -> None:
    hidden = replace(machine(), no_gpu="CUDA_VISIBLE_DEVICES= hides every GPU")
    assert reason(plan(hidden), "device") == hidden.no_gpu


def test_a_gpu_asked_for_in_vain_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--device cuda: no GPU was found; take --device cpu"):
        plan(machine(), device="cuda")


@pytest.mark.parametrize(
    ("flags", "experts"),
    [
        ({"kt_num_gpu_experts": 8}, 8 * 30),
        ({"kt_gpu_experts_ratio": 0.25}, 240),
        ({"kt_gpu_experts_ratio": 0.0, "kt_num_gpu_experts": 8}, 0),
        ({"kt_num_gpu_experts": 1000}, 960),
    ],
)
def test_experts_asked_for_are_placed(flags: dict[str, object], experts: int) -> None:
    p = plan(with_gpu(), **flags)
    assert p.gpu is not None and p.gpu.sizes.experts == experts


def test_a_gpu_too_small_says_what_fits() -> None:
    with pytest.raises(ConfigError, match="at most [0-9]+ experts fit"):
        plan(with_gpu(free=2 * GIB - GIB // 2), kt_gpu_experts_ratio=1.0)


TOO_SMALL = GIB - GIB // 8  # bytes of GPU memory


def test_auto_does_without_a_gpu_that_is_too_small() -> None:
    p = plan(with_gpu(free=TOO_SMALL))
    assert p.gpu is None and "H100 is too small: 0.8 GiB may be used" in reason(p, "device")
    assert p == replace(plan(machine()), decisions=p.decisions, idle=p.idle)
    assert p.idle.startswith("GPU 0 (H100) not used: H100 is too small: ")
    assert plan(with_gpu(free=TOO_SMALL), kt_gpu_experts_ratio=0.0).gpu is None


@pytest.mark.parametrize(
    "flags",
    [{"device": "cuda"}, {"kt_num_gpu_experts": 1}, {"kt_enable_dynamic_expert_update": True}],
)
def test_a_gpu_that_is_too_small_and_was_asked_for_is_an_error(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"^--[a-z -]+: H100 is too small: .* take --device cpu"):
        plan(with_gpu(free=TOO_SMALL), **flags)


def test_too_little_of_both_memories_says_so_of_both() -> None:
    small = replace(with_gpu(free=TOO_SMALL), available_memory=GIB // 4)
    with pytest.raises(ConfigError, match=r"H100 is too small: .* Without the GPU: the model does not fit"):
        plan(small)


def test_what_fits_a_small_gpu_is_chosen_by_itself() -> None:
    for free, all_fit in ((2 * GIB - 3 * GIB // 8, False), (2 * GIB, True)):
        p = plan(with_gpu(free=free), context_length=512, max_running_requests=2)
        assert p.gpu is not None and p.gpu.sizes.experts > 0 and (p.gpu.sizes.experts == 960) == all_fit


def test_experts_in_cpu_memory_must_fit_there() -> None:
    short = replace(with_gpu(), available_memory=GIB // 4)
    with pytest.raises(ConfigError, match="--kt-gpu-experts-ratio"):
        plan(short, kt_gpu_experts_ratio=0.0)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"disable_cuda_graph": True}, ()),
        ({"cuda_graph_bs": (8, 2)}, (2, 8)),
        ({"cuda_graph_max_bs": 3}, (1, 2, 3)),
        ({"max_running_requests": 2}, (1, 2)),
        ({}, (*SMALL, 40, 48, 56, 64)),
        ({"cuda_graph_max_bs": 50}, (*SMALL, 40, 48, 50)),
        ({"cuda_graph_max_bs": 128}, (*SMALL, 40, 48, 56, 64)),
        ({"cuda_graph_max_bs": 40, "max_running_requests": 256}, (*SMALL, 40)),
        ({"max_running_requests": 1000, "cuda_graph_bs": (1000, 4)}, (4, 1000)),
        ({"max_running_requests": 1000, "cuda_graph_bs": (1000, 4), "cuda_graph_max_bs": 500}, (4,)),
        (
            {"max_running_requests": 200},
            (*SMALL, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200),
        ),
    ],
)
def test_graph_sizes(flags: dict[str, object], sizes: tuple[int, ...]) -> None:
    p = plan(with_gpu(), **flags)
    assert p.gpu is not None and p.gpu.graph_sizes == sizes


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"max_running_requests": 1}, (1, 2, 3, 4, 5, 6, 7, 8)),
        ({"max_running_requests": 1, "speculative_num_steps": 2}, (1, 2, 3)),
        ({"max_running_requests": 4, "speculative_num_steps": 3}, (*range(1, 9), 12, 16)),
        ({"max_running_requests": 100}, (*range(1, 9), *SMALL[6:], 40, 48, 56, 64, 80, 96, 100, 112, 128)),
        ({"max_running_requests": 8, "cuda_graph_bs": (5, 40), "speculative_num_steps": 1}, (*range(1, 9), 12, 16)),
        ({"max_running_requests": 1, "disable_cuda_graph": True}, ()),
        ({"chunked_prefill_size": 64}, (*range(1, 9), *SMALL[6:], 40, 48, 56, 64)),  # no step has more rows
        ({"chunked_prefill_size": 512, "max_prefill_tokens": 10, "max_running_requests": 9}, (*range(1, 9), 9, 10)),
        ({"chunked_prefill_size": -1, "context_length": 20, "max_running_requests": 9}, (*range(1, 9), 9, 12, 16, 20)),
    ],
)
def test_graphs_have_rows_for_drafts(flags: dict[str, object], sizes: tuple[int, ...]) -> None:
    """And the GPU's memory has room for their logits."""
    plain, p = plan(with_gpu(), **flags), plan(with_gpu(), speculative_algorithm="NGRAM", **flags)
    assert p.gpu is not None and p.gpu.graph_sizes == sizes
    before, now = (
        sum(e.nbytes for e in each.ledgers[0].entries if e.name == "graph logits") for each in (plain, p)
    )
    assert now == sum(sizes) * MODEL.vocab * 4 and (now > before or not sizes)


def test_graphs_larger_than_what_runs_together_are_explained() -> None:
    assert "no more than 64 requests" in reason(plan(with_gpu(), cuda_graph_max_bs=128), "CUDA graphs")
    assert "no more than 8" in reason(
        plan(with_gpu(), cuda_graph_bs=(16,), max_running_requests=8), "CUDA graphs"
    )
    assert "no more" not in reason(plan(with_gpu(), cuda_graph_max_bs=64), "CUDA graphs")
    many = plan(with_gpu(), max_running_requests=1000)
    assert many.gpu is not None and many.gpu.graph_sizes[-1] == 256
    assert "larger ones only with --cuda-graph-max-bs" in reason(many, "CUDA graphs")


# Qwen3-30B-A3B: 3.1 GiB of dense weights, 6144 experts of 9 MiB in bf16, 96 KiB of KV cache per token.
QWEN3_KEYS = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True, "vocab_size": 151936,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
}  # fmt: skip
QWEN3 = config_from_dict(QWEN3_KEYS)
QWEN3_KV = QWEN3.state_layout("bfloat16").token_bytes


def qwen3(gpu_gib: int, positions: int = 262144, **flags: object) -> Plan:
    return qwen3_of(gpu_gib * GIB, positions, **flags)


def qwen3_of(gpu_bytes: int, positions: int = 40960, **flags: object) -> Plan:
    roomy = replace(with_gpu(free=gpu_bytes), available_memory=250 * GIB)
    return plan(roomy, replace(QWEN3, max_positions=positions), **flags)


def test_graphs_of_prompts_keep_what_lies_within_dense_layers() -> None:
    """A row of gate and up in float32, and the activation in bfloat16; a piece of 512 MiB at a time."""
    dense, widths = {**QWEN3_KEYS, "model_type": "llama"}, (6144, 12288, 200_000)
    models = (config_from_dict({**dense, "intermediate_size": w}) for w in widths)
    taken = [prompt_graph_bytes(model, (512, 2048), False) for model in models]
    assert taken[1] - taken[0] == 2048 * 6144 * (2 * 4 + 2)
    assert taken[2] - taken[0] == (512 << 20) - 2048 * 6144 * (2 * 4 + 2)


def test_graphs_of_prompts_that_bus_and_cpu_share_are_counted() -> None:
    """Three of each layer where experts are streamed, one where none are, for every number of rows; each with its
    logits. A ring that holds no layer has a graph for each part."""
    own = {True: 48 * 3 + 1, False: 48 + 1}
    kept = {s: own[s] * GRAPH_BYTES + 48 * CHUNK_KERNELS * KERNEL_BYTES + 8 * 151936 * 4 for s in own}
    plain = prompt_graph_bytes(QWEN3, (2048,), False)
    assert prompt_graph_bytes(QWEN3, (512, 2048), False) - plain == kept[False]
    whole, splits = 1, len((128, 256, 512, 1024, 2048))
    assert prompt_graph_bytes(QWEN3, (2048,), True) - plain == (whole + splits) * kept[True] - kept[False]
    assert prompt_graph_bytes(QWEN3, (), True) == 0
    eight = prompt_graph_bytes(QWEN3, (2048,), 8) - prompt_graph_bytes(QWEN3, (2048,), 1)
    assert eight == (whole + splits) * 48 * 7 * (GRAPH_BYTES + PART_KERNELS * KERNEL_BYTES)


def test_the_ledger_has_graphs_of_prompts_and_holds() -> None:
    """Of a plan whose experts are streamed, and of one where all are on the GPU."""
    for gpu_gib, streamed in ((32, True), (120, False)):
        p = qwen3(gpu_gib, positions=32768, kt_gpu_experts_ratio=0.2 if streamed else 1.0)
        assert p.gpu is not None and p.gpu.sizes.prompt_sizes and (p.gpu.sizes.ring_bytes > 0) == streamed
        entries = {entry.name: entry.nbytes for entry in p.ledgers[0].entries}
        assert entries["prompt graphs"] == prompt_graph_bytes(QWEN3, p.gpu.sizes.prompt_sizes, 8 if streamed else 0)
        assert p.ledgers[0].total_bytes <= p.ledgers[0].budget_bytes


@pytest.mark.parametrize(("gpu_gib", "share"), [(32, 0.2), (120, 1.0)])
def test_prompts_that_spare_multiprocessors_have_memory_of_their_own(gpu_gib: int, share: float) -> None:
    """Where none of the experts is streamed, prompts that run alone have other graphs, too."""
    flags, streamed, parts = {"positions": 32768, "kt_gpu_experts_ratio": share}, share < 1, 8 if share < 1 else 0
    plain, p = (qwen3(gpu_gib, **flags, **more) for more in ({}, {"prefill_reserved_sms": 16}))
    assert plain.gpu is not None and p.gpu is not None and p.gpu.sizes.prompt_sizes == plain.gpu.sizes.prompt_sizes
    assert (plain.gpu.reserved_sms, p.gpu.reserved_sms) == (0, 16)
    assert reason(p, "reserved multiprocessors") == "--prefill-reserved-sms"
    entries = {entry.name: entry.nbytes for entry in p.ledgers[0].entries}
    assert entries["prompt graphs"] == prompt_graph_bytes(QWEN3, p.gpu.sizes.prompt_sizes, parts, 16)
    assert p.ledgers[0].total_bytes <= p.ledgers[0].budget_bytes
    one = prompt_graph_bytes(QWEN3, (2048,), False)
    rows = one - 49 * GRAPH_BYTES - 48 * CHUNK_KERNELS * KERNEL_BYTES - 8 * 151936 * 4
    more = prompt_graph_bytes(QWEN3, (2048,), streamed, 16) - prompt_graph_bytes(QWEN3, (2048,), streamed)
    assert more == (rows if streamed else one)


def test_nothing_is_spared_where_prompts_are_no_graphs() -> None:
    p = qwen3(80, positions=32768, disable_cuda_graph=True, prefill_reserved_sms=16)
    assert p.gpu is not None and p.gpu.reserved_sms == 0
    assert reason(p, "reserved multiprocessors") == "prompts are not CUDA graphs here"


@pytest.mark.parametrize("gpu_gib", [16, 24, 32, 80])
def test_a_long_context_leaves_room_for_experts(gpu_gib: int) -> None:
    """Most of what is left beside the dense weights, and nearly all of it is used."""
    p = qwen3(gpu_gib, mem_fraction_static=0.9)
    assert p.gpu is not None
    gpu = with_gpu(free=gpu_gib * GIB).gpus[0]
    workspace = GPU_WORKSPACE_BYTES + sum(p.gpu.graph_sizes) * 151936 * 4 + p.gpu.sizes.ring_bytes
    workspace += p.gpu.sizes.exchange_bytes
    workspace += unpacking_bytes(gpu, QWEN3, LONG_PREFILL_TOKENS if p.gpu.sizes.ring_bytes else 2048)
    tables = rope_bytes(QWEN3, QWEN3.max_positions)
    step = StepSize(LONG_PREFILL_TOKENS if p.gpu.sizes.ring_bytes else 2048, 32768, 1)
    workspace += cost_of(QWEN3.mixers[0]).scratch_bytes(step, QWEN3.hidden, 0)
    room = 0.9 * gpu_gib * GIB - workspace - dense_bytes(QWEN3, "bfloat16") - tables
    experts, kv = p.gpu.sizes.experts * QWEN3.expert_bytes("bf16"), p.num_pages * p.page_size * QWEN3_KV
    assert experts > 0.6 * room and room - 10 * 2**20 < experts + kv < room + 2**21
    assert p.context_length >= (32768 if gpu_gib > 16 else 16384)
    assert "the model could do 262144); --context-length" in reason(p, "context length") or gpu_gib == 80


def test_a_context_asked_for_takes_its_memory_from_experts() -> None:
    p = qwen3(24, context_length=131072)
    assert p.gpu is not None and p.context_length == 131072
    assert 0 < p.gpu.sizes.experts < qwen3(24).gpu.sizes.experts  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="--context-length 262144 needs more KV cache than the [0-9]+ tokens"
    ):
        qwen3(24, context_length=262144)


def test_what_experts_leave_is_the_kv_cache_s() -> None:
    """Where experts cannot use the memory, the context is as long as ever."""
    assert qwen3(32, kt_num_gpu_experts=0, positions=131072).context_length == 131072
    p = qwen3(80, kt_method="INT4")
    assert p.gpu is not None and (p.gpu.sizes.experts, p.context_length) == (6144, 262144)


def test_a_short_context_is_kept_whole() -> None:
    p = qwen3(24, positions=8192)
    assert p.gpu is not None and p.context_length == 8192
    assert p.num_pages * p.page_size * QWEN3_KV > 3 * GIB  # still a quarter: of several requests


def test_experts_in_cpu_memory_need_a_package_inside_graphs() -> None:
    p = plan(with_gpu(missing=("cuda-core",)), kt_gpu_experts_ratio=0.5)
    assert p.gpu is not None and p.gpu.graph_sizes == () and "cuda-core" in reason(p, "CUDA graphs")
    assert plan(with_gpu(missing=("cuda-core",)), kt_gpu_experts_ratio=1.0).gpu.graph_sizes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("ratio", "live", "why"),
    [
        (0.5, True, "--kt-enable-dynamic"),
        (0.0, False, "no expert is on the GPU"),
        (1.0, False, "every expert"),
    ],
)
def test_experts_move_only_between_two_sides(ratio: float, live: bool, why: str) -> None:
    p = plan(with_gpu(), kt_gpu_experts_ratio=ratio, kt_enable_dynamic_expert_update=True)
    assert p.gpu is not None and p.gpu.live == live
    assert why in reason(p, "live placement")
    still = plan(with_gpu(), kt_gpu_experts_ratio=ratio, disable_dynamic_expert_update=True).gpu
    assert still is not None and not still.live


@pytest.mark.parametrize(
    ("flags", "live", "why"),
    [
        ({}, True, "where it pays; an expert's side decides its last bits"),
        ({"disable_dynamic_expert_update": True}, False, "--disable-dynamic-expert-update"),
        ({"enable_deterministic_inference": True}, False, "an expert's side decides"),
        ({"map_experts": "always"}, False, "where the checkpoint has them"),
        ({"packed_cache": "kept"}, True, "where it pays"),  # experts are streamed, so they are copied anyway
        ({"packed_cache": "kept", "kt_gpu_prefill_token_threshold": 0}, False, "where --packed-cache has them"),
    ],
)
def test_where_nobody_asks_experts_move_where_nothing_speaks_against_it(
    flags: dict[str, object], live: bool, why: str
) -> None:
    p = plan(with_gpu(), kt_gpu_experts_ratio=0.5, **flags)
    assert p.gpu is not None and p.gpu.live == live and why in reason(p, "live placement")


@pytest.mark.parametrize(
    ("model", "missing", "live", "why"),
    [
        (MODEL, (), True, "where it pays"),
        (MODEL, ("cuda-core",), False, "the package cuda-core is missing"),
        (named_config("mixtral-8x7b", 2), (), False, "two of its experts do not fit 96 MiB of GPU memory"),
    ],
    ids=["all", "package", "large"],
)
def test_what_moving_takes_of_a_gpu_has_to_be_there(
    model: ModelConfig, missing: tuple[str, ...], live: bool, why: str
) -> None:
    """Where moving is asked for, no such reason counts."""
    flags: dict[str, object]
    for flags, moves in (({}, live), ({"kt_enable_dynamic_expert_update": True}, True)):
        p = plan(with_gpu(64 * GIB, missing), model, kt_gpu_experts_ratio=0.5, **flags)
        assert p.gpu is not None and p.gpu.live == moves
        assert flags or why in reason(p, "live placement")


def test_a_spare_place_is_nobodys_reason_to_fail() -> None:
    """Where moving was not asked for, it yields to memory that lacks the places beside what steps take."""
    per_expert, flags = MODEL.expert_bytes("bf16"), {"kt_gpu_experts_ratio": 0.5}
    still = plan(with_gpu(), **flags, disable_dynamic_expert_update=True)
    (needed,) = (each.total_bytes for each in still.ledgers if each.place == RAM)
    for room, spare, live in ((30 * 16 * per_expert, 15, False), (needed, 29, False), (needed, 31, True)):
        machine = replace(with_gpu(), available_memory=int((room + spare * per_expert) / DEFAULT_FRACTION))
        p = plan(machine, **flags)
        assert p.gpu is not None and p.gpu.live == live
        assert live or "no room for a spare place" in reason(p, "live placement")


def test_moving_cannot_be_asked_for_and_forbidden() -> None:
    with pytest.raises(ConfigError, match="opposites; leave one of the two out"):
        plan(with_gpu(), kt_enable_dynamic_expert_update=True, disable_dynamic_expert_update=True)


def test_moving_experts_leave_prompts_their_graphs() -> None:
    p, still = (plan(with_gpu(), kt_gpu_experts_ratio=0.5, disable_dynamic_expert_update=off) for off in (False, True))
    assert p.gpu is not None and still.gpu is not None and p.gpu.live and not still.gpu.live
    assert p.gpu.sizes.ring_bytes and p.gpu.sizes.prompt_sizes == still.gpu.sizes.prompt_sizes != ()


def test_moving_experts_takes_a_spare_place_per_layer() -> None:
    """30 layers of 32 experts, all but a spare place's worth of them fitting."""
    per_expert = MODEL.expert_bytes("bf16")
    exactly = replace(with_gpu(), available_memory=int((30 * 16 + 15) * per_expert / DEFAULT_FRACTION))
    flags = {"kt_gpu_experts_ratio": 0.5}
    assert plan(exactly, **flags).gpu is not None
    with pytest.raises(ConfigError, match="the experts that stay in CPU memory take"):
        plan(exactly, **flags, kt_enable_dynamic_expert_update=True)


def test_where_nothing_can_move_no_spare_place_is_needed() -> None:
    """Moving is asked for, but no expert is on the GPU."""
    per_expert = MODEL.expert_bytes("bf16")
    exactly = replace(with_gpu(), available_memory=int((30 * 32 + 15) * per_expert / DEFAULT_FRACTION))
    found = plan(exactly, kt_gpu_experts_ratio=0.0, kt_enable_dynamic_expert_update=True).gpu
    assert found is not None and not found.live


Q4_K_M = StoredFormat("q4_k + q6_k", True, 0.63, ("GGUF",), unread_by_gpu="q4_k, q6_k")


def stored_on_gpu(experts: StoredFormat, model: ModelConfig = MODEL, **flags: object) -> Plan:
    config = EngineConfig(model="demo", **flags)  # type: ignore[arg-type]
    return resolve(config, model, with_gpu(), StoredFormats(experts, experts, experts))


def test_experts_that_the_gpu_kernels_do_not_read_stay_on_the_cpu() -> None:
    p = stored_on_gpu(Q4_K_M)
    assert p.gpu is not None and p.gpu.sizes.experts == 0 and p.expert_format == "stored"
    assert reason(p, "GPU experts") == "the GPU kernels do not read q4_k, q6_k, so the CPU computes them"
    assert stored_on_gpu(Q4_K_M, kt_num_gpu_experts=0).gpu is not None
    converted = stored_on_gpu(Q4_K_M, kt_method="INT4").gpu
    assert converted is not None and converted.sizes.experts == 30 * 32


def test_experts_with_zero_points_are_on_the_gpu_and_streamed() -> None:
    p = stored_on_gpu(replace(INT4, zero_points=True), kt_gpu_experts_ratio=0.5)
    assert p.gpu is not None and p.gpu.sizes.experts > 0 and p.gpu.sizes.ring_bytes > 0


def test_shared_experts_are_not_fused_with_what_the_gpu_does_not_read() -> None:
    """Fused ones would always be on the GPU."""
    unread = replace(INT4, name="awq", unread_by_gpu="awq")
    assert stored_on_gpu(INT4).fuse_shared_experts
    p = stored_on_gpu(unread)
    assert not p.fuse_shared_experts and "do not read awq" in reason(p, "shared experts")
    here = resolve(EngineConfig(model="demo"), MODEL, machine(), StoredFormats(unread, unread, unread))
    assert here.fuse_shared_experts


@pytest.mark.parametrize("flags", [{"kt_num_gpu_experts": 8}, {"kt_gpu_experts_ratio": 0.5}])
def test_unreadable_experts_asked_for_on_the_gpu_are_an_error(flags: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=r"--kt-[a-z-]+: the GPU kernels do not read q4_k, q6_k; leave the flag out .*INT4"
    ):
        stored_on_gpu(Q4_K_M, **flags)


def test_sizes_that_the_gpu_kernels_do_not_take() -> None:
    odd_experts = model_of(replace(MOE, experts=Experts(32, 191), shared=None))
    p = plan(with_gpu(), odd_experts)
    assert p.gpu is not None and p.gpu.sizes.experts == 0 and "even width, not 191" in reason(p, "GPU experts")
    p = plan(with_gpu(), replace(MODEL, hidden=580))
    assert p.gpu is None and "multiple of 8, not 580" in reason(p, "device")


def test_dense_codes_stay_codes_on_the_gpu() -> None:
    fp8 = StoredFormat("fp8 128x128", True, 1.03, ("FP8",), 128, gpu_bytes_per_weight=1.03)
    p = resolve(EngineConfig(model="demo"), MODEL, with_gpu(), StoredFormats(INT4, INT4, fp8))
    assert p.gpu is not None and p.dense_codes
    assert reason(p, "dense format") == "as the checkpoint has it; nothing is rounded"
    assert not resolve(EngineConfig(model="demo"), MODEL, with_gpu(), StoredFormats(INT4)).dense_codes


def test_dense_codes_that_the_gpu_kernels_do_not_read_are_counted_as_numbers() -> None:
    p = stored_on_gpu(Q4_K_M)
    assert p.dense_codes
    why = reason(p, "dense format")
    assert "the GPU kernels do not read q4_k, q6_k, which is decoded to bfloat16" in why
    half = replace(Q4_K_M, gpu_bytes_per_weight=1.0)
    sizes = [dense_bytes(MODEL, "bfloat16", StoredFormats(dense=d, shared=d)) for d in (Q4_K_M, half)]
    codes = MODEL.dense_params - MODEL.vocab * MODEL.hidden  # the embedding is the head, and no codes
    assert sizes[0] == dense_bytes(MODEL, "bfloat16") and sizes[0] - sizes[1] == codes


def test_dense_codes_leave_room_for_experts() -> None:
    """Qwen3-30B-A3B's attention in fp8: 1.2 GiB more for experts and the KV cache."""
    fp8 = StoredFormat("fp8 128x128 + bf16", True, 1.4, ("FP8",), gpu_bytes_per_weight=1.4)
    roomy = replace(with_gpu(free=24 * GIB), available_memory=250 * GIB)
    config = EngineConfig(model="demo", context_length=32768)
    plain, coded = (resolve(config, QWEN3, roomy, StoredFormats(dense=d)) for d in (StoredFormat(), fp8))
    assert plain.gpu is not None and coded.gpu is not None
    saved = dense_bytes(QWEN3, "bfloat16") - dense_bytes(QWEN3, "bfloat16", StoredFormats(dense=fp8))
    assert saved == pytest.approx(0.6 * QWEN3.dense_params, rel=1e-3)
    assert coded.gpu.sizes.experts - plain.gpu.sizes.experts > 0.7 * saved / QWEN3.expert_bytes("bf16")


def test_flags_and_gpus_that_change_nothing_are_named(tmp_path: Path) -> None:
    two = with_gpu()
    two = replace(two, gpus=(two.gpus[0], replace(two.gpus[0], number=1, name="L40")))
    (line,) = plan(two).notices
    assert line.startswith("GPU 1 (L40) not used: one is used; --pipeline-parallel-size 2 gives unequal GPUs")
    (line,) = plan(with_gpu(), kt_num_gpu_experts=1000).notices
    assert line == "--kt-num-gpu-experts 1000: the model has 32 per layer, so all of them are meant"
    (line,) = plan(with_gpu(), init_expert_location=str(tmp_path / "x.pt")).notices
    assert "--init-expert-location changes nothing" in line and "only frequency reads statistics" in line
    (line,) = plan(with_gpu(), kt_num_gpu_experts=3, kt_gpu_experts_ratio=0.5).notices
    assert line == "--kt-num-gpu-experts changes nothing: --kt-gpu-experts-ratio beats it"


def test_frequency_needs_a_file_that_is_there(tmp_path: Path) -> None:
    flags = {"kt_expert_placement_strategy": "frequency", "kt_gpu_experts_ratio": 0.5}
    with pytest.raises(
        ConfigError, match="frequency needs activation statistics: give --init-expert-location"
    ):
        plan(with_gpu(), **flags)
    file = tmp_path / "counts.pt"
    with pytest.raises(ConfigError, match=r"--init-expert-location .*counts.pt does not exist"):
        plan(with_gpu(), init_expert_location=str(file), **flags)
    file.touch()
    found = plan(with_gpu(), init_expert_location=str(file), **flags).gpu
    assert found is not None and found.statistics == str(file)
    everything = plan(with_gpu(), kt_expert_placement_strategy="frequency", kt_gpu_experts_ratio=1.0)
    assert everything.gpu is not None and everything.gpu.statistics is None


def test_the_ledgers_of_both_memories_are_the_sums_that_were_made() -> None:
    p = plan(with_gpu(), kt_gpu_experts_ratio=0.5)
    vram, ram = p.ledgers
    sizes = {entry.name: entry.nbytes for entry in vram.entries}
    assert (vram.place, vram.budget_bytes, vram.free_bytes) == ("VRAM", int(0.9 * 16 * GIB), 16 * GIB)
    assert sizes["dense weights"] == dense_bytes(MODEL, "bfloat16")
    assert sizes["experts"] == 30 * 16 * MODEL.expert_bytes("bf16") and vram.left_bytes >= -(1 << 20)
    beside = {entry.name: entry.nbytes for entry in ram.entries}
    assert beside["experts"] == sizes["experts"] and beside["compiled grammars"] == GRAMMAR_BYTES
    assert ram.place == "RAM" and ram.left_bytes > 0


def test_experts_are_streamed_for_long_prompts() -> None:
    """Where the CPU has some: steps are long, and a ring of the GPU's memory is theirs."""
    p = qwen3(24, kt_method="INT4", kt_gpu_experts_ratio=0.5)
    assert p.gpu is not None and p.gpu.stream_from is None
    assert 600 * 2**20 < p.gpu.sizes.ring_bytes <= RING_BYTES and p.max_step_tokens == LONG_PREFILL_TOKENS
    assert "measured" in reason(p, "streamed experts")
    (vram,) = (each for each in p.ledgers if each.place == VRAM)
    assert [e.nbytes for e in vram.entries if e.name == "ring"] == [p.gpu.sizes.ring_bytes]
    asked = qwen3(24, kt_gpu_experts_ratio=0.25, kt_gpu_prefill_token_threshold=700)
    assert asked.gpu is not None and asked.gpu.stream_from == 700
    assert reason(asked, "streamed experts") == "--kt-gpu-prefill-token-threshold"
    assert qwen3(24, kt_gpu_experts_ratio=0.25, chunked_prefill_size=600).max_step_tokens == 600


@pytest.mark.parametrize(
    ("changes", "flags", "why"),
    [
        ({}, {"kt_gpu_prefill_token_threshold": 0}, "threshold 0"),
        ({"moe_intermediate_size": 764}, {}, "multiples of 8"),
    ],
)
def test_experts_stay_where_they_cannot_be_streamed(
    changes: dict[str, int], flags: dict[str, int], why: str
) -> None:
    roomy = replace(with_gpu(free=24 * GIB), available_memory=250 * GIB)
    p = plan(roomy, config_from_dict(QWEN3_KEYS | changes), kt_gpu_experts_ratio=0.25, **flags)
    assert p.gpu is not None and (p.gpu.sizes.ring_bytes, p.gpu.stream_from) == (0, 0)
    assert why in reason(p, "streamed experts") and p.max_step_tokens == 2048


def test_a_prompt_alone_has_long_steps_where_all_experts_are_on_the_gpu() -> None:
    """Their scratch is in the ledger, and prompts that others wait for have short ones."""
    p = qwen3(80, kt_method="INT4")
    assert p.gpu is not None and p.gpu.sizes.experts == QWEN3.routed_experts
    assert (p.max_step_tokens, p.gpu.sizes.step_tokens, p.gpu.sizes.shared_tokens) == (8192, 8192, 2048)
    assert reason(p, "tokens per step") == "default, for a prompt alone; 2048 of prompts that others wait for"
    scratch, most = (entry.nbytes for entry in p.ledgers[0].entries if entry.name == "prompt scratch"), p.context_length
    assert next(scratch) == cost_of(QWEN3.mixers[0]).scratch_bytes(StepSize(8192, most, 1), QWEN3.hidden, 0)
    assert p.ledgers[0].total_bytes <= p.ledgers[0].budget_bytes
    assert p.gpu.sizes.prompt_sizes == (128, 256, 512, 1024, 2048)
    asked = qwen3(80, kt_method="INT4", chunked_prefill_size=4096)
    assert asked.gpu is not None and (asked.max_step_tokens, asked.gpu.sizes.shared_tokens) == (4096, 0)
    fixed = qwen3(80, kt_method="INT4", enable_deterministic_inference=True)
    assert fixed.gpu is not None and (fixed.max_step_tokens, fixed.gpu.sizes.shared_tokens) == (256, 0)
    uncut = qwen3(80, kt_method="INT4", disable_cuda_graph=True)  # who comes would wait for a whole chunk
    assert uncut.gpu is not None and (uncut.max_step_tokens, uncut.gpu.sizes.shared_tokens) == (2048, 0)


def test_long_steps_take_no_expert_s_place_and_shorten_no_context() -> None:
    """On a GPU that all experts just fit: it says why its steps are short."""
    flags = {"kt_method": "INT4", "disable_dynamic_expert_update": True}  # moving would take room while not all fit
    fits = next(gib for gib in range(16, 40) if qwen3(gib, 40960, **flags).gpu.sizes.experts == 6144)  # type: ignore[union-attr]
    found = [qwen3_of(fits * GIB - (i << 26), **flags) for i in range(-16, 16)]
    some = [p for p in found if p.gpu is not None and p.gpu.sizes.experts == 6144 and p.max_step_tokens == 2048]
    assert some, [(p.gpu.sizes.experts, p.max_step_tokens) for p in found if p.gpu]
    for p in some:
        why = r"default; 8192 for a prompt alone would take .* from experts, context or prompt graphs"
        assert re.fullmatch(why, reason(p, "tokens per step"))
        assert p.gpu is not None and (p.gpu.sizes.step_tokens, p.gpu.sizes.shared_tokens) == (2048, 0)
    longer = [p for p in found if p.gpu is not None and p.gpu.sizes.experts == 6144 and p.max_step_tokens == 8192]
    assert longer and all(p.gpu is not None and p.gpu.sizes.prompt_sizes for p in longer)  # graphs go first
    assert all(p.ledgers[0].left_bytes > -p.page_size * QWEN3_KV for p in found)  # the last page is a whole one


def test_nothing_is_said_where_all_experts_are_on_the_gpu() -> None:
    p = qwen3(80, kt_method="INT4")
    assert p.gpu is not None and p.gpu.sizes.ring_bytes == 0
    assert "streamed experts" not in [decision.name for decision in p.decisions]


DEFERRED_FLAG = "--kt-max-deferred-experts-per-token"


@pytest.mark.parametrize(
    ("machine_", "flags", "why"),
    [
        (machine(), {}, "none is used"),
        (with_gpu(), {}, "every expert is on the GPU"),
        (with_gpu(), {"kt_num_gpu_experts": 4, "disable_cuda_graph": True}, "only decode steps that are CUDA graphs"),
    ],
)
def test_deferred_experts_that_change_nothing_say_so(machine_: Machine, flags: dict[str, object], why: str) -> None:
    p = plan(machine_, kt_max_deferred_experts_per_token=2, **flags)
    (line,) = [line for line in p.notices if line.startswith(DEFERRED_FLAG)]
    assert line.startswith(f"{DEFERRED_FLAG} 2 changes nothing: ") and why in line
    assert p.gpu is None or p.gpu.deferred == 0


@pytest.mark.parametrize(("asked", "deferred"), [(2, 2), (1000, MODEL.moe.router.top_k)])
def test_deferred_experts_are_announced_as_lossy(asked: int, deferred: int) -> None:
    p = plan(with_gpu(), kt_max_deferred_experts_per_token=asked, kt_num_gpu_experts=4)
    assert p.gpu is not None and p.gpu.deferred == deferred
    assert "lossy" in reason(p, "deferred experts")
    (line,) = [line for line in p.notices if line.startswith(DEFERRED_FLAG)]
    assert f"is lossy: up to {deferred} of " in line
    assert f"kt quality demo {DEFERRED_FLAG} {asked} --kt-gpu-experts-ratio 0.1" in line
    usual = plan(with_gpu(), kt_num_gpu_experts=4)
    assert usual.gpu is not None and usual.gpu.deferred == 0
    assert not any(DEFERRED_FLAG in line for line in usual.notices)


def test_rows_of_wide_experts_have_room_on_large_gpus() -> None:
    """Mixtral's 8192 tokens are one piece on 80 GB, which the plan counts; Qwen3's fit in what every GPU has. Fewer
    tokens have fewer rows. Activations take the place of gates: rows as wide as a layer are beside gate and up."""
    assert pair_bytes(4096, 14336) == 2 * (4096 + 2 * 14336)
    wide, (large, small) = named_config("mixtral-8x7b", None), (with_gpu(free=n * GIB).gpus[0] for n in (40, 12))
    rows = 8192 * 2 * pair_bytes(4096, 14336)
    few = 8192 * 8 * pair_bytes(2048, 768)
    assert few < LEAST_ROW_BYTES < rows <= expert_row_bytes(large.memory_bytes)
    unpacked = {gpu: expert_scratch_bytes(gpu.memory_bytes, 8, 4096, 14336) for gpu in (large, small)}
    assert unpacking_bytes(large, wide, 8192) - unpacked[large] == rows
    assert unpacking_bytes(large, wide, 2048) - unpacked[large] == rows // 4
    assert unpacking_bytes(large, wide, 32768) - unpacked[large] == MOST_ROW_BYTES
    assert unpacking_bytes(small, wide, 8192) - unpacked[small] == LEAST_ROW_BYTES
    for gpu in (large, small):
        assert unpacking_bytes(gpu, QWEN3, 8192) - expert_scratch_bytes(gpu.memory_bytes, 128, 2048, 768) == few


@pytest.mark.parametrize(
    ("gpu_gib", "sizes", "experts"),
    [
        (80, (8, 4096, 14336), 3),  # Mixtral: 1008 MiB of 1280
        (24, (8, 4096, 14336), 1),
        (8, (8, 4096, 14336), 1),  # takes more than its share of such a GPU
        (80, (128, 2048, 768), 128),  # Qwen3-30B-A3B: a whole layer
        (80, (64, 2048, 1024), 64),  # OLMoE: no more than a layer has
        (24, (256, 7168, 2048), 4),
    ],
)
def test_unpacked_experts_are_counted_whole(
    gpu_gib: int, sizes: tuple[int, int, int], experts: int
) -> None:
    _, hidden, width = sizes
    assert experts_at_once(gpu_gib * GIB, *sizes) == experts
    assert expert_scratch_bytes(gpu_gib * GIB, *sizes) == experts * 3 * hidden * width * 2


def test_a_model_without_experts_unpacks_none() -> None:
    """Its rows between gate, up and down are counted: in float32, and their activations."""
    (gpu,), layer = with_gpu().gpus, pre_norm(ATTENTION, Dense(1536), NORM)
    dense = replace(MODEL, layers=(layer,) * 30)
    assert unpacking_bytes(gpu, dense, 64) == 64 * (2 * 4 + 2) * 1536
