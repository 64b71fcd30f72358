"""Rows of the deterministic mode: every family, alone, beside others, in chunks and one after the other, bit for bit.

On AMX the kernels' stand-in is computed here: the same algorithms over emulated instructions.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from kernel_cases import TIERS, require_tier
from sessions import Session, ours, prompts
from tandem import LLM, SamplingParams, _core
from tandem.architectures import FAMILIES
from tandem.architectures.load import load_config
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.planner.choices.deterministic import deterministic
from tandem.spec.model_config import ModelConfig
from tiny import VARIANTS, VOCAB

WISH = EngineConfig(model="demo", enable_deterministic_inference=True)


def refused(config: ModelConfig) -> bool:
    try:
        deterministic(WISH, config, "amx")
    except ConfigError:
        return True
    return False


REAL_TIERS = _core.supported_tiers()
OFTEN = [name for name in TIERS if name.startswith("amx")]  # whose kernels depend on rows without the mode


@pytest.fixture(
    scope="module", params=[t if t in OFTEN else pytest.param(t, marks=pytest.mark.full) for t in TIERS]
)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    require_tier(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "supported_tiers", lambda: [request.param])  # the stand-in is for tests alone
        return CpuOps(_core.WorkerPool([-1, -1]), request.param, deterministic=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_every_batch(tiny_models, ops: CpuOps, variant: str) -> None:
    """`ours` mixes chunks of three sequences and decode rows; beside it, prompts at once and token by token."""
    path = tiny_models[variant]
    if refused(load_config(path)):
        pytest.skip("the mode refuses this family")
    mixed = ours(Session(path, "bfloat16", ops=ops))
    for s, prompt in enumerate(prompts()):
        (whole,) = Session(path, "bfloat16", ops=ops).step([(s, prompt)])
        alone = Session(path, "bfloat16", ops=ops)
        single = torch.cat([alone.step([(s, [token])])[0] for token in prompt])
        assert torch.equal(whole, mixed[s]) and torch.equal(single, mixed[s])


EACH_TIER = pytest.mark.parametrize(
    "tier", [pytest.param(t, marks=() if t == REAL_TIERS[-1] else pytest.mark.full) for t in REAL_TIERS]
)


def engine_of(path: Path, tier: str, **flags: object) -> LLM:
    llm = LLM(str(path), **{"kt_cpuinfer": 2, "kernel_tier": tier, "enable_deterministic_inference": True} | flags)
    assert llm.engine.plan.tier == tier
    return llm


def said(llm: LLM, asked: list[list[int]]) -> list[tuple[list[int], list]]:
    """Tokens and bitwise log-probabilities."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    return [(each.token_ids, each.logprobs) for each in llm.generate(asked, greedy, progress=False)]


def check_answers(path: Path, tier: str, asked: list[list[int]], chunk: int, **flags: object) -> None:
    """Of 32 prompts at once: the same alone, in other chunks, and after a prefix hit."""
    llm = engine_of(path, tier, max_running_requests=32, disable_radix_cache=True, **flags)
    together = said(llm, asked)
    assert [said(llm, [prompt])[0] for prompt in asked[::8]] == together[::8]
    llm.engine.close()
    llm = engine_of(path, tier, max_running_requests=2, chunked_prefill_size=chunk, **flags)
    for _ in range(2):
        assert said(llm, asked[7::4]) == together[7::4]
    assert llm.engine.stats().cached_tokens > 0
    llm.engine.close()


@EACH_TIER
@pytest.mark.parametrize("method", ["BF16", "INT8", "INT4"])
def test_the_engine_answers_with_the_same_bits(tiny_models, tier: str, method: str) -> None:
    generator = torch.Generator().manual_seed(9)
    asked = [torch.randint(VOCAB, (3 + i % 17,), generator=generator).tolist() for i in range(32)]
    check_answers(tiny_models["qwen3_moe"], tier, asked, 5, page_size=4, kt_method=method)


@pytest.mark.full
@pytest.mark.timeout(900)
@EACH_TIER
def test_the_demo_answers_with_the_same_bits(demo_dir: Path, tier: str) -> None:
    """Prompts and steps are longer and shorter than what AMX has loops for: 8, 80 and 160 rows."""
    text = (files("tandem") / "data" / "demo" / "check.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(demo_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    asked = [ids[7 * i : 7 * i + 3 + 6 * i] for i in range(32)]
    check_answers(demo_dir, tier, asked, 37, max_total_tokens=8192)


def test_few_families_are_refused(tiny_models) -> None:
    kinds = {VARIANTS[variant][0] for variant in VARIANTS if refused(load_config(tiny_models[variant]))}
    assert kinds == {"deepseek_v4"} and len(FAMILIES) > 10
