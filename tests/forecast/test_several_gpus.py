"""`kt plan` of several GPUs: each rank's room, sums between ranks in the forecast, and what is said of idle ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_questions import HERE, NEXT, decision, model_of, predicted, question
from rank_threads import RankThread, RankThreads
from sessions import Session, ours
from tandem.bench.architectures import named_subject
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.reference import TorchOps
from tandem.planner.forecast.advice import PlanQuestion, ways_to_fit, ways_to_go_faster
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine, wished_speeds
from tandem.planner.forecast.prediction import Case
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.forecast.sums import lane_of, sums_of
from tandem.spec.model_config import past_bytes
from tandem.spec.shard import RankShard


@pytest.mark.parametrize(
    ("gpu", "ranks", "nbytes", "us"),
    [
        ("NVIDIA H200", 2, 14336, 2.3), ("H200", 2, 65536, 2.5), ("H200", 2, 32 << 20, 128),  # as measured
        ("H200", 4, 14336, 3.6),
        ("4090", 2, 14336, 7.8), ("4090", 4, 14336, 19.5), ("4090", 8, 14336, 42.9),  # estimates
        ("NVIDIA H100 PCIe", 2, 14336, 7.8), ("NVIDIA A100-PCIE-40GB", 4, 14336, 19.5),  # no NVLink, or by pairs
        ("NVIDIA GeForce RTX 4090", 3, 14336, 19.5), ("a GPU of 24 GiB", 2, 14336, 7.8), ("", 2, 14336, 5),
    ],
)  # fmt: skip
def test_a_sum_takes_what_was_measured_or_is_estimated(gpu, ranks, nbytes, us) -> None:
    lane = lane_of(gpu, ranks, 25.0)
    assert 1e6 * lane.seconds(nbytes) == pytest.approx(us, rel=0.01)
    assert lane.estimated == ((gpu, ranks) not in [("NVIDIA H200", 2), ("H200", 2), ("H200", 4), ("", 2)])


@pytest.mark.parametrize("gpu", ["h200", "4090", ""])
def test_longer_sums_and_more_ranks_take_longer(gpu) -> None:
    sizes = [2, 4096, 5000, 14336, 65536, 65537, 200_000, 1 << 20, 33 << 20, 200 << 20]
    for ranks in (2, 4, 8):
        times = [lane_of(gpu, ranks, 25.0).seconds(size) for size in sizes]
        assert times == sorted(times)
        assert ranks == 2 or times > [lane_of(gpu, ranks // 2, 25.0).seconds(size) for size in sizes]


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_next", "glm4_moe", "olmoe", "gemma4_text-plain"])
def test_ranks_meet_as_often_as_is_counted(tiny_models, variant) -> None:
    """Of a forward: in every block that is divided, and once for logits."""
    threads, gathered, layers = RankThreads(2), [0, 0], []

    class Counting(RankThread):
        def gather(self, columns, whole):
            gathered[self._rank] += 1
            return super().gather(columns, whole)

    def of_rank(rank: int) -> None:
        ops = TorchOps()
        ops.group = Counting(threads, rank)
        session = Session(tiny_models[variant], ops=ops, shard=RankShard(rank, 2))
        layers.append(session.config.layers)
        ours(session)

    threads.run(of_rank)
    assert gathered[0] > 1 and threads.sums == gathered[0] * sum(map(sums_of, layers[0]))


def test_a_rank_has_its_part_of_cpu_and_memory_and_a_bus_of_its_own() -> None:
    speeds = Speeds(dram_gbps=100, cpu_flops=8e12, gpu_gbps=1000, pcie_gbps=40, cpu_attention_flops=4e11)
    half, eighth = speeds.of_rank(2), speeds.of_rank(8)
    assert (half.dram_gbps, half.cpu_flops, half.cpu_attention_flops, half.pcie_gbps) == (50, 4e12, 2e11, 40)
    assert (eighth.pcie_gbps, eighth.gpu_gbps) == (12.5, 1000)  # memory feeds all of them at once


def test_each_rank_has_room_for_a_part_of_every_expert() -> None:
    one, four = question(NEXT, "4x4090"), question(NEXT, "4x4090", tp=4)
    alone, plan = one.plan(), four.plan()
    assert alone.ranks == 1 and plan.ranks == 4
    assert plan.gpu.sizes.experts > 2 * alone.gpu.sizes.experts  # narrower, and the dense weights are divided, too
    assert decision(plan, "GPUs").value == "0, 1, 2, 3"
    assert "estimated" in decision(plan, "sums of ranks").reason
    assert not any(each.name in ("GPUs", "sums of ranks") for each in alone.decisions)


def test_the_forecast_has_the_sums() -> None:
    four = question(NEXT, "4x4090", tp=4)
    plan = four.plan()
    found = predicted(four, plan)
    for each in (*found.decode.values(), found.prompt):
        assert each.parts["sums of ranks"] > 0
    case = Case.of_plan(four.model, four.stored, plan, four.speeds)
    assert case.model.shard.ranks == 4 and case.speeds.dram_gbps == four.speeds.dram_gbps / 4
    assert 96 * 13e-6 < found.decode[1].parts["sums of ranks"] < 97 * 24e-6
    assert "sums of ranks" not in predicted(question(NEXT, "4x4090")).prompt.parts


def test_more_gpu_memory_is_faster_and_one_rank_is_one_gpu() -> None:
    """As long as experts are in CPU memory; a plan without ranks is predicted as such, whatever was asked."""
    plans = {ranks: question(NEXT, "4x4090", tp=ranks) for ranks in (1, 2, 4)}
    rates = [predicted(each).decode[1].middle for each in plans.values()]
    assert rates == sorted(rates) and rates[2] > 1.3 * rates[0]
    without = plans[4].plan(tensor_parallel_size=1)
    assert predicted(plans[4], without).decode[1].middle == rates[0]


def test_the_slowest_link_decides() -> None:
    """Qwen3-30B fits one H200: two gain little at most, with any sums that take microseconds."""
    one, two = (predicted(question("qwen3-30b-a3b", "2xh200", tp=ranks)).decode[1].middle for ranks in (1, 2))
    assert two < 1.5 * one


def test_ranks_are_advised_where_they_are_faster() -> None:
    one = question(NEXT, "4x4090")
    ways = {way.change: way for way in ways_to_go_faster(one, one.plan())}
    assert "decoding" in ways["--tensor-parallel-size 4"].brings and not ways["--tensor-parallel-size 4"].lossy
    for gpus in ("4090", "4090,3090"):
        asked = question(NEXT, gpus)
        assert not any("--tensor" in way.change for way in ways_to_go_faster(asked, asked.plan()))


def test_ranks_make_a_model_fit_that_one_gpu_and_ram_are_too_small_for() -> None:
    name = "glm-4.5-air-fp8"
    wish = MachineWish(gpus="2x48GB", ram="48GB")
    machine = wished_machine(wish, HERE)
    model, stored = named_subject(name)
    asked = PlanQuestion(EngineConfig.from_keywords(name), model, machine, stored, wished_speeds(wish, machine, None))
    assert not asked.fits() and asked.fits(tensor_parallel_size=2)
    assert any(way.change == "--tensor-parallel-size 2" and not way.lossy for way in ways_to_fit(asked))


def test_idle_gpus_are_named_with_what_would_use_them() -> None:
    (note,) = [each for each in question(NEXT, "3x4090").plan().notices if "not used" in each]
    began = "GPU 1 (4090), GPU 2 (4090) not used: one is used; --tensor-parallel-size 2 divides a model"
    assert note.startswith(began)
    (note,) = [each for each in question(NEXT, "3x4090", tp=2).plan().notices if "not used" in each]
    assert note == "GPU 2 (4090) not used: --tp 2 uses 2; CUDA_VISIBLE_DEVICES says which"
    (note,) = [each for each in question(NEXT, "24GB,12GB").plan().notices if "not used" in each]
    assert note.startswith("GPU 1 (a GPU of 12 GiB) not used: one is used; --pipeline-parallel-size 2 gives unequal")
    assert not [each for each in question(NEXT, "2x4090", tp=2).plan().notices if "not used" in each]


@pytest.mark.parametrize("gpus", ["24GB,12GB", "4090,3090", "h200,h100"])
def test_unequal_gpus_are_no_ranks(gpus) -> None:
    with pytest.raises(ConfigError, match="2: ranks compute equal parts with equal bits, on equal GPUs, not on"):
        question(NEXT, gpus, tp=2).plan()


def test_ranks_on_a_cpu_meet_in_shared_memory() -> None:
    asked = question("qwen3-30b-a3b", "none", tp=2, device="cpu")
    plan = asked.plan()
    assert decision(plan, "sums of ranks").value == "shared memory"
    assert not any(each.name == "GPUs" for each in plan.decisions)
    one = replace(asked, config=EngineConfig.from_keywords("qwen3-30b-a3b", device="cpu"))
    ratio = predicted(asked, plan).decode[1].middle / predicted(one).decode[1].middle
    assert 0.7 < ratio < 1.05  # the same bytes from the same memory, and sums


def test_the_page_has_what_is_planned() -> None:
    """Of four 4090, by the share of experts on them; and of one, two and four as many as fit."""
    page = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text()
    wish = MachineWish("4x4090", "384GB", "250GB/s", 64, "amx")
    machine = wished_machine(wish, HERE)
    few = {"max_running_requests": 8, "max_total_tokens": 32768, "context_length": 16384, "mem_fraction_static": 0.95}

    def ranges(batch: int, **flags: object) -> str:
        config = EngineConfig.from_keywords(NEXT, **few, **flags)
        found = predicted(PlanQuestion(config, *model_of(NEXT, machine), speeds=wished_speeds(wish, machine, None)))
        return f"{found.decode[batch].low:.0f}–{found.decode[batch].high:.0f}"

    for batch in (1, 8):
        shares = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
        assert f"| {' | '.join(ranges(batch, tp=4, kt_gpu_experts_ratio=share) for share in shares)} |" in page
    assert f"| {' | '.join(ranges(1, tp=ranks) for ranks in (1, 2, 4))} |" in page


@pytest.mark.parametrize("flag", ["--dp-size 2", "--data-parallel-size 2", "--enable-dp-attention"])
def test_attention_is_not_repeated_and_why(flag) -> None:
    """DeepSeek-V3's attention in FP8, and the bytes of a token's latents, break even where the text says."""
    model = named_subject("deepseek-v3")[0]
    attention = sum(mixer.params(model.hidden) for mixer in model.mixers)
    token = past_bytes(model, "bfloat16", 1001) - past_bytes(model, "bfloat16", 1000)
    assert attention / 1e9 == pytest.approx(11.4, abs=0.1) and token / 1e3 == pytest.approx(70, abs=1)
    assert attention / token == pytest.approx(162_000, rel=0.02)
    _, refused = EngineConfig.possible(["demo", *flag.split()])
    assert any("162,000 tokens in flight" in each for each in refused)


@pytest.mark.parametrize(
    ("name", "flags", "pieces"),
    [
        ("qwen3-30b-a3b", {}, "layers"),
        ("qwen3-30b-a3b", {"attention_backend": "flashinfer"}, "chunks"),
        ("glm-4.5-air", {"speculative_algorithm": "NEXTN"}, "chunks"),
        ("qwen3-next-80b", {}, "chunks"),
    ],
)
def test_the_plan_says_what_of_prompts_comes_between_steps(name, flags, pieces) -> None:
    plan = question(name, "2xh200", tensor_parallel_size=2, kt_method="INT4", **flags).plan()
    assert decision(plan, "prompts").value == f"{pieces} between steps"
