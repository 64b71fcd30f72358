"""A row has the same result, to the bit, whatever the batch, the algorithm and the number of threads (on AMX with one
algorithm for any number of rows, as the deterministic mode has it)."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernel_cases as cases
from tandem.kernels.cpu import PackedExperts, PackedMatrix

N, K = 75, 1100
EXPERTS, HIDDEN, WIDTH = 7, 150, 72

CODED = (
    ("fp8", 128), ("fp8", 0), ("mxfp4", 32), ("nvfp4", 16), ("int4_zeros", 64), ("int6", 16), ("int3", 16),
    ("int2_zeros", 16),
)  # fmt: skip

quietly = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
each_case = pytest.mark.parametrize(
    ("fmt", "group", "tier"),
    [
        pytest.param(fmt, group, tier, id=f"{fmt}-g{group}-{tier}")
        for fmt, group in (("f32", 0), ("bf16", 0), ("int8", 32), ("int8", 0), ("int4", 64), *CODED)
        for tier in cases.INVARIANT_TIERS
    ],
)
workspaces = st.builds(
    lambda algorithm, threads: (algorithm, threads),
    st.sampled_from(["dot_rows", "tile_mm", "auto"]),
    st.integers(1, 3),
)


@functools.cache
def matrix_of(fmt: str, group: int, tier: str, algorithm: str = "auto", threads: int = 1) -> PackedMatrix:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    return cases.packed_matrix(cases.workspace_of(tier, algorithm, threads), weight, None, fmt, group)


@functools.cache
def codebook_of(kind: str, tier: str, algorithm: str) -> PackedMatrix:
    return PackedMatrix.from_codes(cases.workspace_of(tier, algorithm), cases.gguf_codes(kind, N, 768))


@pytest.mark.parametrize("kind", cases.CODEBOOKS)
@pytest.mark.parametrize("tier", cases.INVARIANT_TIERS)
def test_rows_of_codebooks_do_not_depend_on_the_batch(kind: str, tier: str) -> None:
    """Kernels take some rows at once, or unpack a panel for all of them."""
    cases.require_tier(tier)
    x = cases.activations(40, 768, "bf16")
    alone = torch.cat([codebook_of(kind, tier, "dot_rows")(x[i : i + 1], torch.float32) for i in range(len(x))])
    for algorithm, rows in ((way, rows) for way in ("dot_rows", "tile_mm") for rows in (2, 3, 5, 7, 8, 9, 17, 40)):
        assert torch.equal(codebook_of(kind, tier, algorithm)(x[:rows], torch.float32), alone[:rows])


@functools.cache
def layer_of(fmt: str, group: int, tier: str, algorithm: str = "auto", threads: int = 1) -> PackedExperts:
    generator = torch.Generator().manual_seed(2)
    workspace = cases.workspace_of(tier, algorithm, threads)
    layer = cases.packed_experts(workspace, EXPERTS, HIDDEN, WIDTH, fmt, group)
    for expert in range(EXPERTS):
        gate, up = torch.randn(2, WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        down = torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        cases.load_expert(layer, expert, (gate, up, down), fmt, group)
    return layer


@functools.cache
def alone(fmt: str, group: int, tier: str) -> torch.Tensor:
    """Every row of the largest batch in a call of its own."""
    x = cases.activations(150, K, fmt)
    matrix = matrix_of(fmt, group, tier)
    return torch.cat([matrix(row[None], torch.float32) for row in x])


@each_case
@quietly
@given(first=st.integers(0, 100), rows=st.integers(1, 50), workspace=workspaces)
def test_matrix_rows_do_not_depend_on_the_batch(
    fmt: str, group: int, tier: str, first: int, rows: int, workspace: tuple[str, int]
) -> None:
    cases.require_tier(tier)
    x = cases.activations(150, K, fmt)[first : first + rows]
    y = matrix_of(fmt, group, tier, *workspace)(x, torch.float32)
    assert torch.equal(y, alone(fmt, group, tier)[first : first + rows])


@functools.cache
def tokens_alone(fmt: str, group: int, tier: str) -> torch.Tensor:
    x, ids, weights = routed(fmt)
    layer = layer_of(fmt, group, tier)
    rows = [layer.forward(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(len(x))]
    return torch.cat(rows)


@functools.cache
def routed(fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, EXPERTS + 1, (300, 3), generator=generator, dtype=torch.int32)
    return cases.activations(300, HIDDEN, fmt), ids, torch.rand(300, 3, generator=generator)


@each_case
@quietly
@given(first=st.integers(0, 150), rows=st.integers(1, 150), workspace=workspaces)
def test_expert_rows_do_not_depend_on_the_batch(
    fmt: str, group: int, tier: str, first: int, rows: int, workspace: tuple[str, int]
) -> None:
    cases.require_tier(tier)
    part = [t[first : first + rows].contiguous() for t in routed(fmt)]
    y = layer_of(fmt, group, tier, *workspace).forward(*part)
    assert torch.equal(y, tokens_alone(fmt, group, tier)[first : first + rows])


@pytest.mark.parametrize("tier", cases.INVARIANT_TIERS)
def test_order_of_a_tokens_experts_does_not_matter(tier: str) -> None:
    cases.require_tier(tier)
    x, ids, weights = routed("bf16")
    layer = layer_of("bf16", 0, tier)
    flipped = layer.forward(x, ids.flip(1).contiguous(), weights.flip(1).contiguous())
    distinct = (ids.sort(1).values.diff(dim=1) != 0).all(1)  # two slots with one expert add up in slot order
    assert torch.equal(flipped[distinct], layer.forward(x, ids, weights)[distinct])


# -- AMX, one way for any number of rows ---

each_tiled = pytest.mark.parametrize(
    ("fmt", "group", "tier"),
    [
        pytest.param(fmt, group, tier, id=f"{fmt}-g{group}-{tier}")
        for fmt, group in (("f32", 0), ("bf16", 0), ("int8", 32), ("int8", 0), ("int4", 64), *CODED)
        for tier in ("amx", "amx_standin")
    ],
)


@each_tiled
@pytest.mark.parametrize("threads", [1, 3])
def test_matrix_rows_have_one_way_on_amx(fmt: str, group: int, tier: str, threads: int) -> None:
    cases.require_tier(tier)
    x, matrix = cases.activations(150, K, fmt), matrix_of(fmt, group, tier, "one_way", threads)
    rows = torch.cat([matrix(row[None], torch.float32) for row in x])
    for first, last in ((0, 150), (3, 5), (1, 17), (7, 24), (20, 53), (30, 109), (9, 95)):
        assert torch.equal(matrix(x[first:last], torch.float32), rows[first:last])


@each_tiled
@pytest.mark.parametrize("threads", [1, 3])
def test_expert_rows_have_one_way_on_amx(fmt: str, group: int, tier: str, threads: int) -> None:
    cases.require_tier(tier)
    given, layer = [t[:140].contiguous() for t in routed(fmt)], layer_of(fmt, group, tier, "one_way", threads)
    rows = torch.cat([layer.forward(*(t[i : i + 1] for t in given)) for i in range(140)])
    for first, last in ((0, 140), (2, 4), (5, 21), (40, 80)):
        assert torch.equal(layer.forward(*(t[first:last].contiguous() for t in given)), rows[first:last])


@pytest.mark.parametrize("tier", ["amx", "amx_standin"])
def test_without_it_amx_sums_in_another_order(tier: str) -> None:
    """Else the tests above would see nothing."""
    cases.require_tier(tier)
    x, matrix = cases.activations(70, K, "int4"), matrix_of("int4", 64, tier)
    assert not torch.equal(matrix(x, torch.float32)[:1], matrix(x[:1], torch.float32))


def test_tests_of_equal_bits_take_a_tier_that_can_be_run() -> None:
    """Built for one AMX machine alone, the extension has `scalar` and `amx`."""
    assert cases.runs(cases.INVARIANT_TIER)
    assert cases.invariant_tier(["scalar", "amx"]) == "scalar"
    assert cases.invariant_tier(cases.TIERS[:5]) == "avx512_bf16"
