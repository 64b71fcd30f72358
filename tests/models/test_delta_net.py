"""Gated delta nets: the kernel against float64, bits that no cut changes, answers that come from snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_cases import TIERS, require_tier
from tandem import LLM, SamplingParams, _core
from tandem.config.layers import DeltaRule
from tandem.config.mechanisms.norm import Norm
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.delta import DeltaWeights, TorchDelta
from tandem.models.batch import ForwardBatch

SHAPE = DeltaRule(2, 6, 20, 40, 4, Norm(1e-6), "heads")
SLOTS = 5


def weights(shape: DeltaRule, dtype: torch.dtype) -> DeltaWeights:
    torch.manual_seed(3)
    return DeltaWeights(
        torch.randn(shape.conv, shape.channels), -torch.rand(shape.v_heads) * 3, torch.randn(shape.v_heads),
        torch.rand(shape.v_dim).to(dtype) + 0.5,
    )  # fmt: skip


def states(shape: DeltaRule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Full of NaN: what is not there yet must not be read."""
    inputs = torch.full((SLOTS, shape.conv - 1, shape.channels), float("nan"), dtype=dtype)
    return inputs, torch.full((SLOTS, shape.v_heads, shape.k_dim, shape.v_dim), float("nan"))


def batch(parts: list[tuple[int, int, int]]) -> ForwardBatch:
    """(slot, tokens before, new rows) of each sequence."""
    news = torch.tensor([0, *(new for _, _, new in parts)]).cumsum(0)
    rows = int(news[-1])
    empty = torch.zeros(rows, dtype=torch.int64)
    return ForwardBatch(
        empty, empty, empty, news.int(), torch.tensor([before + new for _, before, new in parts]).int(),
        torch.zeros(len(parts), 64, dtype=torch.int32), empty[:1],
        torch.tensor([slot for slot, _, _ in parts], dtype=torch.int32),
    )  # fmt: skip


def rows(shape: DeltaRule, count: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, shape.channels + shape.values, generator=generator)
    return wide.to(dtype), torch.randn(count, 2 * shape.v_heads, generator=generator).to(dtype)


def ops(tier: str) -> CpuOps:
    require_tier(tier)
    return CpuOps(_core.WorkerPool([-1, -1]), tier)


@pytest.mark.parametrize("layout", ["heads", "kinds"])
@pytest.mark.parametrize("sizes", [(2, 6, 20, 40), (3, 3, 16, 72), (1, 2, 128, 128)])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_kernels_agree_with_float64(tier: str, sizes: tuple[int, int, int, int], layout: str) -> None:
    """A step sums k_dim products in float32; what is learnt from it goes on for 24 steps."""
    shape = replace(SHAPE, k_heads=sizes[0], v_heads=sizes[1], k_dim=sizes[2], v_dim=sizes[3], layout=layout)
    exact = TorchDelta(shape, DeltaWeights(*(w.double() for w in weights(shape, torch.float32))))
    wide, narrow = rows(shape, 30, torch.float32)
    parts = batch([(3, 0, 24), (1, 0, 1), (4, 0, 5)])
    inputs, memory = (s.double() for s in states(shape, torch.float32))
    expected = exact(wide.double(), narrow.double(), parts, inputs, memory)
    ours = states(shape, torch.float32)
    got = ops(tier).delta_rule(shape, weights(shape, torch.float32))(wide, narrow, parts, *ours)
    tolerance = 24 * sizes[2] * 2.0**-24
    assert (got.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    assert torch.equal(ours[0][[1, 3, 4]].double(), inputs[[1, 3, 4]])
    assert (ours[1].double() - memory)[[1, 3, 4]].abs().max() <= tolerance * float(
        memory[[1, 3, 4]].abs().max()
    )
    assert ours[1][[0, 2]].isnan().all()  # of nobody


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_no_cut_changes_a_bit(tier: str, dtype: torch.dtype) -> None:
    wide, narrow = rows(SHAPE, 23, dtype)
    delta = ops(tier).delta_rule(SHAPE, weights(SHAPE, dtype))
    whole_states = states(SHAPE, dtype)
    whole = delta(wide, narrow, batch([(2, 0, 23)]), *whole_states)
    for cut in (1, 2, 3, 4, 11, 22):
        kept = states(SHAPE, dtype)
        first = delta(wide[:cut], narrow[:cut], batch([(2, 0, cut)]), *kept)
        rest = [delta(wide[i : i + 1], narrow[i : i + 1], batch([(2, i, 1)]), *kept) for i in range(cut, 23)]
        assert torch.equal(torch.cat([first, *rest]), whole)
        assert all(torch.equal(a[2], b[2]) for a, b in zip(kept, whole_states, strict=True))


def test_others_in_the_batch_change_nothing() -> None:
    wide, narrow = rows(SHAPE, 12, torch.bfloat16)
    delta = ops(_core.supported_tiers()[-1]).delta_rule(SHAPE, weights(SHAPE, torch.bfloat16))
    together = delta(wide, narrow, batch([(1, 0, 4), (2, 0, 8)]), *states(SHAPE, torch.bfloat16))
    alone = delta(wide[4:], narrow[4:], batch([(3, 0, 8)]), *states(SHAPE, torch.bfloat16))
    assert torch.equal(together[4:], alone)


def test_a_slot_that_is_not_there_is_refused() -> None:
    wide, narrow = rows(SHAPE, 1, torch.float32)
    delta = ops("scalar").delta_rule(SHAPE, weights(SHAPE, torch.float32))
    with pytest.raises(ValueError, match="a slot is not there"):
        delta(wide, narrow, batch([(SLOTS, 0, 1)]), *states(SHAPE, torch.float32))


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_second_turn_gives_the_answer_of_a_server_without_a_cache(tiny_models, variant: str) -> None:
    """Greedy text with a snapshot equals text computed from nothing, and few rows are computed for it."""
    flags = {
        "dtype": "float32",
        "kt_cpuinfer": 2,
        "max_total_tokens": 512,
        "page_size": 4,
        "max_running_requests": 2,
    }
    cached = LLM(str(tiny_models[variant]), **flags)
    plain = LLM(str(tiny_models[variant]), **flags, disable_radix_cache=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = list(range(40, 90))
    for turn in range(3):
        answers = [llm.generate([prompt], sampling)[0] for llm in (cached, plain)]
        assert answers[0].token_ids == answers[1].token_ids
        if turn:
            assert answers[0].cached_tokens >= len(prompt) - 3 - 2 * 4
        prompt = [*prompt, *answers[0].token_ids, 7, 8, 9]
