"""Draft tokens of a block by DSpark's layers: what they draft, and that answers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from block_draft_models import SIZE, BlockDrafted, block_drafted
from draft_models import PROMPTS, chunks_of, draft_flags, engine_of
from drafted_answers import TIGHT, Plain, Way, check, plain
from fake_model import check_pages, request, run, token_ids
from random_engine import lends_compiler
from recorded_chains import recording
from recorded_steps import tiny_parts
from tandem.bench.architectures import named_config
from tandem.checkpoint import load_model_config
from tandem.engine.engine import Engine
from tandem.engine.protocol import Grammar
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.speculation import SpeculationPlan, speculation, speculation_notices

EXACT = 2e-4  # of a chance: float32 sums of some dozen products in a row, of numbers about 1, at a slope of 1/4


@pytest.fixture(scope="module")
def made(tiny_models, tmp_path_factory) -> BlockDrafted:
    return block_drafted(tiny_models["deepseek_v4"], tmp_path_factory.mktemp("block") / "model")


def test_it_drafts_what_the_reference_drafts(made: BlockDrafted, tmp_path: Path) -> None:
    """Token by token, three prompts at once, in chunks; each block against the whole text, computed anew."""
    engine = engine_of(made.path, tmp_path, page_size=8)
    asks = [request(name, prompt, max_tokens=14, ignore_eos=True) for name, prompt in PROMPTS.items()]
    seen = list(chunks_of(engine, *asks))
    assert len(seen) > 20 and {len(draft_tokens) for _, draft_tokens in seen} >= {1, 2, 3, 4, SIZE}
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == made.chain(tokens, len(draft_tokens))
    check_pages(engine)


def test_it_is_as_sure_as_the_reference(made: BlockDrafted, tmp_path: Path) -> None:
    engine = engine_of(made.path, tmp_path, page_size=8)
    drafter = engine._speculation._drafter
    engine.add(request("a", PROMPTS["c"], max_tokens=12, ignore_eos=True))
    said, draw = [], drafter.draw

    def noted(wanted):
        found = draw(wanted)
        said.extend(
            (list(s.tokens), drafter.confidences(s), tokens) for (s, _), tokens in zip(wanted, found, strict=True)
        )
        return found

    drafter.draw = noted
    while engine.has_work():
        engine.step()
    assert len(said) > 5
    for tokens, sure, draft_tokens in said:
        expected = made.block(tokens, draft_tokens)[1]
        assert sure == pytest.approx(expected[: len(sure)], abs=EXACT) and len(sure) == SIZE
    assert len({round(each, 2) for _, sure, _ in said for each in sure}) > 10


def test_without_its_word_every_draft_is_sure(tiny_models, tmp_path: Path) -> None:
    model = block_drafted(tiny_models["deepseek_v4"], tmp_path / "model", sure=False)
    engine = engine_of(model.path, tmp_path, page_size=8)
    seen = list(chunks_of(engine, request("a", PROMPTS["a"], max_tokens=8, ignore_eos=True)))
    assert all(list(draft_tokens) == model.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen) and seen
    assert set(engine._speculation._drafter._chain.confidences[0]) == {1.0}


def test_the_layers_may_be_in_another_directory(made: BlockDrafted, tiny_models, tmp_path: Path) -> None:
    """For a checkpoint that was converted without them."""
    source = tiny_models["deepseek_v4"]
    engine = engine_of(source, tmp_path, page_size=8, speculative_draft_model_path=str(made.path))
    seen = list(chunks_of(engine, request("a", PROMPTS["c"], max_tokens=8, ignore_eos=True)))
    assert seen and all(list(draft_tokens) == made.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen)
    assert engine.stats().speculation.algorithm == "DSPARK"


def test_drafts_do_not_depend_on_what_happened_to_the_slots(made: BlockDrafted, tmp_path: Path) -> None:
    """Preemptions, answers of one prompt, and prefix matches."""
    engine = engine_of(made.path, tmp_path, max_total_tokens=96, page_size=8)
    asks = [request(name, prompt, max_tokens=20, n=2, temperature=1.0, seed=3, ignore_eos=True)
            for name, prompt in PROMPTS.items()]  # fmt: skip
    seen = list(chunks_of(engine, *asks))
    assert engine.stats().preemptions > 0
    for cut in (35, 36, 37, 36):
        seen += chunks_of(engine, request(str(cut), [*PROMPTS["c"][:cut], 5, 9], max_tokens=9, ignore_eos=True))
    assert engine.stats().cached_tokens > 100 and len(seen) > 80
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == made.chain(tokens, len(draft_tokens))
    check_pages(engine)


def test_recordings_draft_the_same(made: BlockDrafted, tmp_path: Path) -> None:
    """As CUDA graphs compute them, here run by the CPU: copies fill what is left over."""
    engine = engine_of(made.path, tmp_path, page_size=8)
    used = recording(engine, (1, 4), at_once=3)
    asks = [request(name, prompt, max_tokens=14 + 3 * i, ignore_eos=True)
            for i, (name, prompt) in enumerate(PROMPTS.items())]  # fmt: skip
    seen = list(chunks_of(engine, *asks))
    assert len(seen) > 20 and set(used) >= {1, 2, 3} and used.count(0) <= len(asks)
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == made.chain(tokens, len(draft_tokens))
    assert len(engine._speculation._drafter._chain.confidences[0]) == SIZE


@pytest.fixture(scope="module")
def known(made: BlockDrafted, tmp_path_factory) -> Plain:
    folder = tmp_path_factory.mktemp("answers")
    without = {"speculative_algorithm": None, "disable_speculative_governor": False}
    alone, whole = (tiny_parts(made.path, folder, **draft_flags(page_size=8) | more) for more in (without, {}))
    return plain(alone, whole)


WAYS = [
    Way(1, False, 1.0),
    Way(2, False, 0.5, TIGHT),
    Way(3, False, None),
    Way(4, False, 0.7, TIGHT),
    Way(5, False, None, TIGHT),
    Way(5, False, 1.0),
    Way(5, True, 0.5, TIGHT),
    Way(5, True, None),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_answers_are_those_without_drafts(known: Plain, way: Way) -> None:
    check(known, way, "DSPARK")


def masked(known: Plain, wanted: SpeculationPlan | None, lender: Engine | None = None) -> tuple[Engine, dict]:
    """An engine that has answered with a grammar, greedy and sampled; its answers."""
    wishes = {"grammar": Grammar("regex", r"[a-z]{5}[^a]*"), "max_tokens": 25}
    asks = [request(name, prompt, temperature=temperature, seed=9, **wishes)
            for (name, prompt), temperature in zip(PROMPTS.items(), (0.0, 0.7, 1.0), strict=True)]  # fmt: skip
    engine = Engine.from_parts(replace(known.parts, plan=replace(known.parts.plan, speculation=wanted)))
    if lender is not None:
        lends_compiler(lender, engine)
    return engine, {key: token_ids(outputs) for key, outputs in run(engine, *asks).items()}


@pytest.fixture(scope="module")
def masked_plainly(known: Plain) -> tuple[Engine, dict]:
    return masked(known, None)


@pytest.mark.parametrize("governed", [False, True])
def test_masks_and_noise_choose_as_without_drafts(known: Plain, masked_plainly, governed: bool) -> None:
    """What may come after a draft token is known when it is accepted."""
    engine, answers = masked(known, SpeculationPlan("DSPARK", SIZE, governed), lender=masked_plainly[0])
    assert answers == masked_plainly[1] and engine.stats().speculation.steps > 0


@pytest.mark.parametrize(("asked", "width", "said"), [
    ("DSPARK", 5, ""),
    ("NEXTN", 5, "NEXTN is taken as DSPARK"),
    ("EAGLE --speculative-num-steps 2", 2, "EAGLE is taken as DSPARK"),
    ("DSPARK --speculative-num-draft-tokens 8", 5, "7 draft tokens a step are asked for: DSPARK makes 5 at once"),
])  # fmt: skip
def test_every_spelling_means_what_the_checkpoint_has(made: BlockDrafted, asked: str, width: int, said: str) -> None:
    config, model = EngineConfig.from_args(f"x --speculative-algorithm {asked}".split()), load_model_config(made.path)
    planned = speculation(config, model)
    assert planned is not None and (planned.algorithm, planned.most_draft_tokens) == ("DSPARK", width)
    notices = list(speculation_notices(config, model))
    assert (not notices) if not said else any(said in notice for notice in notices)


def test_a_checkpoint_without_its_tensors_is_refused_by_name(tiny_models, made: BlockDrafted, tmp_path: Path) -> None:
    path = tmp_path / "none"
    path.mkdir()
    for file in tiny_models["deepseek_v4"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_bytes((made.path / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="NEXTN: .* has no DSpark draft: there is no tensor mtp.0.main_proj.weight"):
        engine_of(path, tmp_path)


def test_dspark_of_a_model_with_another_draft_is_refused(tiny_models) -> None:
    config = EngineConfig.from_keywords("x", speculative_algorithm="DSPARK")
    with pytest.raises(ConfigError, match="drafts one token after the other; take NEXTN"):
        speculation(config, named_config("deepseek-v3", 6))


def test_an_abort_leaves_nothing_behind(made: BlockDrafted, tmp_path: Path) -> None:
    engine = engine_of(made.path, tmp_path, page_size=8)
    engine.add(request("a", PROMPTS["b"], max_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    run(engine, request("b", PROMPTS["a"], max_tokens=4, ignore_eos=True))
    drafter = engine._speculation._drafter
    assert not drafter._confidences and not drafter._rows._known
    check_pages(engine)
