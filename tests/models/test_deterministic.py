"""Rows of the deterministic mode: every family, alone, beside others, in chunks and one after the other, bit for bit.

On AMX the kernels' stand-in is computed here: the same algorithms over emulated instructions.
"""

from __future__ import annotations

import pytest
import torch

from kernel_cases import TIERS, require_tier
from sessions import Session, ours, prompts
from tandem import LLM, SamplingParams, _core
from tandem.architectures import FAMILIES
from tandem.config import ModelConfig
from tandem.config.choices.deterministic import deterministic
from tandem.config.engine_config import EngineConfig
from tandem.errors import ConfigError
from tandem.kernels.cpu_ops import CpuOps
from tiny import VARIANTS, VOCAB

WISH = EngineConfig(model="demo", enable_deterministic_inference=True)


def refused(config: ModelConfig) -> bool:
    try:
        deterministic(WISH, config, "amx")
    except ConfigError:
        return True
    return False


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
    if refused(ModelConfig.load(path)):
        pytest.skip("the mode refuses this family")
    mixed = ours(Session(path, "bfloat16", ops=ops))
    for s, prompt in enumerate(prompts()):
        (whole,) = Session(path, "bfloat16", ops=ops).step([(s, prompt)])
        alone = Session(path, "bfloat16", ops=ops)
        single = torch.cat([alone.step([(s, [token])])[0] for token in prompt])
        assert torch.equal(whole, mixed[s]) and torch.equal(single, mixed[s])


def answers(path, asked: list[list[int]], calls: int = 1, **flags: object) -> list[tuple[list[int], list]]:
    """Tokens and bitwise log-probabilities of the last of so many calls."""
    llm = LLM(str(path), kt_cpuinfer=2, page_size=4, enable_deterministic_inference=True, **flags)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    for _ in range(calls):
        found = llm.generate(asked, greedy, progress=False)
    if calls > 1:
        assert llm.engine.stats().cached_tokens > 0
    return [(each.token_ids, each.logprobs) for each in found]


def test_the_engine_answers_with_the_same_bits(tiny_models) -> None:
    """Beside 31 others, alone, in chunks of five tokens, and after a prefix hit."""
    generator = torch.Generator().manual_seed(9)
    asked = [torch.randint(VOCAB, (3 + i % 17,), generator=generator).tolist() for i in range(32)]
    path = tiny_models["qwen3_moe"]
    together = answers(path, asked, max_running_requests=32)
    assert [answers(path, [prompt])[0] for prompt in asked[::8]] == together[::8]
    assert answers(path, asked[3:9], chunked_prefill_size=5, max_running_requests=2) == together[3:9]
    assert answers(path, asked[10:16], calls=2) == together[10:16]


def test_few_families_are_refused(tiny_models) -> None:
    kinds = {VARIANTS[variant][0] for variant in VARIANTS if refused(ModelConfig.load(tiny_models[variant]))}
    assert kinds == {"deepseek_v4"} and len(FAMILIES) > 10
