"""Weights divided among memory nodes (simulated: this host may have one): the same bits as undivided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kernel_cases as cases
from covering import one_of_each
from tandem import _core
from tandem.kernels.cpu import PackedExperts, PackedMatrix, WorkerPool, Workspace
from tandem.kernels.ops import ExpertBiases
from tandem.kernels.packed.file import PackedFile, PackedWriter
from tandem.kernels.packed.verification import Verification

EXPERTS, HIDDEN, WIDTH, TOP_K = (
    7,
    224,
    112,
    3,
)  # 7 pairs of panels of gate and up, 7 of down: halves are uneven
DIVISIONS = [
    (0, 1),
    (0, 0, 1),
    (0, 1, 1, 2),
    (0, 1, 2, 3, 4, 5, 6, 7, 8),
]  # the last: nodes without any columns


def workspace(nodes: tuple[int, ...], tier: str) -> Workspace:
    return Workspace(WorkerPool([-1] * max(2, len(nodes)), 20, list(nodes)), tier)


def loaded(where: Workspace, fmt: str, group: int) -> PackedExperts:
    g = torch.Generator().manual_seed(1)
    layer = PackedExperts(where, EXPERTS, HIDDEN, WIDTH, fmt, group=group)
    for e in range(EXPERTS):
        gate, up = torch.randn(2, WIDTH, HIDDEN, generator=g) / HIDDEN**0.5
        down = torch.randn(HIDDEN, WIDTH, generator=g) / WIDTH**0.5
        layer.load(e, gate, up, down)
    layer.set_biases(biases(EXPERTS, HIDDEN, WIDTH))
    return layer


def biases(experts: int, hidden: int, width: int) -> ExpertBiases:
    g = torch.Generator().manual_seed(3)
    gate, up = torch.randn(2, experts, width, generator=g)
    return ExpertBiases(gate, up, torch.randn(experts, hidden, generator=g))


def run(layer: PackedExperts, tokens: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(tokens)]).int()
    return layer.forward(x, ids, torch.rand(tokens, TOP_K, generator=g), torch.empty(tokens, HIDDEN))


@pytest.mark.parametrize("nodes", [(), (0, 0, 1)])
@pytest.mark.parametrize("tier", ["scalar", "avx2", "avx512_bf16", "amx_standin"])
def test_few_pairs_of_a_long_prompt(tier: str, nodes: tuple[int, ...]) -> None:
    """As beside a GPU that has most experts: two chunks of tokens, some of them with pairs here."""
    cases.require_tier(tier)
    layer, tokens, some = loaded(workspace(nodes, tier), "int4", 32), 5000, 50
    g = torch.Generator().manual_seed(3)
    x, weights = torch.randn(tokens, HIDDEN, generator=g).bfloat16(), torch.rand(tokens, TOP_K, generator=g)
    ids = torch.full((tokens, TOP_K), -1, dtype=torch.int32)
    picked = torch.randperm(tokens, generator=g)[:some]
    ids[picked, 0] = torch.randint(0, EXPERTS - 1, (some,), generator=g).int()
    ids[picked[:9], 2] = EXPERTS - 1
    got = layer.forward(x, ids, weights, torch.full((tokens, HIDDEN), torch.nan))
    others = torch.ones(tokens, dtype=torch.bool)
    others[picked] = False
    assert got[others].eq(0).all()
    for t in picked.tolist():
        row = slice(t, t + 1)
        alone = layer.forward(x[row], ids[row], weights[row], torch.empty(1, HIDDEN))
        if tier == "amx_standin":  # tiles round scaled weights once more
            assert (got[row] - alone).norm() <= 2.0**-7 * alone.norm()
        else:
            assert torch.equal(got[row], alone)


@pytest.mark.parametrize("tier", ["scalar", "avx2", "avx512_bf16", "amx", "amx_standin"])
@pytest.mark.parametrize(("fmt", "group"), [("bf16", 0), ("int4", 32), ("int8", 0)])
def test_divided_experts_give_the_same_bits(tier: str, fmt: str, group: int) -> None:
    cases.require_tier(tier)
    whole = loaded(workspace((), tier), fmt, group)
    for nodes in DIVISIONS:
        divided = loaded(workspace(nodes, tier), fmt, group)
        for tokens in (1, 3, 150):
            assert torch.equal(run(divided, tokens), run(whole, tokens)), (nodes, tokens)
        for e in range(EXPERTS):
            assert torch.equal(divided.packed(e), whole.packed(e))
        assert sum(r.bytes for r in divided.bytes(0, EXPERTS)) == EXPERTS * whole.bytes_per_expert


def check_beside_single_tokens(
    tier: str, experts: int, hidden: int, width: int, tokens: int, top_k: int
) -> None:
    cases.require_tier(tier)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).int()
    scales = torch.rand(tokens, top_k, generator=g)
    weights = [torch.randn(*shape, generator=g) / hidden**0.5 for shape in 2 * [(experts, width, hidden)]]
    down = torch.randn(experts, hidden, width, generator=g)
    layer = PackedExperts(cases.workspace_of(tier), experts, hidden, width, "bf16")
    for e in range(experts):
        layer.load(e, weights[0][e], weights[1][e], down[e])
    whole = layer.forward(x, ids, scales, torch.empty(tokens, hidden))
    some = range(0, tokens, 50)
    alone = torch.cat(
        [layer.forward(x[t, None], ids[t, None], scales[t, None], torch.empty(1, hidden)) for t in some]
    )
    if tier in cases.INVARIANT_TIERS:
        assert torch.equal(whole[::50], alone)
    else:  # one more rounding of intermediate activations may fall the other way
        assert (whole[::50] - alone).abs().max() <= cases.BF16_UNIT * alone.abs().max()


@pytest.mark.parametrize("tier", cases.TIERS)
def test_many_experts_of_few_rows(tier: str) -> None:
    """More results than are added up by columns, while experts have few rows: tasks are streams, sums go by tokens."""
    check_beside_single_tokens(tier, experts=100, hidden=64, width=32, tokens=600, top_k=4)


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize("tokens", [250, 1200])
def test_calls_of_few_rows_are_wider(tokens: int, tier: str) -> None:
    """On tiles: 18 pairs of panels a call for 62 rows of an expert in the mean, and still for 300."""
    check_beside_single_tokens(tier, experts=8, hidden=1100, width=48, tokens=tokens, top_k=2)


@pytest.mark.parametrize(
    ("nodes", "hidden", "rounds"), one_of_each([((),), ((0, 0, 1),)], [(30_008, 4), (120_008, 13)])
)
def test_more_results_than_are_kept_at_once(nodes: tuple[int, ...], hidden: int, rounds: int) -> None:
    """Down in rounds of columns, of odd sizes, more than are kept and more phases than a region has, gives what some
    tokens at a time give, each time in one round."""
    experts, width, tokens, top_k, some = 5, 16, 900, 4, 60
    g = torch.Generator().manual_seed(1)
    layer = PackedExperts(workspace(nodes, cases.PLAIN_TIER), experts, hidden, width, "bf16")
    for e in range(experts):
        gate, up = torch.randn(2, width, hidden, generator=g) / hidden**0.5
        layer.load(e, gate, up, torch.randn(hidden, width, generator=g))
    layer.set_biases(biases(experts, hidden, width))
    of_round = (384 << 20) // 3  # see down.cc
    assert (
        -(-tokens * top_k * hidden * 4 // of_round) == rounds and some * top_k * (hidden + 64) * 4 < of_round
    )
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).int()
    ids[7] = -1  # a token that nobody here computes
    weights = torch.rand(tokens, top_k, generator=g)
    whole = layer.forward(x, ids, weights, torch.ones(tokens, hidden), add=True)
    for first in range(0, tokens, some):
        few = slice(first, first + some)
        alone = layer.forward(x[few], ids[few], weights[few], torch.ones(some, hidden), add=True)
        assert torch.equal(whole[few], alone)
    assert (whole[7] == 1).all() and whole[8].std() > 0.1


def test_packed_experts_go_into_divided_memory_and_back() -> None:
    whole, divided = (
        loaded(workspace((), "scalar"), "bf16", 0),
        loaded(workspace((0, 1), "scalar"), "bf16", 0),
    )
    order = torch.randperm(EXPERTS).tolist()
    for to, come in enumerate(order):
        divided.load_packed(to, whole.packed(come))
    for to, come in enumerate(order):
        assert torch.equal(divided.packed(to), whole.packed(come))


@pytest.mark.parametrize("tier", ["scalar", "avx2", "avx512_bf16", "amx", "amx_standin"])
def test_divided_matrices_give_the_same_bits(tier: str) -> None:
    cases.require_tier(tier)
    g = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(300, HIDDEN, generator=g), torch.randn(300, generator=g)
    whole = PackedMatrix(workspace((), tier), weight, bias)
    for nodes in DIVISIONS:
        divided = PackedMatrix(workspace(nodes, tier), weight, bias)
        for rows in (1, 5, 700):
            x = torch.randn(rows, HIDDEN, generator=g).bfloat16()
            assert torch.equal(divided(x), whole(x)), (nodes, rows)


def test_a_file_of_divided_experts_is_read_as_it_was_divided(tmp_path: Path) -> None:
    where = workspace((0, 0, 1), cases.PLAIN_TIER)
    divided, path = loaded(where, "bf16", 0), tmp_path / "packed"
    writer = PackedWriter(path, where_pool := WorkerPool([-1]))
    writer.add("experts", divided.formats, divided.shape, *divided.parts())
    writer.finish("key", "about")
    file = PackedFile(path)
    Verification(file, where_pool).wait(lambda _done, _all: None)
    adopted = PackedExperts(where, EXPERTS, HIDDEN, WIDTH)
    adopted.set_biases(biases(EXPERTS, HIDDEN, WIDTH))
    adopted.adopt(file, file.sections["experts"])
    assert torch.equal(run(adopted, 40), run(divided, 40))


def test_pools_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="sorted by node"):
        _core.WorkerPool([-1, -1], 20, [1, 0])
    with pytest.raises(ValueError, match="at most 16"):
        _core.WorkerPool([-1] * 17, 20, list(range(17)))
    assert _core.WorkerPool([-1] * 3, 20, [0, 1, 1], [0, 4]).nodes == 2


@pytest.mark.parametrize("nodes", DIVISIONS)
def test_divided_experts_come_and_go(nodes: tuple[int, ...]) -> None:
    """Places for four of seven experts, each divided among the nodes; bytes are those of an undivided one."""
    whole, where = loaded(workspace((), "scalar"), "int4", 32), workspace(nodes, "scalar")
    some = PackedExperts(where, EXPERTS, HIDDEN, WIDTH, "int4", group=32, cpu_slots=4)
    for expert in (0, 2, 4, 6):
        some.load_packed(expert, whole.packed(expert))
    for leaving, coming in ((2, 1), (0, 5), (1, 2)):
        some.forget(leaving)
        some.load_packed(coming, whole.packed(coming))
    assert some.loaded == 4
    for expert in (2, 4, 5, 6):
        assert torch.equal(some.packed(expert), whole.packed(expert))
    plain = PackedExperts(workspace((), "scalar"), EXPERTS, HIDDEN, WIDTH, "int4", group=32)
    for expert in range(EXPERTS):
        plain.load_packed(expert, whole.packed(expert))
    x, ids = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[2, 4], [5, 6], [6, 2]], dtype=torch.int32)
    assert torch.equal(some.forward(x, ids, torch.ones(3, 2)), plain.forward(x, ids, torch.ones(3, 2)))
