"""Which GPU gets which layers, what the plan says of it, and what stages are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from gpu_questions import HERE, NEXT, decision, model_of, predicted, question
from tandem.errors import ConfigError, DoesNotFit
from tandem.planner.forecast.advice import ways_to_go_faster
from tandem.planner.stages.chunks import MOST_CHUNKS, border_bytes
from tandem.planner.stages.pool import gpus_of_stages
from tandem.planner.stages.sized import StageSizes, some_layers
from tandem.planner.stages.speeds import pipelined_share
from tandem.planner.stages.split import fits, shares, split

GIB = 1 << 30


def ways(weights: list[int], rooms: list[int]) -> list[tuple[int, ...]]:
    """All splits that fit."""
    inner = combinations(range(1, len(weights)), len(rooms) - 1)
    found = [(0, *each, len(weights)) for each in inner]
    return [each for each in found if all(s <= r for s, r in zip(shares(each, weights), rooms, strict=True))]


@pytest.mark.parametrize("rooms", [[20, 20], [30, 9], [9, 30], [12, 12, 12], [8, 20, 9], [40, 3, 3], [5, 5]])
@pytest.mark.parametrize("speeds", [[1.0, 1.0, 1.0], [2.0, 1.0, 1.5], [1.0, 3.0, 2.0]])
def test_the_split_is_the_best_of_all(rooms: list[int], speeds: list[float]) -> None:
    weights, speeds = [3, 1, 4, 1, 5, 2, 6, 3], speeds[: len(rooms)]
    possible = ways(weights, rooms)
    assert fits(weights, rooms) == bool(possible)
    chosen = split(weights, rooms, speeds)
    if not possible:
        assert chosen is None
        return

    def seconds(borders: tuple[int, ...]) -> float:
        return sum(taken / speed for taken, speed in zip(shares(borders, weights), speeds, strict=True))

    assert chosen in possible and seconds(chosen) == pytest.approx(min(map(seconds, possible)))


def test_equal_gpus_are_filled_evenly_and_a_faster_one_fully() -> None:
    assert split([1] * 12, [12, 12], [1.0, 1.0]) == (0, 6, 12)
    assert split([1] * 12, [12, 6], [1.0, 1.0]) == (0, 8, 12)
    assert split([1] * 12, [9, 12], [2.0, 1.0]) == (0, 9, 12)
    assert split([1] * 12, [12, 12], [1.0, 2.0]) == (0, 1, 12)  # each has one at least


def test_no_layer_fits_where_the_largest_does_not() -> None:
    assert not fits([1, 9, 1], [8, 8]) and split([1, 9, 1], [8, 8], [1.0, 1.0]) is None
    assert fits([1, 9, 1], [1, 10]) and not fits([1, 9, 1], [10, 0])
    assert not fits([1], [5, 5])


@pytest.mark.parametrize(
    ("gpus", "stages"), [("24GB,12GB", 2), ("12GB,24GB", 2), ("2x4090", 2), ("3x4090", 3), ("4090,3090,12GB", 3)]
)
def test_every_gpu_s_layers_fit_it(gpus: str, stages: int) -> None:
    asked = question(NEXT, gpus, pipeline_parallel_size=stages)
    plan = asked.plan()
    assert plan.gpu is not None and len(plan.gpu.stages) == stages
    borders = [stage.first for stage in plan.gpu.stages] + [plan.gpu.stages[-1].end]
    assert borders[0] == 0 and borders[-1] == len(asked.model.layers)
    assert [stage.end for stage in plan.gpu.stages] == borders[1:] and all(a < b for a, b in pairwise(borders))
    for stage, gpu in zip(plan.gpu.stages, asked.machine.gpus, strict=True):
        assert stage.name == gpu.name and 0 < stage.nbytes < 0.9 * gpu.free_bytes
    assert decision(plan, "stages").value == str(stages)
    assert decision(plan, f"stage {stages - 1}").value.endswith(f"to {borders[-1] - 1}")
    assert (plan.gpu.sizes.ring_bytes, plan.gpu.sizes.prompt_sizes, plan.gpu.live) == (0, (), False)


@pytest.mark.parametrize("ram", [82, 95, 108, 130])
def test_what_borders_leave_has_to_fit_into_ram(ram: int) -> None:
    """Sizes for the pooled memory fit; layers do not divide so, and leave more experts in CPU memory."""
    asked = question("glm-4.5-air", "8x24GB", pipeline_parallel_size=8)
    plan = replace(asked, machine=replace(asked.machine, available_memory=ram * GIB)).plan()
    experts = float(decision(plan, "CPU memory").reason.split(" GiB experts")[0])
    assert 0 < experts <= 0.8 * ram


def test_streams_are_said_to_be_on_where_they_are() -> None:
    asked = question("glm-4.5-air", "2x80GB", pipeline_parallel_size=2, kt_gpu_prefill_token_threshold=512)
    plan = asked.plan()
    assert plan.gpu is not None and plan.gpu.sizes.ring_bytes and decision(plan, "streamed experts").value != "off"


def test_two_gpus_hold_more_experts_than_one_and_are_forecast_as_faster() -> None:
    one, two = question(NEXT, "24GB"), question(NEXT, "24GB,12GB", pipeline_parallel_size=2)
    single, staged = one.plan(), two.plan()
    assert single.gpu is not None and staged.gpu is not None
    assert staged.gpu.sizes.experts > 1.2 * single.gpu.sizes.experts
    assert predicted(two, staged).decode[1].low > predicted(one, single).decode[1].low
    assert predicted(two, staged).decode[1].parts["between stages"] > 0


@pytest.mark.parametrize(
    ("gpus", "advised"), [("3x4090", True), ("4090,5090", True), ("4x4090", False), ("4090", False), ("none", False)]
)
def test_stages_are_advised_where_gpus_are_no_ranks(gpus: str, advised: bool) -> None:
    asked = question(NEXT, gpus)
    changes = [way.change for way in ways_to_go_faster(asked, asked.plan())]
    assert any(change.startswith("--pipeline-parallel-size") for change in changes) == advised


def test_stages_are_advised_where_equal_gpus_cannot_share_the_model() -> None:
    """Blocks of gpt-oss' experts do not divide among four; stages beat two ranks there."""
    asked = question("gpt-oss-120b", "4x4090")
    assert asked.fits(tensor_parallel_size=2) and not asked.fits(tensor_parallel_size=4)
    changes = [way.change for way in ways_to_go_faster(asked, asked.plan()) if "parallel" in way.change]
    assert changes == ["--pipeline-parallel-size 4", "--tensor-parallel-size 2"]


def test_layers_of_all_stages_are_the_whole_model() -> None:
    """Their bytes, too: the head and the last norm once."""
    asked = question(NEXT, "2x4090", pipeline_parallel_size=2)
    from tandem.planner.memory import MemoryRequest

    request = MemoryRequest(asked.config, asked.model, asked.machine, "bfloat16", "stored", 4, asked.stored)
    sizes = StageSizes(request, gpus_of_stages(asked.config, asked.machine), 4096)
    whole = asked.model.dense_bytes("bfloat16", asked.stored, for_gpu=True) - sizes._head
    kept = request.kv_bytes(4096) + request.slot_bytes
    assert sum(sizes.weights(0)) == pytest.approx(whole + kept, rel=1e-3)
    assert sum(len(some_layers(asked.model, a, a + 1).layers) for a in range(48)) == 48


def test_experts_of_stages_stay_where_they_are_by_default() -> None:
    staged, alone = (question(NEXT, "2x4090", pipeline_parallel_size=count).plan() for count in (2, 1))
    assert staged.gpu is not None and staged.gpu.stages and not staged.gpu.live
    assert alone.gpu is not None and alone.gpu.live


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tensor_parallel_size": 2}, "ranks have no stages yet"), ({"device": "cpu"}, "stages are on GPUs"),
        ({"pipeline_parallel_size": 3}, "each stage needs a GPU, and there are 2"),
        ({"speculative_algorithm": "NGRAM"}, "leave --speculative-algorithm out"),
        ({"kt_enable_dynamic_expert_update": True}, "leave --kt-enable-dynamic-expert-update out"),
        ({"kt_max_deferred_experts_per_token": 1}, "leave --kt-max-deferred-experts-per-token out"),
        ({"kt_expert_placement_strategy": "random"}, "leave --kt-expert-placement-strategy out"),
        ({"enable_deterministic_inference": True}, "leave --enable-deterministic-inference out"),
        ({"attention_backend": "flashinfer"}, "leave --attention-backend out"),
        ({"prefill_reserved_sms": 8}, "leave --prefill-reserved-sms out"),
        ({"packed_cache": "kept"}, "leave --packed-cache out"),
    ],
)  # fmt: skip
def test_what_stages_cannot_do_is_refused_by_name(flags: dict[str, object], says: str) -> None:
    asked = question(NEXT, "2x4090", **{"pipeline_parallel_size": 2} | flags)
    with pytest.raises(ConfigError, match=rf"--pipeline-parallel-size \d: .*{says}"):
        asked.plan()


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "glm-5.3-flash"])
def test_models_that_carry_more_than_rows_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 8: .* are not carried between GPUs yet"):
        question(name, "8x141GB", pipeline_parallel_size=8).plan()


def test_experts_that_were_asked_for_and_do_not_fit_are_refused() -> None:
    asked = question(NEXT, "24GB,12GB", pipeline_parallel_size=2, kt_num_gpu_experts=400)
    with pytest.raises(DoesNotFit, match="--pipeline-parallel-size|--kt-num-gpu-experts"):
        asked.plan()


def test_experts_are_streamed_to_every_stage_where_that_is_asked_for() -> None:
    """Each GPU has room for a ring and for long steps."""
    plain, asked = (
        question(NEXT, "24GB,12GB", pp=2, kt_gpu_prefill_token_threshold=least) for least in (None, 512)
    )
    without, plan = plain.plan(), asked.plan()
    assert without.gpu is not None and plan.gpu is not None
    assert (without.gpu.sizes.ring_bytes, without.max_step_tokens) == (0, 2048)
    assert plan.gpu.sizes.ring_bytes > 0 and plan.gpu.stream_from == 512 and plan.max_step_tokens == 8192
    assert "from how many rows" in decision(without, "streamed experts").reason
    assert plan.gpu.sizes.experts < without.gpu.sizes.experts
    for stage, gpu in zip(plan.gpu.stages, asked.machine.gpus, strict=True):
        assert stage.nbytes + plan.gpu.sizes.ring_bytes < 0.9 * gpu.free_bytes


def test_a_gpu_beyond_the_stages_is_named() -> None:
    (note,) = [each for each in question(NEXT, "3x4090", pp=2).plan().notices if "not used" in each]
    assert note == "GPU 2 (4090) not used: --pipeline-parallel-size 2 uses 2"
    assert not [each for each in question(NEXT, "24GB,12GB", pp=2).plan().notices if "not used" in each]


def test_tests_may_put_stages_on_one_gpu(monkeypatch) -> None:
    asked = question(NEXT, "4090", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="each stage needs a GPU, and there is one"):
        asked.plan()
    monkeypatch.setenv("TANDEM_RANKS_SHARE_GPU", "1")
    plan = asked.plan()
    assert plan.gpu is not None and len(plan.gpu.stages) == 2
    each = gpus_of_stages(asked.config, replace(HERE, gpus=asked.machine.gpus))
    assert sum(gpu.free_bytes for gpu in each) == asked.machine.gpus[0].free_bytes


def test_each_stage_has_pinned_memory_of_its_own() -> None:
    def pinned(gpus: str, stages: int) -> float:
        reason = decision(question("glm-4.5-air", gpus, pipeline_parallel_size=stages).plan(), "CPU memory").reason
        return float(next(part for part in reason.split(", ") if part.endswith("handoff")).split(" MiB")[0])

    assert pinned("4x24GB", 4) > 1.9 * pinned("2x24GB", 2) > 0


def test_prompts_are_pipelined_where_all_experts_are_on_gpus() -> None:
    """In long chunks, for a prompt alone; each further GPU has room for two chunks that come."""
    for gpus, chunks, rows in (("2x80GB", MOST_CHUNKS, 8192), ("2x24GB", 1, 2048)):
        asked = question("qwen3-30b-a3b", gpus, pipeline_parallel_size=2)
        plan = asked.plan()
        assert plan.gpu is not None
        assert (plan.gpu.pipelined_chunks, plan.max_step_tokens) == (chunks, rows)
        ledger = next(each for each in plan.ledgers if each.place == "VRAM")
        borders = sum(entry.nbytes for entry in ledger.entries if entry.name == "borders")
        assert borders == (border_bytes(asked.model, rows) if chunks > 1 else 0)
        assert decision(plan, "prompts").value == ("pipelined over stages" if chunks > 1 else "stages take turns")
        for stage, gpu in zip(plan.gpu.stages, asked.machine.gpus, strict=True):
            assert stage.nbytes + borders < 0.9 * gpu.free_bytes


def test_borders_have_room_for_two_chunks_of_every_tensor_that_crosses() -> None:
    plain, shared = (model_of(name, HERE)[0] for name in ("qwen3-30b-a3b", "glm-4.5-air"))
    assert border_bytes(plain, 100) == 2 * 2 * 100 * plain.hidden * 2
    assert border_bytes(shared, 100) == 2 * 3 * 100 * shared.hidden * 2


def test_the_cache_is_shorter_where_borders_would_take_experts_off_the_gpus() -> None:
    """Down to one context; a length that was asked for stays, and experts go, or are refused."""
    asked = question("qwen3-30b-a3b", "4x24GB", pipeline_parallel_size=4)
    plan = asked.plan()
    assert plan.gpu is not None and plan.gpu.sizes.experts == asked.model.routed_experts
    assert "borders between stages" in decision(plan, "KV cache").reason
    tokens = plan.num_pages * plan.page_size
    assert tokens >= plan.context_length
    longer = replace(asked, config=replace(asked.config, max_total_tokens=tokens + 20_000)).plan()
    assert longer.gpu is not None and longer.gpu.sizes.experts < asked.model.routed_experts
    assert longer.num_pages * longer.page_size >= tokens + 20_000


@pytest.mark.parametrize(
    ("gpus", "rows"), [("16.12GB", 8192), ("16.16GB", 8192), ("16.44GB", 32768), ("16.6GB", 32768)]
)
def test_so_it_is_with_a_length_of_chunks_that_was_asked_for(gpus: str, rows: int) -> None:
    """Borders that nobody uses take no expert's place."""
    flags = {"pipeline_parallel_size": 2, "kt_method": "INT4", "chunked_prefill_size": rows}
    asked = question("qwen3-30b-a3b", f"2x{gpus}", **flags)
    plan = asked.plan()
    assert plan.gpu is not None and plan.gpu.sizes.experts == asked.model.routed_experts
    assert plan.gpu.pipelined_chunks == MOST_CHUNKS and plan.max_step_tokens == rows


@pytest.mark.parametrize(("chunks", "least", "most"), [(1, 0.95, 1.0), (2, 1.2, 4 / 3), (4, 1.35, 1.6), (8, 1.55, 1.8)])
def test_a_pipelined_prompt_is_forecast_as_faster_with_each_chunk(chunks: int, least: float, most: float) -> None:
    """Of equal chunks n of 2 stages take n + 1 halves; later chunks attend to more tokens, and take longer."""
    one, two = (question("qwen3-30b-a3b", "2x141GB", pp=count) for count in (1, 2))
    plans = [asked.plan() for asked in (one, two)]
    assert plans[0].max_step_tokens == plans[1].max_step_tokens
    # A context may be shorter than eight chunks: so chunks are.
    rows = min(plan.context_length for plan in plans) // 8 // 64 * 64
    short = [replace(plan, max_step_tokens=rows) for plan in plans]
    rates = [
        asked.predicted(plan, prompt=rows * chunks).prompt for asked, plan in zip((one, two), short, strict=True)
    ]
    assert least <= rates[1].middle / rates[0].middle <= most + 1e-9
    assert rates[1].high <= rates[1].bound


def test_the_host_starts_kernels_of_all_stages() -> None:
    gpu = question("qwen3-30b-a3b", "2x80GB", pp=2).plan().gpu
    assert pipelined_share([1.0] * 4, gpu, 0.0) == pytest.approx(5 / 8)
    assert pipelined_share([1.0] * 4, gpu, 3.6) == pytest.approx(0.9)
    assert pipelined_share([1.0, 2.0, 3.0], gpu, 0.0) == pytest.approx((6 + 3) / 12)
    assert pipelined_share([1.0] * 4, None, 4.0) == pipelined_share([1.0], gpu, 1.0) == 1.0
