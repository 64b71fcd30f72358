"""What a plan gives up before a GPU is idle or a context short; that advice holds; that no alternative is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from plans import GIB, machine, reason
from tandem.bench.architectures import named_subject
from tandem.errors import ConfigError, DoesNotFit
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
from tandem.planner import best_plan, sizing
from tandem.planner.choices.cached import cached_as
from tandem.planner.choices.speculation import drafting
from tandem.planner.cuda_graphs import prompt_graph_bytes
from tandem.planner.expert_format import dtype_of
from tandem.planner.forecast.advice import LEAST_KEPT, PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine, wished_speeds
from tandem.planner.forecast.prediction import WIDTH, WORTH
from tandem.planner.forecast.report import Report, report
from tandem.planner.gpu_plan import GPU_WORKSPACE_BYTES, needs_gpu, usable_gpu
from tandem.planner.one_plan import PlanRequest, one_plan, running_sequences
from tandem.planner.plan import Plan
from tandem.planner.tight import (
    USABLE_CONTEXT,
    USUAL,
    Tight,
    first_worth,
    room_of,
    token_seconds,
    wanted_tokens,
)
from tandem.spec.gpu_scratch import (
    LEAST_ROW_BYTES,
    MOST_ROW_BYTES,
    expert_row_bytes,
    expert_scratch_bytes,
    experts_at_once,
    pair_bytes,
    ring_of,
)

SERVER = MachineWish("4090", "768GB", "350GB/s", 64, "amx", "25GB/s")
LAPTOP = MachineWish("8GB@250GB/s", "32GB", "60GB/s", 8, "avx2", "12GB/s")
WORKSTATION = MachineWish("4090", "256GB", "250GB/s", 32, "avx512_bf16", "25GB/s")


def asked(name: str, wish: MachineWish, **flags: Any) -> PlanQuestion:
    (model, stored), host = named_subject(name), wished_machine(wish, machine())
    config = EngineConfig.from_keywords(name, **flags)
    return PlanQuestion(config, model, host, stored, wished_speeds(wish, host, None))


def told(name: str, wish: MachineWish, **flags: Any) -> Report:
    return report(name, asked(name, wish, **flags))


def middles(question: PlanQuestion, plan: Plan) -> tuple[float, float]:
    found = question.predicted(plan)
    return found.decode[1].middle, found.prompt.middle


def test_deepseek_v3_uses_a_card_of_24_gb() -> None:
    """Prompts are several times as fast as on 64 AMX cores alone; the embedding is where its rows are read over the
    bus."""
    question = asked("deepseek-v3", SERVER, mem_fraction_static=0.95)
    plan, alone = question.plan(), question.plan(device="cpu")
    assert plan.gpu is not None and plan.gpu.embedding_in_ram and plan.gpu.sizes.ring_bytes
    assert middles(question, plan)[1] > 4 * middles(question, alone)[1]
    assert "embedding in CPU memory" in value(plan) and "CPU memory" in reason(plan, "made to fit")
    assert "else: a context of" in reason(plan, "made to fit")
    filled = question.plan(mem_fraction_static=0.98)
    assert filled.gpu is not None and filled.context_length >= 16000
    plain = asked("deepseek-v3", SERVER, kt_method="INT4").plan()
    assert plain.gpu is not None and plain.context_length >= 16000 and "97% of GPU memory" in value(plain)


def value(plan: Plan) -> str:
    return next((each.value for each in plan.decisions if each.name == "made to fit"), "")


@pytest.mark.parametrize(
    ("name", "gpu"), [("qwen3.5-35b-a3b", "8GB@250GB/s"), ("qwen3.5-35b-a3b-fp8", "6GB@200GB/s")]
)
def test_a_laptop_uses_its_gpu(name: str, gpu: str) -> None:
    """For which fewer sequences and shorter chunks are taken; answers are twice as fast as without."""
    question = asked(name, replace(LAPTOP, gpus=gpu), kt_method="INT4")
    plan, alone = question.plan(), question.plan(device="cpu")
    assert plan.gpu is not None and plan.context_length >= 16000 and plan.max_running_requests < 16
    assert "more requests wait" in reason(plan, "made to fit")
    assert all(now > 2 * then for now, then in zip(middles(question, plan), middles(question, alone), strict=True))


def test_states_of_sequences_leave_a_context_on_a_laptop() -> None:
    """16 of them took 3 GiB, and left 4286 tokens."""
    question = asked("qwen3.5-35b-a3b", replace(LAPTOP, gpus="none"), kt_method="INT4")
    plan = question.plan()
    assert plan.context_length >= 16384 and plan.max_running_requests == 4
    assert "else: a context of" in reason(plan, "made to fit")
    kept = question.plan(max_running_requests=16)
    assert kept.context_length < 16384 and kept.max_running_requests == 16  # as it was asked for


SMALL = MachineWish("16GB@600GB/s", "96GB", "120GB/s", 16, "avx2", "25GB/s")


def test_a_gpu_is_not_taken_for_a_context_that_nobody_can_use() -> None:
    """3,163 tokens there, 54,565 without it, at a third of the speed; who asks for the GPU gets it."""
    found = told("glm-4.5-air", SMALL, kt_method="INT4")
    plan = found.plan
    assert plan is not None and plan.gpu is None and plan.context_length > 50000
    assert "on a GPU of 16 GiB@600GB/s a context of 3163 tokens would be what fits" in plan.idle
    larger, here = found.to_use_gpu
    assert larger.change == "a GPU with 24 GB" and here.change == "--device cuda"
    assert here.brings.startswith("decoding 2.") and here.brings.endswith("a context of 3163 tokens")
    question = asked("glm-4.5-air", SMALL, kt_method="INT4")
    assert question.plan(device="cuda").context_length == 3163
    short = question.plan(context_length=2048)
    assert short.gpu is not None and short.context_length == 2048  # as it was asked for


def test_a_short_context_is_taken_for_much_speed_alone() -> None:
    """12,915 tokens of 40,960 for answers that are 1.4 times as fast, and prompts 18 times."""
    question = asked("qwen3-30b-a3b", replace(SMALL, gpus="5.5GB@200GB/s", ram="32GB"), kt_method="INT4")
    plan, alone = question.plan(), question.plan(device="cpu")
    assert plan.gpu is not None and USABLE_CONTEXT <= plan.context_length < 16384 < alone.context_length
    assert prod(middles(question, plan)) > WIDTH**2 * prod(middles(question, alone))
    whole = asked("olmoe-1b-7b", replace(SMALL, gpus="6GB@200GB/s"), kt_method="INT4").plan()
    assert whole.gpu is not None and whole.context_length == 4096  # all that the model has


@pytest.mark.parametrize(
    ("gpu", "cpu", "best"),
    [
        ((800, 1.0), (54565, 3.0), "cpu"),  # too short, however fast
        ((8000, 1.0), (16384, 9.0), "cpu"),
        ((9000, 1.0), (16384, 1.5), "gpu"),  # usable, and clearly faster
        ((9000, 1.0), (16384, 1.3), "cpu"),
        ((16384, 1.0), (54565, 1.3), "gpu"),  # both have what is wanted
        ((16384, 1.5), (16384, 1.0), "cpu"),
        ((800, 1.0), (3000, 1.5), "gpu"),  # neither is usable
        ((800, 1.0), (3000, 1.3), "cpu"),
    ],
)
def test_which_context_is_worth_which_speed(gpu: tuple[int, float], cpu: tuple[int, float], best: str) -> None:
    """Tokens, and seconds of a token."""
    assert first_worth([("gpu", *gpu), ("cpu", *cpu)], 16384, WIDTH) == best


def test_flags_that_were_given_are_kept() -> None:
    flags = {"max_running_requests": 8, "chunked_prefill_size": 2048, "mem_fraction_static": 0.9}
    plan = asked("qwen3.5-35b-a3b", replace(LAPTOP, gpus="9GB"), kt_method="INT4", **flags).plan()
    assert plan.gpu is not None and (plan.max_running_requests, plan.max_step_tokens) == (8, 2048)
    assert "embedding" in value(plan) and "%" not in value(plan)
    assert reason(plan, "running requests") == "--max-running-requests"


def test_flags_that_leave_a_gpu_idle_are_named() -> None:
    flags = {"max_running_requests": 8, "chunked_prefill_size": 2048, "mem_fraction_static": 0.9}
    found = told("qwen3.5-35b-a3b", replace(LAPTOP, gpus="7.5GB"), kt_method="INT4", **flags)
    assert found.plan is not None and found.plan.gpu is None and "a GPU of 7.5 GiB" in found.plan.idle
    assert found.to_use_gpu[0].change.startswith("without --") and not found.to_use_gpu[0].lossy


def test_what_is_given_up_counts_in_both_ledgers() -> None:
    question = asked("deepseek-v3", SERVER, mem_fraction_static=0.95)
    plan, embedding = question.plan(), 129280 * 7168 * 2
    vram, ram = plan.ledgers
    entries = {entry.name: entry for entry in vram.entries} | {entry.name: entry for entry in ram.entries}
    whole = sizing.dense_bytes(question.model, "bfloat16", question.stored)
    assert entries["dense weights"].nbytes == whole - embedding
    assert entries["embedding"].nbytes >= embedding and vram.left_bytes >= 0 and ram.left_bytes >= 0


def test_ranks_that_cannot_be_are_left_out() -> None:
    """The whole of three GPUs' machine: fewer ranks, or one of the GPUs, are faster than ranks on the CPU."""
    found = told("qwen3-30b-a3b", replace(WORKSTATION, gpus="3x4090"), tensor_parallel_size=4)
    changes = [each.change for each in found.to_fit]
    assert {"--tensor-parallel-size 2", "without --tensor-parallel-size"} & set(changes[:1])
    assert not any("cpu" in each for each in changes)
    question = asked("qwen3-30b-a3b", replace(WORKSTATION, gpus="3x4090"))
    plan = question.plan()
    assert plan.gpu is not None and "GPU 1 (4090), GPU 2 (4090) not used" in " ".join(plan.notices)
    assert "3 × 4090" in found.machine


def test_a_refusal_names_both_flags_that_fit_together() -> None:
    """GLM-4.5-Air in a bit more than 64 GB beside a GPU, and without one."""
    for wish in (MachineWish("22GB", "66GB"), MachineWish("none", "78GB")):
        with pytest.raises(DoesNotFit, match=r"--kt-method INT4 --mem-fraction-static 0\.\d+ fits") as error:
            asked("glm-4.5-air", wish, mem_fraction_static=None).plan()
        assert "use a larger machine" not in str(error.value).partition("Without the GPU")[0]


def test_a_threshold_that_no_step_reaches_is_said() -> None:
    """The tutorial's line of DeepSeek-V4: prompts would be twice as fast."""
    flags = {"chunked_prefill_size": 2048, "kt_gpu_prefill_token_threshold": 4096}
    found = told("deepseek-v4-flash", WORKSTATION, **flags)
    (said,) = (each for each in found.notices if each.startswith("--kt-gpu-prefill-token-threshold 4096 is never"))
    assert "at most 2048 rows (--chunked-prefill-size)" in said
    assert found.plan is not None and found.plan.gpu is not None and found.plan.gpu.sizes.ring_bytes == 0
    assert found.to_go_faster[0].change == "without --kt-gpu-prefill-token-threshold"
    for reached in ({"chunked_prefill_size": 4096}, {"chunked_prefill_size": None}):
        plan = asked("deepseek-v4-flash", WORKSTATION, **flags | reached).plan()
        assert plan.gpu is not None and plan.gpu.sizes.ring_bytes and plan.gpu.stream_from == 4096
        assert not any("never reached" in each for each in plan.notices)
    plan = asked("deepseek-v4-flash", WORKSTATION, kt_gpu_prefill_token_threshold=9000).plan()
    assert any("at most 8192 rows (the default)" in each for each in plan.notices)


def test_an_idle_gpu_is_in_the_first_line_with_what_would_use_it() -> None:
    found = told("deepseek-v3", replace(SERVER, gpus="12GB"), mem_fraction_static=0.95)
    assert found.plan is not None and found.plan.gpu is None
    assert found.plan.idle.startswith("GPU 0 (a GPU of 12 GiB) not used: a GPU of 12 GiB is too small")
    assert [way.change for way in found.to_use_gpu] == ["a GPU with 24 GB"]
    larger = asked("deepseek-v3", replace(SERVER, gpus="24GB"), mem_fraction_static=0.95).plan()
    assert larger.gpu is not None
    found = told("qwen3-30b-a3b", replace(WORKSTATION, gpus="2x4090"), device="cpu")
    assert found.plan is not None and found.plan.idle == "GPU 0 (4090), GPU 1 (4090) not used: --device cpu"
    assert found.to_use_gpu[0].change == "without --device" and "times as fast" in found.to_use_gpu[0].brings


def test_rows_of_experts_are_counted_as_the_gpu_has_room_for_them() -> None:
    """1/48 of its memory, 512 MiB at least: graphs of prompts on a card of 24 GB take a GiB less than on one of 80."""
    model, sizes = named_subject("mixtral-8x7b")[0], (2048, 8192)
    rows = 8192 * 2 * pair_bytes(4096, 14336)
    assert LEAST_ROW_BYTES < rows < MOST_ROW_BYTES
    small, large = (prompt_graph_bytes(model, sizes, 0, 0, expert_row_bytes(gib * GIB)) for gib in (24, 80))
    assert large - small == rows - LEAST_ROW_BYTES
    question = asked("mixtral-8x7b", WORKSTATION, kt_method="INT4", kt_gpu_experts_ratio=0.1)
    plan, gpu = question.plan(), question.machine.gpus[0]
    assert plan.gpu is not None and plan.gpu.sizes.prompt_sizes
    (taken,) = (each.nbytes for each in plan.ledgers[0].entries if each.name == "prompt graphs")
    at_once = experts_at_once(gpu.memory_bytes, 8, 4096, 14336)
    parts = -(-8 // ring_of(model.expert_bytes("int4"), at_once).experts)
    assert taken == prompt_graph_bytes(model, plan.gpu.sizes.prompt_sizes, parts, 0, LEAST_ROW_BYTES)


def workspace(question: PlanQuestion, plan: Plan) -> int:
    """Bytes of Qwen3-30B-A3B's rows of experts."""
    taken = {entry.name: entry.nbytes for entry in plan.ledgers[0].entries}
    scratch = expert_scratch_bytes(question.machine.gpus[0].memory_bytes, 128, 2048, 768)
    return taken["workspace"] + taken["attention sums"] - scratch - GPU_WORKSPACE_BYTES


def test_rows_are_counted_for_the_steps_that_a_plan_takes() -> None:
    """8192 tokens where experts are streamed, 2048 where they are not, and chunks that are given or taken for room."""
    question, each = asked("qwen3-30b-a3b", WORKSTATION, kt_method="INT4"), 8 * pair_bytes(2048, 768)
    changes: dict[int, dict[str, Any]] = {
        8192: {}, 2048: {"kt_gpu_prefill_token_threshold": 0}, 1024: {"chunked_prefill_size": 1024},
    }  # fmt: skip
    for tokens, flags in changes.items():
        plan = question.plan(**flags)
        assert plan.gpu is not None and plan.max_step_tokens == tokens
        assert workspace(question, plan) == tokens * each
    small = asked("qwen3-30b-a3b", replace(SMALL, gpus="5.5GB@200GB/s", ram="32GB"), kt_method="INT4")
    cut = small.plan()
    assert "chunks of 1024 tokens" in value(cut) and workspace(small, cut) == 1024 * each
    assert question.plan(kt_gpu_prefill_token_threshold=0).gpu.sizes.experts > question.plan().gpu.sizes.experts  # type: ignore[union-attr]


def test_what_is_easy_is_given_up_before_chunks() -> None:
    """With the embedding on a GPU of 24 GB DeepSeek-V3 would have room for chunks of 256 tokens, at half the speed."""
    room = room_of(EngineConfig.from_keywords("m"), named_subject("deepseek-v3")[0], 64, True)
    assert [each.embedding_in_ram for each in room.tightest()] == [True, False]
    question = asked("deepseek-v3", SERVER, mem_fraction_static=0.95)
    plan, short = question.plan(), question.plan(chunked_prefill_size=256)
    assert plan.max_step_tokens == 4096 and plan.gpu is not None and plan.gpu.embedding_in_ram
    assert prod(middles(question, plan)) > 2 * prod(middles(question, short))


def test_sizing_runs_a_few_times_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the usual plan holds: of that, of a ring and graphs; of what would be faster and costs nothing. Each once
    more with buffers for experts that change places."""
    counted = list[int]()
    divided = sizing._divided
    monkeypatch.setattr(sizing, "_divided", lambda *args: counted.append(1) or divided(*args))
    question = asked("qwen3-30b-a3b", WORKSTATION, kt_method="INT4")
    for flags, times in (({"disable_dynamic_expert_update": True}, 1), ({}, 2)):
        counted.clear()
        assert question.plan(**flags).gpu and len(counted) <= times * 3 * 4
        counted.clear()
        assert question.fits(**flags) and len(counted) == times * 3


NAMES = ("qwen3-30b-a3b", "qwen3.5-35b-a3b-fp8", "gpt-oss-120b", "deepseek-v3", "glm-4.5-air")
FLAGS = st.fixed_dictionaries({
    "mem_fraction_static": st.none() | st.floats(0.5, 0.95), "kt_method": st.sampled_from([None, "INT4"]),
    "max_running_requests": st.none() | st.integers(1, 64), "context_length": st.none() | st.integers(1024, 32768),
    "chunked_prefill_size": st.none() | st.sampled_from([512, 4096]),
    "device": st.sampled_from(["auto", "auto", "cpu"]), "kt_gpu_experts_ratio": st.sampled_from([None, None, 0.0, 0.1]),
})  # fmt: skip
MACHINES = st.tuples(st.lists(st.integers(6, 96), max_size=2), st.integers(16, 900), st.sampled_from([8, 32]))


def made(sizes: tuple[list[int], int, int]) -> Machine:
    gpus, ram, cores = sizes
    there = [Gpu("a GPU", gib * GIB, int(gib * GIB * 0.97), "", i, "", (9, 0)) for i, gib in enumerate(gpus)]
    host = machine(cores)
    return replace(host, gpus=tuple(there), total_memory=ram * GIB, available_memory=int(ram * GIB * 0.95))


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@example("deepseek-v3", ([24], 900, 32), {"mem_fraction_static": 0.95})
@example("qwen3.5-35b-a3b-fp8", ([8], 64, 8), {"kt_method": "INT4"})
@example("deepseek-v3", ([10], 900, 32), {"mem_fraction_static": 0.9, "device": "cpu"})
@given(st.sampled_from(NAMES), MACHINES, FLAGS)
def test_advice_holds_and_no_alternative_is_clearly_faster(
    name: str, sizes: tuple[list[int], int, int], flags: dict[str, Any]
) -> None:
    host, (model, stored) = made(sizes), named_subject(name)
    note(f"{name} {sizes} {flags}")
    given_flags = {flag: each for flag, each in flags.items() if each not in (None, "auto")}
    config = EngineConfig.from_keywords(name, **given_flags)
    question = PlanQuestion(config, model, host, stored, wished_speeds(MachineWish(), host, None))
    found = report(name, question)
    advice_holds(question, found)
    if found.plan is not None:
        wish = PlanRequest(config, cached_as(config, drafting(config, model)), host, stored)
        no_alternative_is_clearly_faster(wish, found.plan)


def advice_holds(question: PlanQuestion, found: Report) -> None:
    """Each way can be planned and brings what it says."""
    for way in found.to_fit:
        assert not way.changes or question.plan(**way.changes)
    speeds = {way.change: prod(middles(question, question.plan(**way.changes))) for way in found.to_fit if way.changes}
    left_out = [speed for change, speed in speeds.items() if change.startswith("without")]
    assert min(speeds.values(), default=0.0) >= max(left_out, default=0.0) * 0.999 or len(left_out) > 1
    if found.plan is None:
        return
    now = middles(question, found.plan)
    for way in (*found.to_go_faster, *found.to_use_gpu):
        if not way.changes:
            continue
        plan = question.plan(**way.changes)
        gains = [new / old for new, old in zip(middles(question, plan), now, strict=True)]
        assert max(gains) >= (1.0 if way in found.to_use_gpu else WORTH), (way, gains)
        assert plan.gpu if way in found.to_use_gpu else min(gains) >= LEAST_KEPT, (way, gains)


def no_alternative_is_clearly_faster(wish: PlanRequest, plan: Plan) -> None:
    """Of those that cost neither answers at once nor chunks; where room is short, of all; and without a GPU."""
    wanted = min(USABLE_CONTEXT, wanted_tokens(wish.config, wish.model))
    taken = token_seconds(plan, wish.model, wish.stored, wish.machine)
    for tight, other in alternatives(wish, plan):
        if other.context_length >= min(wanted, plan.context_length):
            seconds = token_seconds(other, wish.model, wish.stored, wish.machine)
            assert taken <= 1.001 * WIDTH * seconds, (tight, other.decisions)


def alternatives(wish: PlanRequest, plan: Plan) -> Iterator[tuple[Tight, Plan]]:
    gpu, why = usable_gpu(wish.config, wish.model, wish.machine)
    running, _ = running_sequences(wish.config, wish.model, dtype_of(wish.config))
    room = room_of(wish.config, wish.model, running, gpu is not None)
    short = any(each.name == "made to fit" for each in plan.decisions)
    tights = [*room.easy(), *(room.steps() if short else [])]
    for tight in tights:
        try:
            yield tight, one_plan(wish, (gpu, why), tight)
        except ConfigError:
            continue
    if gpu is None or needs_gpu(wish.config) or wish.config.kt_gpu_experts_ratio is not None:
        return
    try:
        alone = one_plan(wish, (None, ""), USUAL)
    except ConfigError:
        return
    if alone.context_length >= min(plan.context_length, wanted_tokens(wish.config, wish.model)):
        yield USUAL, alone


def test_what_would_be_faster_without_the_gpu_is_planned_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a wish's GPU is used then; a share that was asked for keeps it."""
    question = asked("qwen3-30b-a3b", WORKSTATION, kt_method="INT4")
    used = question.plan()
    assert used.gpu is not None
    monkeypatch.setattr(best_plan, "token_seconds", lambda plan, *_: 1.0 if plan.gpu is None else 2.0)
    idle = question.plan()
    assert idle.gpu is None and "without 4090 it is faster" in idle.idle
    assert question.plan(kt_gpu_experts_ratio=0.25).gpu is not None


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "glm-4.5-air"])
def test_a_flag_that_only_a_gpu_can_meet_is_met(name: str) -> None:
    """The plan without the GPU, which is compared, refuses it; that refuses nobody's start."""
    plan = asked(name, WORKSTATION, kt_method="INT4", kv_cache_dtype="fp8_e4m3").plan()
    assert plan.gpu is not None
    assert [each.value for each in plan.decisions if each.name == "KV cache dtype"] == ["fp8_e4m3"]
