"""A draft layer on a GPU: what it drafts, in CUDA graphs and without, and that answers stay the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from block_draft_models import block_drafted
from draft_models import Drafted, chunks_of, drafted, engine_of
from fake_model import check_pages, request, run, token_ids
from gpu import needs_cuda
from kernel_cases import INVARIANT_TIER
from sessions import skip_where_outdated
from tandem.engine.engine import Engine
from tandem.engine.speculation.gpu_rollout import GpuRollouts
from tandem.engine.start.loader import load_parts
from tandem.engine.start.parts import EngineParts
from tandem.flags.engine_config import EngineConfig
from tandem.planner import sizing

pytestmark = [pytest.mark.gpu, needs_cuda]
FAMILIES = ["glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "qwen3_next", "qwen3_5_moe_text", "deepseek_v4",
            "dspark", "glm5_next-pools", "qwen4_exp", "bailing_hybrid"]
PROMPTS = {"a": [7, 8, 9, 7, 8], "b": [40] * 20, "c": list(range(60, 99))}


@pytest.fixture(scope="session")
def made(tiny_models, tmp_path_factory):
    folder, kept = tmp_path_factory.mktemp("drafted"), dict[str, Drafted]()

    def make(variant: str) -> Drafted:
        if variant not in kept:
            block = variant == "dspark"
            source, make_one = tiny_models["deepseek_v4" if block else variant], block_drafted if block else drafted
            skip_where_outdated(source, torch.float32)
            kept[variant] = make_one(source, folder / variant)
        return kept[variant]

    return make


def parts_of(path: Path, share: float, **flags) -> EngineParts:
    """AMX promises no equal bits, so it is left out."""
    flags = {
        "kernel_tier": INVARIANT_TIER, "kt_cpuinfer": 2, "max_total_tokens": 512, "max_running_requests": 3,
        "speculative_algorithm": "NEXTN", "disable_speculative_governor": True,
    } | flags  # fmt: skip
    return load_parts(EngineConfig.from_keywords(str(path), device="cuda", kt_gpu_experts_ratio=share, **flags))


def of_one_graph(parts: EngineParts, *, speculative: bool = True) -> Engine:
    """The largest one, so that products of all steps have the same shapes."""
    assert parts.plan.gpu is not None
    plan = replace(parts.plan, gpu=replace(parts.plan.gpu, graph_sizes=parts.plan.gpu.graph_sizes[-1:]))
    return Engine.from_parts(replace(parts, plan=plan if speculative else replace(plan, speculation=None)))


def asks(**wishes) -> list:
    wishes = {"max_tokens": 30, "ignore_eos": True} | wishes
    return [request(name, prompt, **wishes) for name, prompt in PROMPTS.items()]


def scores(answers: dict) -> dict:
    return {key: [each for output in outputs for each in output.logprobs] for key, outputs in answers.items()}


def gaps(model: Drafted, seen: list[tuple[list[int], tuple[int, ...]]]) -> torch.Tensor:
    """Of every draft token: how far below the best one float32 has it, in deviations of the row."""
    found = []
    for tokens, draft_tokens in seen:
        for token, logits in zip(draft_tokens, model.logits(tokens, len(draft_tokens), draft_tokens), strict=True):
            found.append((logits.max() - logits[token]) / logits.std())
    return torch.stack(found)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernels"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_it_drafts_what_float32_drafts(made, tmp_path: Path, variant: str, graphs: bool) -> None:
    """About as nearly as the CPU does in bfloat16, where another token may be as likely, or another one looked at."""
    model = made(variant)
    engine = Engine.from_parts(parts_of(model.path, 0.5, disable_cuda_graph=not graphs))
    chains = engine._speculation._drafter._chain
    assert isinstance(chains, GpuRollouts) and bool(chains._recorded) == graphs
    seen = list(chunks_of(engine, *asks()))
    assert len(seen) > 40 and {len(draft_tokens) for _, draft_tokens in seen} >= {2, 3}
    usual = gaps(model, list(chunks_of(on_cpu(model.path, tmp_path), *asks())))
    far = gaps(model, seen)
    print(f"{variant}: {len(far)} drafts, {(far == 0).float().mean():.2f} the best, {far.mean():.3f} off, on the CPU "
          f"{usual.mean():.3f}")  # fmt: skip
    assert far.mean() < 2 * usual.mean() + 0.05  # of random logits the best is 2.8 deviations off
    check_pages(engine)


def on_cpu(path: Path, folder: Path) -> Engine:
    return engine_of(path, folder, dtype="bfloat16", page_size=16, max_total_tokens=512, chunked_prefill_size=256)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("variant", FAMILIES)
def test_answers_have_the_same_bits(made, variant: str, share: float) -> None:
    parts = parts_of(made(variant).path, share)
    expected = scores(run(of_one_graph(parts, speculative=False), *asks(logprobs=2)))
    engine = of_one_graph(parts)
    assert scores(run(engine, *asks(logprobs=2))) == expected
    assert engine.stats().speculation.draft_tokens > 0
    check_pages(engine)


@pytest.fixture(scope="module")
def taught(tiny_models, tmp_path_factory) -> Drafted:
    """A layer that has learnt the model's own answers."""
    source, folder = tiny_models["glm4_moe"], tmp_path_factory.mktemp("taught")
    plain = of_one_graph(parts_of(source, 1.0, speculative_algorithm="NGRAM"), speculative=False)
    answers = {name: token_ids(outputs) for (name, _), outputs in run(plain, *asks()).items()}
    return drafted(source, folder / "model", taught=[PROMPTS[name] + answer for name, answer in answers.items()])


@pytest.mark.parametrize("drafts_there", [True, False], ids=["GPU", "CPU"])
def test_accepted_drafts_save_steps(taught: Drafted, drafts_there: bool, monkeypatch) -> None:
    """With its experts on either side; in preemptions, too; and with experts that move."""
    if not drafts_there:
        monkeypatch.setattr(sizing, "_draft_bytes", lambda request, room: 0)
    still = {"disable_dynamic_expert_update": True}
    for flags in (still, still | {"max_total_tokens": 80}, {"kt_enable_dynamic_expert_update": True}):
        parts = parts_of(taught.path, 0.5, **flags)
        assert parts.plan.gpu.live == ("kt_enable_dynamic_expert_update" in flags)
        assert parts.plan.gpu.sizes.draft_experts == drafts_there
        plain, engine = of_one_graph(parts, speculative=False), of_one_graph(parts)
        expected, got = ({key: token_ids(outputs) for key, outputs in run(each, *asks()).items()}
                         for each in (plain, engine))  # fmt: skip
        said = engine.stats().speculation
        print(f"{flags}: {said.accepted_tokens} of {said.draft_tokens} accepted, {said.steps} steps")
        assert got == expected or parts.plan.gpu.live
        assert said.accepted_tokens > said.draft_steps  # more than one of three
        check_pages(engine)


def test_the_governor_leaves_a_bad_layer_alone(made) -> None:
    parts = parts_of(made("glm4_moe").path, 1.0, disable_speculative_governor=False)
    engine = Engine.from_parts(parts)
    for i in range(3):
        run(engine, request(str(i), [i, 8, 9], max_tokens=110, ignore_eos=True))
    said = engine.stats().speculation
    assert said.widths[0] > 4 * sum(said.widths[1:]) and sum(said.widths) == said.steps
