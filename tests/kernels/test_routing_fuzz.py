"""Any routing at all: ids outside the layer, repeated, hundreds per token, no tokens, weights that are no numbers.

Every row must equal, to the bit, the row computed alone from its valid ids only. `make fuzz` runs many more examples.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernel_cases as cases
from tandem.kernels.cpu import PackedExperts

EXPERTS, HIDDEN, WIDTH = 5, 40, 24
STRANGE_IDS = [-(2**31), -7, -1, EXPERTS, EXPERTS + 1, 1 << 20, 2**31 - 1]

ids_of = st.lists(st.sampled_from([*range(EXPERTS), *STRANGE_IDS]), min_size=1, max_size=6)
weights_of = st.lists(st.floats(width=32), min_size=1, max_size=6)


@functools.cache
def layer_of(tier: str) -> PackedExperts:
    generator = torch.Generator().manual_seed(4)
    layer = PackedExperts(cases.workspace_of(tier), EXPERTS, HIDDEN, WIDTH, "bf16")
    for expert in range(EXPERTS):
        gate, up = torch.randn(2, WIDTH, HIDDEN, generator=generator)
        layer.load(expert, gate, up, torch.randn(HIDDEN, WIDTH, generator=generator))
    return layer


def spread(values: list[float] | list[int], dtype: torch.dtype, shape: tuple[int, int], seed: int) -> Tensor:
    """`shape` filled with random choices of `values`."""
    chosen = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(values, dtype=dtype)[chosen]


@pytest.mark.parametrize("tier", cases.INVARIANT_TIERS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 20),
    top_k=st.integers(0, 12) | st.just(700),
    ids=ids_of,
    weights=weights_of,
    seed=st.integers(0, 99),
)
def test_any_routing(
    tier: str, tokens: int, top_k: int, ids: list[int], weights: list[float], seed: int
) -> None:
    cases.require_tier(tier)
    layer, shape = layer_of(tier), (tokens, top_k)
    x = cases.activations(tokens, HIDDEN, "bf16", seed)
    chosen, weight = spread(ids, torch.int32, shape, seed), spread(weights, torch.float32, shape, seed + 1)
    rows = layer.forward(x, chosen, weight, torch.empty(tokens, HIDDEN))
    for t in range(tokens):
        valid = (chosen[t] >= 0) & (chosen[t] < EXPERTS)
        routed = chosen[t : t + 1, valid].contiguous(), weight[t : t + 1, valid].contiguous()
        alone = layer.forward(x[t : t + 1], *routed, torch.empty(1, HIDDEN))
        torch.testing.assert_close(rows[t : t + 1], alone, rtol=0, atol=0, equal_nan=True)
