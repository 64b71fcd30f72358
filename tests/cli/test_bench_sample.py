"""The samples that `kt plan --verify` measures: how deep they are, and what follows of their times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plans import machine
from tandem.bench import sample, synthetic
from tandem.bench.architectures import named_config, named_subject
from tandem.bench.sample import depths_of, whole_seconds
from tandem.bench.synthetic import SyntheticCheckpoint
from tandem.flags.engine_config import EngineConfig
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine, wished_speeds
from tandem.planner.plan import Plan
from tandem.spec.stored import StoredFormats


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many experts that no cache holds them are as many on every machine."""
    monkeypatch.setattr(sample, "last_level_cache_bytes", lambda: 32 << 20)


def question_of(name: str, layers: int, ram: str = "2TB", bandwidth: str = "100GB/s") -> PlanQuestion:
    """On a machine without a GPU."""
    wish = MachineWish("none", ram, bandwidth, 16, "avx512_bf16")
    host = wished_machine(wish, machine())
    config = EngineConfig(model=name, kt_method="INT4")
    return PlanQuestion(config, named_config(name, layers), host, StoredFormats(), wished_speeds(wish, host, None))


def depths(question: PlanQuestion, context: int = 1024) -> list[int]:
    plan = question.plan()
    return depths_of(question, plan, question.predicted(plan), context)


def test_samples_are_as_deep_as_the_time_allows() -> None:
    assert depths(question_of("qwen3-30b-a3b", 48)) == [48]  # whole
    shorter = depths(question_of("glm-4.5-air", 46, bandwidth="40GB/s"))
    assert 3 < shorter[-1] < 46 and shorter[0] == shorter[-1] // 3
    assert depths(question_of("glm-4.5-air", 46, bandwidth="2GB/s")) == [1, 3]  # however long it takes


def test_weights_of_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question_of("qwen3-30b-a3b", 48)
    each = sample._sample_bytes(asked, asked.plan())
    monkeypatch.setattr(sample, "BUILD_BYTES", 12.5 * each)
    assert depths(asked) == [3, 9]
    monkeypatch.setattr(sample, "BUILD_BYTES", 48 * each)
    assert depths(asked) == [48]


@pytest.mark.parametrize(("layers", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 3])])
def test_no_sample_is_deeper_than_the_model(layers: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BUILD_BYTES", 0.0)
    assert depths(question_of("qwen3-30b-a3b", layers)) == expected


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        ("gpt-oss-20b", None, ("mxfp4", None)), ("deepseek-v3", None, ("fp8", None)),
        ("deepseek-v3", "INT4", ("bf16", "INT4")), ("qwen3-30b-a3b", None, ("bf16", "BF16")),
    ],
)  # fmt: skip
def test_experts_of_samples_are_stored_as_the_models_are(
    name: str, method: str | None, expected: tuple[str, str | None]
) -> None:
    host = question_of("qwen3-30b-a3b", 1)
    config = EngineConfig.from_keywords(name, **({} if method is None else {"kt_method": method}))
    model, stored = named_subject(name)
    asked = replace(host, config=config, model=model, stored=stored)
    assert (sample._experts_format(asked, asked.plan()), sample._method(asked, asked.plan())) == expected


def beside_a_gpu(name: str, **flags: object) -> PlanQuestion:
    wish = MachineWish("H100", "256GB", "80GB/s", 16, "avx512_bf16")
    host, (model, stored) = wished_machine(wish, machine()), named_subject(name)
    config = EngineConfig.from_keywords(name, device="cuda", **flags)
    return PlanQuestion(config, model, host, stored, wished_speeds(wish, host, None))


def small_plan(asked: PlanQuestion) -> Plan:
    plan = asked.plan()
    return sample._small_plan(asked, plan, sample._sample(asked, plan, 1), 256)


def test_keys_and_values_of_samples_and_forecasts_are_cached_as_was_asked() -> None:
    plain, asked = beside_a_gpu("qwen3-30b-a3b"), beside_a_gpu("qwen3-30b-a3b", kv_cache_dtype="fp8_e4m3")
    bits = [sample._sample(each, each.plan(), 1).state_layout("bfloat16").token_bytes for each in (plain, asked)]
    read = [each.predicted(each.plan()).decode[1].parts["KV cache"] for each in (plain, asked)]
    assert bits[0] == 2 * bits[1] and read[0] == pytest.approx(2 * read[1])


def test_samples_draft_nothing() -> None:
    """They have no draft layer, and a draft layer's graphs would be captured at their start."""
    asked = beside_a_gpu("glm-4.5-air", speculative_algorithm="NEXTN", kt_method="INT4")
    assert asked.plan().drafts and small_plan(asked).speculation is None


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 61])
def test_a_model_is_the_sum_of_its_layers(layers: int) -> None:
    """Each takes 2 ms, and a step 5 more, however deep the samples are."""
    for depths in ([1], [1, 2], [1, 3], [8, 24]):
        if depths[-1] <= layers:
            times = [5 + 2 * depth for depth in depths]
            expected = 5 + 2 * layers if len(depths) > 1 else 7 * layers
            assert whole_seconds(layers, depths, times) == pytest.approx(expected)


def test_two_times_that_are_nearly_equal_say_little() -> None:
    assert whole_seconds(60, [1, 3], [9.0, 8.9]) == pytest.approx(8.9 + 57 * 8.9 / 3 / 4)


def test_made_up_tokens_of_a_sample_are_far_apart() -> None:
    """Else they choose the same experts after a few layers; weights are as ever."""
    plain, far = SyntheticCheckpoint(), SyntheticCheckpoint(embedded=synthetic.FAR)
    ids, shape = torch.arange(9), (64, 32)
    rows = [checkpoint.lookup("embed_tokens.weight", shape)(ids) for checkpoint in (plain, far)]
    assert torch.equal(rows[1], rows[0] * synthetic.FAR)
    assert torch.equal(plain.get("layers.0.q_proj.weight", shape), far.get("layers.0.q_proj.weight", shape))


@pytest.mark.parametrize(
    ("first", "each", "expected"), [(0.1, 0.01, [0.01] * 8), (1.0, 0.3, [0.3, 0.3]), (9.0, 4.0, [9.0])]
)
def test_prompts_are_repeated_as_the_time_allows(first: float, each: float, expected: list[float]) -> None:
    """The first one counts only where it took too long to wait for another."""
    assert sample.repeated(lambda: each, sample.PROMPTS, sample.MOST_PROMPTS, [first]) == expected
