"""Gated delta nets: the kernel against float64, bits that no cut changes, answers that come from snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_cases import TIERS, require_tier
from tandem import LLM, SamplingParams, _core
from tandem.engine.speculation.oracle_drafter import OracleDrafter
from tandem.kernels.cpu_ops import CpuOps
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaOperator, DeltaState, DeltaWeights, TorchDelta
from tandem.models.batch import ForwardBatch
from tandem.spec.norm import Norm

SHAPE = DeltaRule(2, 6, 20, 40, 4, Norm(1e-6), "heads")
SLOTS = 5


def weights(shape: DeltaRule, dtype: torch.dtype) -> DeltaWeights:
    torch.manual_seed(3)
    return DeltaWeights(
        torch.randn(shape.conv, shape.channels), -torch.rand(shape.v_heads) * 3, torch.randn(shape.v_heads),
        torch.rand(shape.v_dim).to(dtype) + 0.5,
    )  # fmt: skip


def states(shape: DeltaRule, dtype: torch.dtype, draft_tokens: int = 0) -> DeltaState:
    """Full of NaN: what is not there yet must not be read."""
    places = shape.conv + 2 * draft_tokens
    inputs = torch.full((SLOTS, places, shape.channels), float("nan"), dtype=dtype)
    gates = torch.full((SLOTS, places, 2 * shape.v_heads), float("nan"), dtype=dtype)
    return DeltaState(inputs, gates, torch.full((SLOTS, shape.v_heads, shape.k_dim, shape.v_dim), float("nan")))


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


@pytest.mark.parametrize(("layout", "gate"), [("heads", "silu"), ("kinds", "silu"), ("kinds", "sigmoid")])
@pytest.mark.parametrize("sizes", [(2, 6, 20, 40), (3, 3, 16, 72), (1, 2, 128, 128)])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_kernels_agree_with_float64(tier: str, sizes: tuple[int, int, int, int], layout: str, gate: str) -> None:
    """A step sums k_dim products in float32; what is learnt from it goes on for 24 steps."""
    shape = replace(SHAPE, k_heads=sizes[0], v_heads=sizes[1], k_dim=sizes[2], v_dim=sizes[3], layout=layout, gate=gate)
    exact = TorchDelta(shape, DeltaWeights(*(w.double() for w in weights(shape, torch.float32))))
    wide, narrow = rows(shape, 30, torch.float32)
    parts = batch([(3, 0, 24), (1, 0, 1), (4, 0, 5)])
    kept = DeltaState(*(s.double() for s in states(shape, torch.float32)))
    expected = exact(wide.double(), narrow.double(), parts, kept)
    ours = states(shape, torch.float32)
    got = ops(tier).bound(shape, weights(shape, torch.float32))(wide, narrow, parts, ours)
    tolerance = 24 * sizes[2] * 2.0**-24
    assert (got.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    for mine, theirs in zip(ours[:2], kept[:2], strict=True):
        assert torch.equal(mine[[1, 3, 4]].double().nan_to_num(7), theirs[[1, 3, 4]].nan_to_num(7))
    error = (ours.memory.double() - kept.memory)[[1, 3, 4]].abs().max()
    assert error <= tolerance * float(kept.memory[[1, 3, 4]].abs().max())
    assert ours.memory[[0, 2]].isnan().all()  # of nobody


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_no_cut_changes_a_bit(tier: str, dtype: torch.dtype) -> None:
    wide, narrow = rows(SHAPE, 23, dtype)
    delta = ops(tier).bound(SHAPE, weights(SHAPE, dtype))
    whole_states = states(SHAPE, dtype)
    whole = delta(wide, narrow, batch([(2, 0, 23)]), whole_states)
    for cut in (1, 2, 3, 4, 11, 22):
        kept = states(SHAPE, dtype)
        first = delta(wide[:cut], narrow[:cut], batch([(2, 0, cut)]), kept)
        rest = [delta(wide[i : i + 1], narrow[i : i + 1], batch([(2, i, 1)]), kept) for i in range(cut, 23)]
        assert torch.equal(torch.cat([first, *rest]), whole)
        assert all(torch.equal(a[2], b[2]) for a, b in zip(kept, whole_states, strict=True))


STEPS = [(3, 3), (3, 0), (0, 0), (3, 2), (2, 2), (1, 0), (0, 0), (3, 3), (3, 1), (1, 1)]
Tried = tuple[int, int, int, int, int]
"""Slot, tokens before, those that its memory holds, new rows, those that are sure."""


def speculative(parts: list[Tried]) -> ForwardBatch:
    made = batch([(slot, before, new) for slot, before, _, new, _ in parts])
    state_lens, num_verified = (torch.tensor([part[i] for part in parts], dtype=torch.int32) for i in (2, 4))
    return replace(made, state_lens=state_lens, num_verified=num_verified)


def verified(
    delta: DeltaOperator, kept: DeltaState, wide: Tensor, narrow: Tensor, steps: list[tuple[int, int]]
) -> Tensor:
    """Rows of slot 2 behind a prompt of 5; steps: of draft tokens, and how many are accepted. Other rows are
    others'."""
    wrong_wide, wrong_narrow = -wide, narrow.flip(0)
    out = [delta(wide[:5], narrow[:5], speculative([(2, 0, 0, 5, 5)]), kept)]
    known = state_lens = 5
    for draft_tokens, came in steps:
        end, last = known + 1 + came, known + 1 + draft_tokens
        rows = [torch.cat([x[known:end], other[end:last]])
                for x, other in ((wide, wrong_wide), (narrow, wrong_narrow))]  # fmt: skip
        got = delta(rows[0], rows[1], speculative([(2, known, state_lens, 1 + draft_tokens, 1)]), kept)
        out.append(got[: 1 + came])
        state_lens, known = known + 1, end
    rest = [delta(x, y, speculative([(2, known, state_lens, len(x), len(x))]), kept)
            for x, y in [(wide[known:], narrow[known:])]]  # fmt: skip
    return torch.cat([*out, *rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_accepted_drafts_are_folded_with_the_same_bits(tier: str, dtype: torch.dtype) -> None:
    """Wrong ones leave nothing behind; then a chunk of many rows goes on from what is not folded yet."""
    wide, narrow = rows(SHAPE, 40, dtype)
    delta = ops(tier).bound(SHAPE, weights(SHAPE, dtype))
    whole_states, kept = states(SHAPE, dtype, 3), states(SHAPE, dtype, 3)
    whole = torch.cat([delta(wide[i : i + 1], narrow[i : i + 1], batch([(2, i, 1)]), whole_states) for i in range(40)])
    assert torch.equal(verified(delta, kept, wide, narrow, STEPS), whole)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(kept, whole_states, strict=True))
    assert kept.memory[[0, 1, 3, 4]].isnan().all()


def test_the_reference_takes_drafts_back() -> None:
    wide, narrow = (x.double() for x in rows(SHAPE, 40, torch.float32))
    delta = TorchDelta(SHAPE, DeltaWeights(*(w.double() for w in weights(SHAPE, torch.float32))))
    whole_states, kept = (DeltaState(*(s.double() for s in states(SHAPE, torch.float32, 3))) for _ in range(2))
    whole = delta(wide, narrow, batch([(2, 0, 40)]), whole_states)
    assert (verified(delta, kept, wide, narrow, STEPS) - whole).abs().max() < 1e-12
    assert (kept.memory[2] - whole_states.memory[2]).abs().max() < 1e-12


def test_drafts_beside_others_and_too_many_of_them() -> None:
    wide, narrow = rows(SHAPE, 12, torch.float32)
    delta = ops("scalar").bound(SHAPE, weights(SHAPE, torch.float32))
    kept = states(SHAPE, torch.float32, 2)
    delta(wide[:8], narrow[:8], batch([(1, 0, 4), (3, 0, 4)]), kept)
    before = kept.memory.clone()
    delta(wide[8:], narrow[8:], speculative([(3, 4, 4, 1, 1), (1, 4, 4, 3, 0)]), kept)
    assert torch.equal(kept.memory[1], before[1]) and not torch.equal(kept.memory[3], before[3])
    with pytest.raises(ValueError, match="too few places"):
        delta(wide[:7], narrow[:7], speculative([(1, 4, 4, 7, 1)]), kept)
    with pytest.raises(ValueError, match="tokens that are not there"):
        delta(wide[:1], narrow[:1], speculative([(1, 4, 5, 1, 1)]), kept)
    with pytest.raises(ValueError, match="more rows are verified"):
        delta(wide[:1], narrow[:1], speculative([(1, 4, 4, 1, 2)]), kept)


def test_others_in_the_batch_change_nothing() -> None:
    wide, narrow = rows(SHAPE, 12, torch.bfloat16)
    delta = ops(_core.supported_tiers()[-1]).bound(SHAPE, weights(SHAPE, torch.bfloat16))
    together = delta(wide, narrow, batch([(1, 0, 4), (2, 0, 8)]), states(SHAPE, torch.bfloat16))
    alone = delta(wide[4:], narrow[4:], batch([(3, 0, 8)]), states(SHAPE, torch.bfloat16))
    assert torch.equal(together[4:], alone)


def test_a_slot_that_is_not_there_is_refused() -> None:
    wide, narrow = rows(SHAPE, 1, torch.float32)
    delta = ops("scalar").bound(SHAPE, weights(SHAPE, torch.float32))
    with pytest.raises(ValueError, match="a slot is not there"):
        delta(wide, narrow, batch([(SLOTS, 0, 1)]), states(SHAPE, torch.float32))


@pytest.mark.parametrize("variant", [
    "qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "qwen4_exp", "kimi_linear", "bailing_hybrid", "glm5_next",
])
@pytest.mark.parametrize("speculative", [False, True])
def test_a_second_turn_gives_the_answer_of_a_server_without_a_cache(
    tiny_models, variant: str, speculative: bool
) -> None:
    """Greedy text with a snapshot equals text computed from nothing, and few rows are computed for it. Also where a
    snapshot was taken behind accepted draft tokens that were not folded yet."""
    flags = {
        "dtype": "float32",
        "kt_cpuinfer": 2,
        "max_total_tokens": 512,
        "page_size": 4,
        "max_running_requests": 2,
    }
    draft_tokens = {"speculative_algorithm": "NGRAM", "disable_speculative_governor": True} if speculative else {}
    cached = LLM(str(tiny_models[variant]), **flags, **draft_tokens)
    plain = LLM(str(tiny_models[variant]), **flags, disable_radix_cache=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = list(range(40, 90))
    known: dict[tuple[str, int], list[int]] = {}
    if speculative:
        cached.engine._speculation._drafter = OracleDrafter(known, 0.8, cached.engine.model_config.vocab)
    for turn in range(3):
        answers = [plain.generate([prompt], sampling)[0]]
        known[str(turn + 1), 0] = answers[0].token_ids
        answers.insert(0, cached.generate([prompt], sampling)[0])
        assert answers[0].token_ids == answers[1].token_ids
        if turn:
            assert answers[0].cached_tokens >= len(prompt) - 3 - 2 * 4
        prompt = [*prompt, *answers[0].token_ids, 7, 8, 9]
    stats = cached.engine.stats().speculation
    assert not speculative or stats.accepted_tokens > 0
