"""Over how many GPUs a model goes where no flag says so: by the forecast, one unless another way is clearly better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_questions import HERE, NEXT, decision, question
from tandem.errors import DoesNotFit
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import argv_on_one_gpu, on_one_gpu, several_gpus_typed, way_is_open
from tandem.planner.forecast.advice import LEAST_KEPT, PlanQuestion
from tandem.planner.forecast.compare import compared_plan
from tandem.planner.forecast.prediction import SUMS
from tandem.planner.forecast.report import report
from tandem.planner.notices import HOW_FAST
from tandem.planner.ways import (
    LEAST_GAIN,
    LEAST_GAIN_WHOLE,
    ONE_GPU,
    Way,
    WayChoice,
    WayQuestion,
    choose_way,
    possible_ways,
    way_of,
    with_way,
)
from tandem.spec.vision import Tower

SMALL, AIR = "qwen3-30b-a3b-fp8", "glm-4.5-air-fp8"
TOWER = Tower(
    depth=27, hidden=1152, heads=16, width=4304, side=48, out=2048, placeholder=151655, start=151652, end=151653,
    axes=(0,) * 64,
)  # fmt: skip


def chosen(asked: PlanQuestion, failed: tuple[str, ...] = ()) -> WayChoice:
    return choose_way(asked.config, asked.model, asked.machine, asked.stored, failed)


def flag(asked: PlanQuestion, failed: tuple[str, ...] = ()) -> str:
    """The choice as the plan says it first; "": it says none."""
    decided = chosen(asked, failed).decision
    return "" if decided is None else decided.value


def on_gpus(asked: PlanQuestion, **fields: object) -> PlanQuestion:
    """With all GPUs changed so."""
    gpus = tuple(replace(gpu, **fields) for gpu in asked.machine.gpus)
    return replace(asked, machine=replace(asked.machine, gpus=gpus))


@pytest.mark.parametrize(
    ("name", "gpus", "way"),
    [
        ("qwen3-30b-a3b", "2xh200", "one GPU"),  # fits one, and two gain little
        (AIR, "2xh200", "--tp 2"), (AIR, "4xh200", "--tp 4"),  # a fast link
        ("qwen3-30b-a3b", "2x4090", "--pp 2"), (NEXT, "4x4090", "--pp 4"),  # without one
        ("gpt-oss-120b", "2x4090", "--tp 2"), (NEXT, "2x4090", "one GPU"),
        (SMALL, "24GB,12GB", "--pp 2"), (NEXT, "24GB,12GB", "one GPU"), (AIR, "h200,h100", "one GPU"),
        ("glm-4.5-air", "3x80GB", "--pp 3"), (SMALL, "3x12GB", "--pp 3"), (SMALL, "3x4090", "--tp 2"),
        (SMALL, "4090", ""), (SMALL, "none", ""),
    ],
)  # fmt: skip
def test_the_way_that_is_taken(name: str, gpus: str, way: str) -> None:
    """By the forecast's figures for machines with few and with many channels of RAM."""
    assert flag(question(name, gpus)) == way


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", SMALL, NEXT, AIR, "gpt-oss-120b"])
@pytest.mark.parametrize("gpus", ["2x4090", "4x4090", "24GB,16GB", "2xh200", "8x12GB", "4090,3090,12GB"])
def test_a_way_is_taken_only_where_it_is_clearly_better(name: str, gpus: str) -> None:
    """Faster in decoding by the margin or with the context that one GPU lacks, and slower in nothing."""
    asked = question(name, gpus)
    way = way_of(chosen(asked).config)
    ask = WayQuestion(asked.config, asked.model, asked.machine, asked.stored)
    one = ask.planned(ONE_GPU)
    whole = one.plan.gpu is not None and one.plan.gpu.sizes.experts == asked.model.routed_experts
    for other in [each for each in ask.ways() if each.way == way or way == ONE_GPU]:
        gains = other.gains(one)
        enough = gains.decode >= (LEAST_GAIN_WHOLE if whole else LEAST_GAIN) or ask.is_longer(other.plan, one.plan)
        better = enough and min(gains.decode, gains.batch, gains.prompt) >= LEAST_KEPT
        assert better == (way != ONE_GPU)
        assert other.plan.context_length >= one.plan.context_length or not better


def test_the_plan_begins_with_the_way_the_gpus_the_reason_and_the_way_back() -> None:
    asked = question(AIR, "2xh200")
    choice = chosen(asked)
    plan = choice.told(replace(asked, config=choice.config).plan())
    assert (plan.decisions[0].name, plan.decisions[0].value, plan.ranks) == ("parallelism", "--tp 2", 2)
    reason = plan.decisions[0].reason
    assert reason.startswith("GPUs 0, 1: forecast: decoding 1.5") and reason.endswith("; --tp 1 takes one GPU")
    assert decision(plan, "GPUs").value == "0, 1"


def test_one_gpu_is_taken_with_what_the_others_would_gain() -> None:
    reason = chosen(question("qwen3-30b-a3b", "2xh200")).decision.reason
    assert reason.startswith("forecast with --tp 2: decoding 1.2")
    assert reason.endswith("; it is taken from 1.40 times on, if nothing is slower")


@pytest.mark.parametrize("flags", [{"tp": 1}, {"pp": 1}, {"tp": 2}, {"pp": 2}, {"device": "cpu"}])
def test_explicit_flags_win(flags: dict[str, object]) -> None:
    asked = question(AIR, "2xh200", **flags)
    assert chosen(asked) == WayChoice(asked.config)
    assert way_is_open(EngineConfig.from_args(["demo"]))
    assert not way_is_open(EngineConfig.from_args(["demo", "--tp", "1"]))


def test_what_is_to_have_one_gpu_says_so() -> None:
    assert argv_on_one_gpu(["demo", "--port", "1"])[-2:] == ["--tensor-parallel-size", "1"]
    for given in (["demo", "--tp", "2"], ["demo", "--pp", "2"], ["demo", "--device", "cpu"], ["demo", "--tp", "1"]):
        assert argv_on_one_gpu(given) == given
    assert on_one_gpu(EngineConfig(model="demo")) == EngineConfig(model="demo")
    assert not way_is_open(on_one_gpu(EngineConfig(model="demo")))


@pytest.mark.parametrize(
    ("words", "typed"), [([], False), (["--tp", "1"], False), (["--tp", "2"], True), (["--pp", "3"], True)]
)
def test_only_a_flag_for_several_gpus_may_want_those_that_others_fill(words: list[str], typed: bool) -> None:
    """Models of `kt serve --models` have one GPU, in flags that nobody typed."""
    for argv in (words, argv_on_one_gpu(["demo", *words])[1:]):
        assert several_gpus_typed(on_one_gpu(EngineConfig.from_args(["demo", *argv]))) == typed


def test_gpus_that_are_divided_or_used_by_others_are_left_alone() -> None:
    asked = question(AIR, "2xh200")
    assert flag(asked) == "--tp 2"
    assert flag(on_gpus(asked, divided=True)) == "one GPU"
    assert flag(on_gpus(asked, free_bytes=int(0.7 * asked.machine.gpus[0].memory_bytes))) == "one GPU"
    first, second = asked.machine.gpus
    taken = replace(second, free_bytes=int(0.7 * second.memory_bytes))
    assert flag(replace(asked, machine=replace(asked.machine, gpus=(first, taken)))) == "one GPU"


def test_hidden_and_old_gpus_are_no_choice() -> None:
    asked = question(AIR, "2xh200")
    (one, other), machine = asked.machine.gpus, asked.machine
    assert flag(replace(asked, machine=replace(machine, gpus=(one,)))) == ""  # as CUDA_VISIBLE_DEVICES leaves it
    assert flag(replace(asked, machine=replace(machine, gpus=(one, replace(other, capability=(7, 5)))))) == ""
    assert flag(replace(asked, machine=replace(machine, gpu_missing=("triton",)))) == ""
    assert flag(replace(asked, machine=replace(machine, gpu_missing=("cuda-core",)))) == "one GPU"  # no sums of ranks
    assert flag(question(AIR, "2xh200", dtype="float32")) == ""  # no GPU computes it


def test_ranks_that_a_model_cannot_have_are_no_way() -> None:
    """128 x 128 blocks of 768 columns: 4 ranks at most."""
    asked = question(SMALL, "8x12GB")
    ways = list(WayQuestion(asked.config, asked.model, asked.machine, asked.stored).ways())
    assert Way(ranks=8) in possible_ways(asked.machine)
    assert Way(ranks=8) not in [each.way for each in ways] and Way(ranks=4) in [each.way for each in ways]


def test_a_flag_that_stands_against_a_better_way_is_named() -> None:
    choice = chosen(question(NEXT, "4x4090", speculative_algorithm="NEXTN"))
    assert choice.decision.value == "one GPU" and len(choice.notices) == 1
    assert choice.notices[0].startswith("--pp 4 is not taken: --pipeline-parallel-size 4: stages compute no draft")
    plan = question(NEXT, "4x4090").plan()
    advice = [each for each in plan.notices if each.endswith(HOW_FAST)]
    assert advice and choice.told(plan).notices == (*choice.notices, *(n for n in plan.notices if n not in advice))
    assert not chosen(question(NEXT, "2x4090", speculative_algorithm="NEXTN")).notices  # it would not be better
    assert flag(question(AIR, "2xh200", speculative_algorithm="NGRAM")) == "--tp 2"  # which ranks have


def test_images_are_not_given_up_for_speed() -> None:
    asked = question("qwen3.5-35b-a3b", "2xa100")
    assert flag(asked) == "--tp 2"
    seeing = replace(asked, model=replace(asked.model, tower=TOWER))
    choice = chosen(seeing)
    assert choice.decision.value == "one GPU"
    assert choice.notices[0].startswith("--tp 2 is not taken: ranks read no images yet")
    blind = replace(seeing, config=replace(seeing.config, disable_vision=True))
    assert flag(blind) == "--tp 2" and not chosen(blind).notices


def test_what_one_gpu_cannot_have_is_divided() -> None:
    asked = question("deepseek-v3", "8xh200")
    with pytest.raises(DoesNotFit):
        asked.plan()
    choice = chosen(asked)
    assert choice.decision.value == "--tp 8" and "with one GPU the model does not fit" in choice.decision.reason
    assert flag(asked, ("--tp 8",)) == "--pp 8"
    assert report("deepseek-v3", asked).fits


def test_what_fits_nowhere_is_refused_as_ever() -> None:
    asked = question("deepseek-v3", "2x4090")
    assert chosen(asked) == WayChoice(asked.config)
    assert not report("deepseek-v3", asked).fits


def test_a_way_that_did_not_start_is_not_tried_again() -> None:
    asked = question(AIR, "2xh200")
    choice = chosen(asked, ("--tp 2",))
    assert choice.decision.value == "one GPU"
    assert choice.decision.reason.startswith("--tp 2 did not start; forecast with --pp 2: ")
    assert "no other way can be planned" in chosen(asked, ("--tp 2", "--pp 2")).decision.reason


def test_sums_that_were_not_measured_count_twice() -> None:
    """So a way whose sums are estimated is chosen where it is better by more than the estimate may be wrong."""
    for gpus, times in (("2x4090", 2), ("2xh200", 1)):
        asked = question(AIR, gpus)
        planned = WayQuestion(asked.config, asked.model, asked.machine, asked.stored).planned(Way(ranks=2))
        speed = planned.forecasts[0].decode[1]
        seconds = sum(speed.parts.values()) + (times - 1) * speed.parts[SUMS]
        assert 1 / speed.middle == pytest.approx(seconds)


def test_plans_of_all_commands_have_the_same_way() -> None:
    asked = question(AIR, "2xh200")
    said = report(AIR, asked)
    assert said.plan is not None and said.plan.decisions[0] == chosen(asked).decision
    assert said.plan.ranks == 2 and said.predicted.decode[1].parts[SUMS] > 0
    assert compared_plan(asked).decode == with_way(asked)[0].predicted(said.plan, (1,)).decode[1]
    one = report(AIR, question(AIR, "2xh200", tp=1)).plan
    assert one is not None and one.ranks == 1 and one.decisions[0].name != "parallelism"
    assert HERE.gpus == ()
