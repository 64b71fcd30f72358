"""Draft tokens by a checkpoint's draft layer: what it drafts, and that answers stay the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from draft_models import FAMILIES, PROMPTS, Drafted, chunks_of, drafted, engine_of
from fake_model import check_pages, request, run, token_ids
from gguf_files import write_gguf
from quantised_models import everything, save_quantised
from tandem.checkpoint import load_model_config
from tandem.engine.engine import Engine
from tandem.engine.protocol import Grammar
from tandem.engine.speculation import speculation
from tandem.engine.start.parts import EngineParts
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.planner.resolve import resolve
from tiny import file_tensors


@pytest.fixture(scope="session")
def made(tiny_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafted")
    kept: dict[str, Drafted] = {}

    def make(variant: str) -> Drafted:
        if variant not in kept:
            kept[variant] = drafted(tiny_models[variant], folder / variant)
        return kept[variant]

    return make


@pytest.mark.parametrize("variant", FAMILIES)
def test_it_drafts_what_transformers_layer_drafts(made, tmp_path: Path, variant: str) -> None:
    """Token by token, three prompts at once, in chunks; each chain against the whole text, computed anew."""
    model = made(variant)
    engine = engine_of(model.path, tmp_path)
    asks = [request(name, prompt, max_tokens=14, ignore_eos=True) for name, prompt in PROMPTS.items()]
    seen = list(chunks_of(engine, *asks))
    assert len(seen) > 20 and {len(draft_tokens) for _, draft_tokens in seen} == {1, 2, 3}
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == model.chain(tokens, len(draft_tokens))
    check_pages(engine)


@pytest.mark.parametrize(("variant", "page"), [("glm4_moe", 4), ("deepseek_v4", 8)])
def test_drafts_do_not_depend_on_what_happened_to_the_pages(made, tmp_path: Path, variant: str, page: int) -> None:
    """Preemptions, answers of one prompt, prefix matches that part inside a page and at its border, two at once."""
    model = made(variant)
    engine = engine_of(model.path, tmp_path, max_total_tokens=96, page_size=page)
    asks = [request(name, prompt, max_tokens=20, n=2, temperature=1.0, seed=3, ignore_eos=True)
            for name, prompt in PROMPTS.items()]  # fmt: skip
    seen = list(chunks_of(engine, *asks))
    assert engine.stats().preemptions > 0
    base = PROMPTS["c"]
    for cut in (35, 36, 37, 36):
        both = [request(f"{cut}{i}", [*base[:cut], 5 + i, 9], max_tokens=9, ignore_eos=True) for i in range(2)]
        for pair in ([both[0]], [both[1]], both):
            seen += chunks_of(engine, *pair)
    assert engine.stats().cached_tokens > 300
    assert len(seen) > 100
    for tokens, draft_tokens in seen:
        assert list(draft_tokens) == model.chain(tokens, len(draft_tokens))
    check_pages(engine)


def test_a_layer_with_a_window_makes_up_for_no_more_than_that(made, tmp_path: Path) -> None:
    """After a prompt, and after steps without drafts; what was there is the same then."""
    model, window = made("deepseek_v4"), 7
    engine = engine_of(model.path, tmp_path, page_size=8)
    speculation, rows = engine._speculation, list[int]()
    chain = speculation._drafter._chain
    draw = chain.chains

    def noted(runs, widths):
        rows.append(max(len(run.tokens) for run in runs))
        return draw(runs, widths)

    chain.chains, widest = noted, speculation._most
    engine.add(request("a", list(range(60, 99)), max_tokens=40, ignore_eos=True))
    seen = []
    for most in (widest, 0, widest, 0):
        speculation._most = most
        engine._runner.start, run_model = _noting(seen, engine._runner.start), engine._runner.start
        for _ in range(10):
            engine.step()
        engine._runner.start = run_model
    assert max(rows) == window and rows.count(window) == 2 and len(seen) > 10
    assert all(list(draft_tokens) == model.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen)


def _noting(seen: list, run_model):
    def noted(step, *others):
        seen.extend((list(c.sequence.tokens), c.draft_tokens) for c in step.chunks if c.draft_tokens)
        return run_model(step, *others)

    return noted


def test_a_long_prompt_is_made_up_for_in_several_steps(made, tmp_path: Path) -> None:
    """Its answer begins without drafts; then they are those of a layer that read it all."""
    model, prompt = made("glm4_moe"), [i * 7 % 250 for i in range(90)]
    engine = engine_of(model.path, tmp_path)
    engine._speculation._drafter._most_rows = 8
    seen = list(chunks_of(engine, request("a", prompt, max_tokens=30, ignore_eos=True)))
    assert len(seen[0][0]) == len(prompt) + 1 + 12  # each step adds a row, and eight are made
    assert all(list(draft_tokens) == model.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen)


WISHES = {
    "greedy": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "sampled": {"temperature": 0.3, "seed": 4, "n": 2, "logprobs": 1},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.2, "min_tokens": 8},
    "grammar": {"temperature": 0.0, "grammar": Grammar("regex", r"[a-z]{5}[^a]*")},
}


@pytest.fixture(scope="module")
def taught(tiny_models, tmp_path_factory):
    """A layer that has learnt the model's own answers, and the model alone."""
    source, folder = tiny_models["glm4_moe"], tmp_path_factory.mktemp("taught")
    plain = engine_of(source, folder, speculative_algorithm="NGRAM", max_total_tokens=512)
    asks = [request(name, prompt, max_tokens=25, ignore_eos=True) for name, prompt in PROMPTS.items()]
    answers = {name: token_ids(outputs) for (name, _), outputs in run(plain, *asks).items()}
    return drafted(source, folder / "model", taught=[PROMPTS[name] + answer for name, answer in answers.items()])


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("tokens", [pytest.param(512, marks=pytest.mark.full), 80])
def test_answers_are_those_of_plain_decoding(taught, tmp_path: Path, wish: str, tokens: int) -> None:
    """Bit for bit, with draft tokens of which some are accepted; also where sequences are preempted."""
    asks = [request(name, prompt, max_tokens=25, ignore_eos=wish != "grammar", **WISHES[wish])
            for name, prompt in PROMPTS.items()]  # fmt: skip
    engine = engine_of(taught.path, tmp_path, max_total_tokens=tokens)
    plain = run(without_drafts(engine), *asks)
    got = run(engine, *asks)
    assert {key: told(outputs) for key, outputs in got.items()} == {k: told(outputs) for k, outputs in plain.items()}
    said = engine.stats().speculation
    assert said.algorithm == "NEXTN" and 0 < said.accepted_tokens < said.draft_tokens
    if wish == "greedy":
        assert said.accepted_tokens > said.draft_steps  # more than one of three


def without_drafts(engine: Engine) -> Engine:
    runner = engine._runner
    parts = EngineParts(engine.plan, engine.model_config, runner._model, engine.tokenizer, engine._workers)
    return Engine.from_parts(replace(parts, plan=replace(engine.plan, speculation=None)))


def told(outputs: list) -> tuple:
    scores = [each for output in outputs for each in output.logprobs or ()]
    return token_ids(outputs), "".join(o.text for o in outputs), scores, outputs[-1].finish_reason


@pytest.mark.parametrize("again", [False, True])
def test_a_layer_that_fails_costs_no_answer(taught, tmp_path: Path, monkeypatch, again: bool) -> None:
    """again: it is tried at once, not a minute later. Rows that the failed pass was to make are made anew: drafts are
    as right as before."""
    if again:
        monkeypatch.setattr(speculation, "RETRY_SECONDS", 0.0)
    engine = engine_of(taught.path, tmp_path)
    asks = [request(name, prompt, max_tokens=25, ignore_eos=True) for name, prompt in PROMPTS.items()]
    plain, passes = run(without_drafts(engine), *asks), []
    run_layer = engine._runner._model.draft

    def failing(*args):
        passes.append(args)
        if len(passes) == 5:
            raise RuntimeError("the layer was told to fail")
        return run_layer(*args)

    monkeypatch.setattr(engine._runner._model, "draft", failing)
    got = run(engine, *asks)
    assert {key: told(outputs) for key, outputs in got.items()} == {k: told(outputs) for k, outputs in plain.items()}
    said = engine.stats().speculation
    assert len(passes) > 15 and said.accepted_tokens > said.draft_steps if again else len(passes) == 5
    assert said.draft_tokens > 0
    check_pages(engine)


def test_the_governor_leaves_bad_drafts_alone_and_looks_again(made, tmp_path: Path) -> None:
    """A random layer is never right: it is hardly asked, and now and then without a row."""
    engine = engine_of(made("glm4_moe").path, tmp_path, disable_speculative_governor=False, context_length=128)
    drawn, draw = [], engine._speculation._drafter.draw

    def noted(wanted):
        drawn.append(len(wanted))
        return draw(wanted)

    engine._speculation._drafter.draw = noted
    asks = [request(str(i), [i, 8, 9], max_tokens=110, ignore_eos=True) for i in range(4)]
    for ask in asks:
        run(engine, ask)
    said = engine.stats().speculation
    assert said.widths[0] > 10 * sum(said.widths[1:]) and sum(said.widths[1:]) < len(drawn) <= 40
    assert sum(said.widths) == said.steps


def test_a_quantised_layer_drafts_as_its_numbers_do(made, tmp_path: Path) -> None:
    """fp8, as DeepSeek and GLM publish draft layers, too: the same draft tokens as from the numbers it stands for."""
    stored, plain = save_quantised(made("deepseek_v3").path, tmp_path, everything("fp8 per channel"))
    seen = []
    for path in (stored, plain):
        engine = engine_of(path, tmp_path)
        asks = [request(name, prompt, max_tokens=14, ignore_eos=True) for name, prompt in PROMPTS.items()]
        seen.append(list(chunks_of(engine, *asks)))
    assert seen[0] == seen[1] and len(seen[0]) > 20


def test_a_gguf_file_s_layer_drafts_the_same(made, tmp_path: Path) -> None:
    """llama.cpp's converter keeps GLM-4.5's, under names of its own; it does not run it."""
    model = made("glm4_moe")
    engine = engine_of(write_gguf(model.path, tmp_path / "m.gguf"), tmp_path)
    asks = [request(name, prompt, max_tokens=14, ignore_eos=True) for name, prompt in PROMPTS.items()]
    seen = list(chunks_of(engine, *asks))
    assert len(seen) > 20
    assert all(list(draft_tokens) == model.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen)


def test_a_packed_cache_keeps_the_layer_too(made, tmp_path: Path) -> None:
    """And is another file than the one without it."""
    model, seen = made("glm4_moe"), []
    for algorithm in ("NGRAM", "NEXTN", "NEXTN"):
        engine = engine_of(model.path, tmp_path, speculative_algorithm=algorithm, packed_cache=str(tmp_path / "packed"))
        asks = [request(name, prompt, max_tokens=14, ignore_eos=True) for name, prompt in PROMPTS.items()]
        seen.append(list(chunks_of(engine, *asks)))
    assert seen[1] == seen[2] and len(seen[1]) > 20
    assert all(list(draft_tokens) == model.chain(tokens, len(draft_tokens)) for tokens, draft_tokens in seen[2])


def test_a_checkpoint_without_the_layer_is_refused_by_name(tiny_models, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_models["glm4_moe"], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_mtp_layers": 1}))
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.3\.eh_proj\.weight; take NGRAM"):
        engine_of(path, tmp_path)
    with pytest.raises(ConfigError, match="no draft layer that is known; take NGRAM"):
        engine_of(tiny_models["glm4_moe"], tmp_path)


def test_the_plan_counts_the_layer(made, tmp_path: Path) -> None:
    """Weights as in the file, and rows of its pages; nothing where it is not asked for."""
    model = made("deepseek_v3")
    tensors = file_tensors(model.path)
    own = {k: t for k, t in tensors.items() if k.startswith("model.layers.3.")}
    experts = sum(t.numel() for k, t in own.items() if ".experts." in k)
    dense = sum(t.numel() for k, t in own.items() if t.dim() == 2) - experts
    config = load_model_config(model.path)
    drafting = replace(config, drafter=config.drafts)
    more = drafting.weight_bytes("float32", "f32") - config.weight_bytes("float32", "f32")
    norms = (2 + 3) * config.hidden
    assert more == 4 * (experts + dense + norms)
    latent, hidden = 42 + 12, 72
    each = [c.state_layout("float32").token_bytes for c in (config, drafting)]
    assert each == [3 * 4 * latent, 4 * (4 * latent + hidden)]
    said = " ".join(resolve(EngineConfig.from_keywords(str(model.path)), config, Machine.detect()).notices)
    assert "has a draft layer, which is not loaded; --speculative-algorithm NEXTN" in said


def test_the_tutorial_s_words_are_understood(made) -> None:
    model = load_model_config(made("deepseek_v3").path)
    flags = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    flags += " --speculative-num-draft-tokens 4 --speculative-moe-runner-backend auto --device cpu"
    plan = resolve(EngineConfig.from_args(["x", *flags.split()]), model, Machine.detect())
    assert plan.speculation == SpeculationPlan("NEXTN", 3)
    assert [n for n in plan.notices if "specul" in n] == [
        "--speculative-algorithm EAGLE is taken as NEXTN: the checkpoint's own draft layer drafts"
    ]
    [said] = [d for d in plan.decisions if d.name == "speculation"]
    assert said.value == "NEXTN, up to 3 draft tokens a step"
