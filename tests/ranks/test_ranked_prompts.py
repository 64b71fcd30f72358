"""Prompts of ranks that are computed in pieces between the steps of others: the order is the first rank's on all."""

from __future__ import annotations

import gc

import msgspec
import pytest

from fake_model import check_pages, request, run, token_ids
from kernel_cases import INVARIANT_TIER
from ranked_engine import RankThread, ranked_engine
from tandem.engine.engine import Engine
from tandem.engine.pace import PrefillPace
from tandem.engine.ranks.messages import StepList
from tandem.engine.step.prefill import PrefillTask
from tandem.errors import RanksApart
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine

pytestmark = pytest.mark.skipif(len(Machine.detect_cpus().cores) < 2, reason="a rank needs a core")

FLAGS = {"device": "cpu", "dtype": "float32", "page_size": 8, "kt_cpuinfer": 2, "chunked_prefill_size": 24,
         "kernel_tier": INVARIANT_TIER}  # fmt: skip
VARIANTS = ("glm4_moe", "qwen3_next", "mixtral-window", "deepseek_v4-every", "deepseek_v3-plain")
READER = request("reader", [7, 8, 9], max_tokens=40, ignore_eos=True)
LONG = [request(f"long{i}", [(3 * at + i) % 200 for at in range(70 + 9 * i)], max_tokens=4, ignore_eos=True)
        for i in range(2)]  # fmt: skip


@pytest.fixture(autouse=True)
def one_piece_a_step(monkeypatch) -> None:
    """However long one takes."""
    monkeypatch.setattr(PrefillPace, "slice_seconds", lambda *_: 0.0)


def config_of(path, **flags) -> EngineConfig:
    return EngineConfig.from_keywords(str(path), **FLAGS | flags)


def answered(engine: Engine) -> dict:
    """Tokens of a reader, beside whom two long prompts arrive."""
    engine.add(READER)
    outputs = [output for _ in range(3) for output in engine.step()]
    for each in LONG:
        engine.add(each)
    while engine.has_work():
        outputs += engine.step()
    return {name: token_ids([o for o in outputs if o.id == name]) for name in ("reader", "long0", "long1")}


def told(other: RankThread) -> list[StepList]:
    return [msgspec.msgpack.decode(data, type=StepList) for data in other.steps]


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_one_rank(tiny_models, tmp_path, variant) -> None:
    path = tiny_models[variant]
    expected = answered(Engine(config_of(path)))
    with ranked_engine(config_of(path, tp=2), tmp_path) as (engine, (other,)):
        assert answered(engine) == expected
        depth = engine._runner._model.depth
        check_pages(engine)
    assert not other.failed
    events = [step.task for step in told(other)]
    begun, pieces = events.count("begins"), events.count("piece")
    assert begun == events.count("ends") > 2 and pieces == begun * (depth + 1)
    between = " ".join(event or "step" for event in events)
    assert "piece step piece" in between  # a reader waited for a piece, not for a chunk


def test_a_prompt_that_is_aborted_in_its_middle_ends_on_all_ranks(tiny_models, tmp_path) -> None:
    """Its pages are others' then."""
    path = tiny_models["glm4_moe"]
    alone = Engine(config_of(path))
    expected = [token_ids(run(alone, one)[one.id, 0]) for one in (READER, LONG[1])]
    with ranked_engine(config_of(path, tp=2), tmp_path) as (engine, (other,)):
        engine.add(READER)
        outputs = [output for _ in range(3) for output in engine.step()]
        engine.add(LONG[0])
        while not engine._scheduler.in_flight:
            outputs += engine.step()
        engine.abort(LONG[0].id)
        while engine.has_work():
            outputs += engine.step()
        assert token_ids([o for o in outputs if o.id == "reader"]) == expected[0]
        assert token_ids(run(engine, LONG[1])[LONG[1].id, 0]) == expected[1]
        check_pages(engine)
    assert not other.failed
    events = [step.task for step in told(other) if step.task]
    assert events.count("begins") == events.count("ends")


def test_no_rank_keeps_the_rows_of_a_prompt_that_has_ended(tiny_models, tmp_path) -> None:
    before = prefill_tasks()  # that other tests may have left
    with ranked_engine(config_of(tiny_models["glm4_moe"], tp=2), tmp_path) as (engine, (other,)):
        answered(engine)
        assert "ends" in [step.task for step in told(other)]
        assert not [each for each in prefill_tasks() if not any(each is task for task in before)]


def prefill_tasks() -> list[PrefillTask]:
    """All that are in this process's memory."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is PrefillTask]


def test_a_piece_that_fails_ends_the_engine(tiny_models, tmp_path, monkeypatch) -> None:
    with ranked_engine(config_of(tiny_models["glm4_moe"], tp=2), tmp_path) as (engine, (other,)):
        engine.add(READER)
        engine.step()
        engine.add(LONG[0])
        while not engine._scheduler.in_flight:
            engine.step()
        engine._runner._leader.lists._steps += 1  # as if a list had been lost
        with pytest.raises(RanksApart, match="would not meet again"):
            while engine.has_work():
                engine.step()
    assert "was awaited" in other.failed
