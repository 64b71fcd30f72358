"""Choosing tokens, and attention over them: the C++ core against float64, and bits that no cut changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernel_cases import TIERS, require_tier
from paged_batches import PAGE, IndexCase, check_choice
from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.kernels.selected_keys import SelectedKeys
from tandem.mechanisms.token_index.cpu import CpuChosenAttention
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights, TorchTokenIndex, attend_chosen
from tandem.spec.rope import Rope

SHAPE = Index(20, 18, 9, Rope(1e4, 12, pairs="halves"))


def ops(tier: str) -> CpuOps:
    require_tier(tier)
    return CpuOps(_core.WorkerPool([-1, -1]), tier)


SPANS = [(1, 2), (30, 31), (0, 7), (5, 40), (8, 10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("tier", [*TIERS[:5], "torch"])
def test_the_best_are_chosen(tier: str, pairs: str, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, rope=replace(SHAPE.rope, pairs=pairs))
    case = IndexCase(shape, SPANS, dtype)
    ours = TorchOps() if tier == "torch" else ops(tier)
    chosen, cache = case.run(ours.bound(shape, case.weights))
    check_choice(case, chosen, cache)
    oracle = IndexWeights(*(w.double() for w in case.weights))
    expected = IndexCase(shape, SPANS, torch.float32)
    for mine, theirs in ((case.k, expected.k), (case.q, expected.q)):
        theirs[:] = [x.double() for x in mine]
    expected.dtype = torch.float64
    _, exact = expected.run(TorchTokenIndex(shape, oracle))
    written = ~exact.isnan()
    assert torch.equal(written, ~cache.isnan())
    unit = 2.0**-24 if dtype is torch.float32 else 2.0**-9
    roundings = 5 + (
        shape.dim if dtype is torch.float32 else 0
    )  # norm, table, two products, sum; sums of the norm
    assert (cache[written] - exact[written]).abs().max() <= roundings * unit * exact[written].abs().max()


@pytest.mark.parametrize("tier", TIERS[:5])
def test_many_tokens_are_several_chunks(tier: str) -> None:
    shape = Index(64, 32, 40, Rope(1e4, 16))
    case = IndexCase(shape, [(1499, 1500), (1020, 1030), (0, 45)])
    check_choice(case, *case.run(ops(tier).bound(shape, case.weights)))


def test_long_prompts_are_several_waves() -> None:
    """2000 rows of up to 9000 scores are more than are kept at a time: each row's choice is that of the row alone."""
    shape = Index(2, 4, 16, Rope(1e4, 4))
    case, ours = IndexCase(shape, [(7000, 9000)]), ops(_core.supported_tiers()[-1])
    chosen, cache = case.run(ours.bound(shape, case.weights))
    for t in (0, 999, 1900, 1999):
        alone = ours.bound(shape, case.weights)(
            *(x[0][7000 + t][None] for x in (case.q, case.k, case.gates)),
            case.batch([(7000 + t, 7001 + t)]),
            cache,
        )
        assert torch.equal(alone.rows[0], chosen.rows[t])


@pytest.mark.parametrize("tier", [*TIERS[:5], "torch"])
def test_of_equal_scores_the_earliest_count(tier: str) -> None:
    case = IndexCase(SHAPE, [(0, 60)])
    case.gates[0][:] = 0
    chosen, _ = case.run((TorchOps() if tier == "torch" else ops(tier)).bound(SHAPE, case.weights))
    assert torch.equal(case.positions(chosen)[59], torch.arange(9))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_end(bad: float) -> None:
    """Weights of a broken checkpoint: something is chosen, of the row's own tokens."""
    case = IndexCase(SHAPE, [(0, 60)])
    case.gates[0][40:, ::2] = bad
    chosen, _ = case.run(ops(_core.supported_tiers()[-1]).bound(SHAPE, case.weights))
    found = case.positions(chosen)
    assert all(len(each.unique()) == min(9, t + 1) and each.max() <= t for t, each in enumerate(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_no_cut_changes_a_choice(tier: str, dtype: torch.dtype) -> None:
    case = IndexCase(SHAPE, [(0, 50)], dtype)
    index = ops(tier).bound(SHAPE, case.weights)
    whole, whole_cache = case.run(index)
    cache = torch.full_like(whole_cache, float("nan"))
    cuts = [0, 1, 8, 9, 10, 26, 42, 43, 50]
    parts = [case.chosen(index, [span], cache) for span in pairwise(cuts)]
    assert torch.equal(torch.cat([p.counts for p in parts]), whole.counts)
    kept = torch.arange(SHAPE.budget) < whole.counts[:, None]
    assert torch.equal(torch.cat([p.rows for p in parts])[kept], whole.rows[kept])
    assert torch.equal(cache[~cache.isnan()], whole_cache[~whole_cache.isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS[:5])
def test_attention_over_a_choice_agrees_with_float64(tier: str, dtype: torch.dtype) -> None:
    """With sequences that see all of their tokens, some of them, and both."""
    case = IndexCase(SHAPE, SPANS, dtype)
    ours, batch = ops(tier), case.batch(SPANS)
    chosen, _ = case.run(ours.bound(SHAPE, case.weights))
    q, pages = (
        torch.randn(len(batch.positions), 18, 44).to(dtype),
        torch.randn(case.pages, PAGE, 1, 44).to(dtype),
    )
    got = CpuChosenAttention(ours)(q, pages, batch, 0.2, chosen).double()
    exact = _attended(q.double(), pages.double(), chosen)
    rounding = 2.0**-18 if dtype is torch.float32 else 2.0**-7
    assert (got - exact).abs().max() <= rounding * exact.abs().max()
    theirs = attend_chosen(q, pages, batch, 0.2, chosen).double()
    assert (theirs - exact).abs().max() <= rounding * exact.abs().max()


def _attended(q: Tensor, pages: Tensor, chosen: SelectedKeys) -> Tensor:
    rows = []
    for x, which, count in zip(q, chosen.rows.long(), chosen.counts.tolist(), strict=True):
        known = pages.flatten(0, 2)[which[:count]]
        rows.append(((x @ known.T * 0.2).softmax(-1) @ known).flatten())
    return torch.stack(rows)


def test_a_row_that_sees_all_has_the_bits_of_dense_attention() -> None:
    shape = replace(SHAPE, budget=600)
    case, ours = IndexCase(shape, [(550, 600), (0, 30)]), ops(_core.supported_tiers()[-1])
    chosen, _ = case.run(ours.bound(shape, case.weights))
    longer = replace(shape, budget=599)  # the last row of the first sequence chooses
    few, _ = case.run(ours.bound(longer, case.weights))
    q, pages, batch = torch.randn(80, 4, 44), torch.randn(case.pages, PAGE, 1, 44), case.batch(case.spans)
    attend, dense = CpuChosenAttention(ours), ours.attention(q, pages, pages, batch, 0.2)
    assert torch.equal(attend(q, pages, batch, 0.2, chosen), dense)
    sparse = attend(q, pages, batch, 0.2, few)
    same = torch.arange(80) != 49
    assert torch.equal(sparse[same], dense[same]) and not torch.equal(sparse[49], dense[49])


def test_a_position_beyond_the_tables_is_refused() -> None:
    case = IndexCase(SHAPE, [(0, 20)])
    short = case.weights._replace(cos=case.weights.cos[:19], sin=case.weights.sin[:19])
    with pytest.raises(KernelError, match="beyond the rotary tables"):
        case.run(ops("scalar").bound(SHAPE, short))
