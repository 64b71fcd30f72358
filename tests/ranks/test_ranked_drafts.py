"""Draft layers of two ranks: answers are those of one rank without drafts, whoever is right, and all ranks draft."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from block_draft_models import block_drafted
from draft_models import PROMPTS, chunks_of, drafted, engine_of
from fake_model import check_pages, request, run, token_ids
from kernel_cases import INVARIANT_TIER
from ranked_engine import RankThread, ranked_engine
from recorded_chains import recorded
from tandem.engine.engine import Engine
from tandem.engine.ranks.messages import StepList
from tandem.engine.speculation import from_plan
from tandem.engine.speculation.gpu_rollout import GpuRollouts
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.errors import RanksApart
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine

pytestmark = pytest.mark.skipif(len(Machine.detect_cpus().cores) < 2, reason="a rank needs a core")

VARIANTS = ("glm4_moe", "deepseek_v3-plain", "qwen3_next", "deepseek_v4-every", "dspark")
FLAGS = {"device": "cpu", "dtype": "float32", "page_size": 8, "kt_cpuinfer": 2, "chunked_prefill_size": 16,
         "kernel_tier": INVARIANT_TIER, "context_length": 64}  # fmt: skip
DRAFTS = {"speculative_algorithm": "NEXTN", "disable_speculative_governor": True}
TIGHT = {"max_total_tokens": 96, "max_running_requests": 3}


@pytest.fixture(scope="module")
def made(tiny_models, tmp_path_factory):
    folder, kept = tmp_path_factory.mktemp("drafted"), dict[str, Path]()

    def make(variant: str) -> Path:
        if variant not in kept:
            source, make_one = (variant, drafted) if variant != "dspark" else ("deepseek_v4-every", block_drafted)
            kept[variant] = make_one(tiny_models[source], folder / variant).path
        return kept[variant]

    return make


def calls() -> list[list]:
    """In turn; the second one finds prefixes of the first, which part inside a page."""
    free = {"max_tokens": 20, "ignore_eos": True}
    first = [request(name, prompt, **free) for name, prompt in PROMPTS.items()]
    base = PROMPTS["c"]
    parted = [request(f"at{i}", [*base[:cut], 5, 9 + i], **free) for i, cut in enumerate((35, 36, 35, 20))]
    return [first, parted]


def answered(engine: Engine) -> dict:
    return {key: token_ids(each) for call in calls() for key, each in run(engine, *call).items()}


def config_of(path: Path, **flags) -> EngineConfig:
    return EngineConfig.from_keywords(str(path), **FLAGS | flags)


def lists_of(other: RankThread) -> list[StepList]:
    return [msgspec.msgpack.decode(data, type=StepList) for data in other.steps]


@pytest.mark.parametrize("right", [None, 0.0, 0.9], ids=["own", "none", "most"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_without_drafts(made, tmp_path, variant, right) -> None:
    """right: the share of drafts that come; None: those of a layer of random weights, which come by chance."""
    path = made(variant)
    expected = answered(Engine(config_of(path)))
    changed = {}
    if right is not None:
        known = {key: [*tokens, *[7] * 9] for key, tokens in expected.items()}
        changed["drafter"] = OracleDrafter(known, right, 250)
    flags = DRAFTS | (TIGHT if variant == "glm4_moe" else {})
    with ranked_engine(config_of(path, tp=2, **flags), tmp_path, **changed) as (engine, (other,)):
        assert answered(engine) == expected
        stats = engine.stats()
        assert stats.cached_tokens > 0 and (stats.preemptions > 0) == (variant == "glm4_moe")
        check_pages(engine)
    said = stats.speculation
    assert said.draft_tokens > 0
    assert right is None or (said.accepted_tokens > 0.5 * said.draft_tokens) == (right > 0.5)
    drafts = [step for step in lists_of(other) if step.widths is not None]
    assert not other.failed and len(drafts) > 5 and all(step.rows for step in drafts)


@pytest.mark.parametrize("variant", ["glm4_moe", "dspark"])
def test_two_ranks_draft_what_one_does(made, tmp_path, variant) -> None:
    """Token by token: a layer cut in two that was summed wrongly would draft something else."""
    path = made(variant)
    asks = [request(name, prompt, max_tokens=14, ignore_eos=True) for name, prompt in PROMPTS.items()]
    alone = list(chunks_of(engine_of(path, tmp_path / "alone", **FLAGS), *asks))
    with ranked_engine(config_of(path, tp=2, **DRAFTS), tmp_path) as (engine, _):
        assert list(chunks_of(engine, *asks)) == alone
    assert len(alone) > 20


@pytest.mark.parametrize("variant", ["qwen3_next", "dspark"])
def test_recordings_of_all_ranks_are_alike(made, tmp_path, variant, monkeypatch) -> None:
    """As on GPUs: a recording is as long on every rank, and all but a prompt's last rows are made without one."""

    def rollouts(parts, states):
        at_once = 2 if variant == "dspark" else 0
        return recorded(parts.model, states.arrays, parts.plan, (1, 2, 3), 8, at_once, ranked=True)

    path = made(variant)
    expected = answered(Engine(config_of(path)))
    monkeypatch.setattr(from_plan, "_rollouts", rollouts)
    with ranked_engine(config_of(path, tp=2, **DRAFTS), tmp_path) as (engine, (other,)):
        chains = engine._speculation._drafter._chain._rollouts
        assert len(chains._recorded) == 3
        assert answered(engine) == expected
    assert not other.failed and any(len(step.widths or ()) > 1 for step in lists_of(other))


def test_a_rank_does_not_go_on_without_a_recording(made, tmp_path, monkeypatch) -> None:
    """One GPU draws pass by pass then. Ranks would compute other rows than each other."""
    monkeypatch.setattr(GpuRollouts, "_captured", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    engine = Engine(config_of(made("glm4_moe"), **DRAFTS))
    model, states = engine._runner._model, engine._runner._states
    assert not recorded(model, states, engine.plan, (1,), 8)._recorded
    with pytest.raises(MemoryError, match="no room"):
        recorded(model, states, engine.plan, (1,), 8, ranked=True)


def test_drafts_that_fail_end_the_engine(made, tmp_path) -> None:
    """Alone an engine goes on without drafts. Ranks may stand in different places by then."""
    with ranked_engine(config_of(made("glm4_moe"), tp=2, **DRAFTS), tmp_path) as (engine, (other,)):
        engine.add(request("a", PROMPTS["a"], max_tokens=20, ignore_eos=True))
        engine.step()
        engine._speculation._drafter._chain._leader.lists._steps += 1  # as if a list had been lost
        with pytest.raises(RanksApart, match="drafts of several ranks failed"):
            while engine.has_work():
                engine.step()
    assert "was awaited" in other.failed
