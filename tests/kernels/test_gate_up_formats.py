"""Experts whose gate and up have two formats: what they compute, and where their bytes go."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import kernel_cases as cases
from tandem.bench import formats
from tandem.checkpoint.survey import stored_formats
from tandem.errors import KernelError
from tandem.formats import reference
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.quant_format import QuantFormat
from tandem.kernels.cpu import PackedExperts, WorkerPool, Workspace
from tandem.kernels.packed.cache import PackedCache

HIDDEN, EXPERTS, TOP_K = 512, 5, 2
COMBINATIONS = [("q4_k", "q6_k", "q3_k"), ("iq2_xxs", "q2_k", "iq3_s"), ("bf16", "q8_0", "q4_0")]
TIERS = cases.TIERS
NODES = [[0], [0, 0], [0, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]]


def weight(seed: int, rows: int, depth: int, fmt: str) -> Weight:
    random = torch.Generator().manual_seed(seed)
    if fmt == "bf16":
        return (torch.randn((rows, depth), generator=random) * 0.05).bfloat16()
    kind = formats.GGUF[fmt]
    blocks = torch.randint(0, 256, (rows, depth // kind.weights, kind.bytes), generator=random, dtype=torch.uint8)
    for offset in kind.halves:
        blocks[..., offset], blocks[..., offset + 1] = formats.SMALL_HALF & 255, formats.SMALL_HALF >> 8
    return kind.read(blocks.flatten(1))


def experts_of(combination: tuple[str, str, str], width: int) -> list[tuple[Weight, Weight, Weight]]:
    gate, up, down = combination
    return [
        (weight(e, width, HIDDEN, gate), weight(e + 100, width, HIDDEN, up), weight(e + 200, HIDDEN, width, down))
        for e in range(EXPERTS)
    ]


def numbers(stored: Weight) -> torch.Tensor:
    return (reference.decoded(stored) if isinstance(stored, WeightCodes) else stored).double()


def layer_of(combination: tuple[str, str, str], width: int, tier: str, nodes: list[int]) -> PackedExperts:
    workspace = Workspace(WorkerPool([-1] * max(2, len(nodes)), 20, nodes if len(nodes) > 1 else [0, 0]), tier)
    layer = PackedExperts(workspace, EXPERTS, HIDDEN, width)
    layer.load_all(0, experts_of(combination, width))
    return layer


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, HIDDEN), generator=random).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(tokens)]).int()
    return x, ids, torch.rand((tokens, TOP_K), generator=random)


def expected(experts: list[tuple[Weight, Weight, Weight]], x: torch.Tensor, ids: torch.Tensor, by: torch.Tensor):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert, matrices in enumerate(experts):
        gate, up, down = map(numbers, matrices)
        y = torch.nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)
        out += (y @ down.T) * ((ids == expert) * by.double()).sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_products_are_those_of_three_formats(tier: str, combination: tuple[str, str, str], tokens: int) -> None:
    """Within what bfloat16 activations lose, twice: 2 ** -8 of the numbers that are added."""
    cases.require_tier(tier)
    layer, given = layer_of(combination, 256, tier, [0]), inputs(tokens)
    want = expected(experts_of(combination, 256), *given)
    found = layer.forward(*given, out=torch.empty(want.shape, dtype=torch.float32))
    assert float((found - want).norm() / want.norm()) < 2**-8


@pytest.mark.parametrize("width", [256, 288])
@pytest.mark.parametrize("tier", TIERS)
def test_bits_are_the_same_on_any_number_of_nodes(tier: str, width: int) -> None:
    """And in any batch. 288: eighteen panels of each, so that some nodes have others than the rest, or none."""
    cases.require_tier(tier)
    combination = ("q8_0", "q4_0", "q4_0")
    layers = [layer_of(combination, width, tier, nodes) for nodes in NODES]
    x, ids, by = inputs(9)
    first, *others = [layer.forward(x, ids, by) for layer in layers]
    assert all(torch.equal(first, other) for other in others)
    rows = [layers[0].forward(x[i : i + 1], ids[i : i + 1], by[i : i + 1]) for i in range(9)]
    assert tier not in cases.INVARIANT_TIERS or torch.equal(first, torch.cat(rows))


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_packed_bytes_go_anywhere(nodes: list[int]) -> None:
    """To one piece of memory and back, into a layer on other nodes, and place by place."""
    combination = COMBINATIONS[0]
    layer, other = (layer_of(combination, 256, cases.PLAIN_TIER, each) for each in (nodes, [0]))
    whole = torch.empty(EXPERTS * layer.bytes_per_expert, dtype=torch.uint8)
    layer.copy_all(range(EXPERTS), whole)
    each = whole.view(EXPERTS, -1)
    packed = torch.empty_like(whole)
    layer.pack_to(range(EXPERTS), experts_of(combination, 256), packed)
    assert torch.equal(packed, whole)
    for expert in range(EXPERTS):
        assert torch.equal(layer.packed(expert), each[expert]) and torch.equal(other.packed(expert), each[expert])
    pieces = layer.pieces(2)
    ends = [(at, at + nbytes) for at, _, nbytes in pieces]
    assert ends[0][0] == 0 and ends[-1][1] == layer.bytes_per_expert
    assert all(before[1] == after[0] for before, after in pairwise(ends))
    given = inputs(4)
    want = other.forward(*given)
    empty = layer_of(combination, 256, cases.PLAIN_TIER, nodes)
    for expert in range(EXPERTS):
        empty.forget(expert)
        empty.load_packed(expert, each[expert])
    assert torch.equal(empty.forward(*given), want)


def test_bytes_are_the_formats_own() -> None:
    sizes = {fmt: formats.expert_bytes(HIDDEN, 256, fmt) for fmt in ("q4_k", "q6_k", "q3_k")}
    layer = layer_of(("q4_k", "q6_k", "q3_k"), 256, cases.PLAIN_TIER, [0])
    assert layer.bytes_per_expert == pytest.approx(sum(sizes.values()) / 3, rel=0.01)


def test_a_kept_layer_is_adopted(tmp_path) -> None:
    layer = layer_of(COMBINATIONS[1], 256, cases.PLAIN_TIER, [0])
    pool = WorkerPool([-1, -1], 20, [0, 0])
    workspace = Workspace(pool, cases.PLAIN_TIER)
    written = PackedCache(tmp_path / "c", "key", "model", workspace, pool, print)
    written.keep("layer", layer)
    written.finish(lambda _done, _total: None)
    again = PackedExperts(workspace, EXPERTS, HIDDEN, 256)
    kept = PackedCache(tmp_path / "c", "key", "model", workspace, pool, print)
    kept.begin()
    assert kept.fill("layer", again)
    kept.confirm(lambda _done, _total: None)
    given = inputs(3)
    assert again.formats == layer.formats and torch.equal(again.forward(*given), layer.forward(*given))


def test_what_takes_both_as_one_is_refused() -> None:
    layer = layer_of(COMBINATIONS[0], 256, cases.PLAIN_TIER, [0])
    with pytest.raises(KernelError, match="no common layout"):
        layer.layout()
    workspace = Workspace(WorkerPool([-1, -1]), cases.PLAIN_TIER)
    rounded = PackedExperts(workspace, EXPERTS, HIDDEN, 256, int8_activations=True)
    with pytest.raises(KernelError, match="int8 activations do not exist for experts whose gate and up are"):
        rounded.load_all(0, experts_of(COMBINATIONS[0], 256))
    with pytest.raises(KernelError, match=r"expert 1: gate is .*the layer holds"):
        layer.load(1, *experts_of(COMBINATIONS[1], 256)[1])


def test_a_survey_keeps_such_experts_off_the_gpu() -> None:
    """In any kind of checkpoint; where whole layers differ, gates are like ups, and nothing is said."""
    int4, fp8 = QuantFormat("int4", "compressed-tensors", 128, 1, "BF16"), QuantFormat("fp8", "fp8", 128, 128, "F32")

    def unread(*layers: tuple[QuantFormat, QuantFormat, QuantFormat]) -> str:
        names = ("w1", "w3", "w2")
        return stored_formats(
            (f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}", fmt, 100)
            for layer, each in enumerate(layers)
            for expert in range(2)
            for name, fmt in zip(names, each, strict=True)
        ).experts.unread_by_gpu

    assert unread((int4, int4, fp8), (fp8, fp8, int4)) == ""
    assert unread((int4, int4, int4), (int4, fp8, fp8)).startswith("gates and ups of two formats (layer 1: int4")


def test_a_draft_layers_fused_experts_are_no_ups() -> None:
    """Experts one by one in codes, and the draft layer's as they were; both have layer 0."""
    int4, bf16 = QuantFormat("int4", "compressed-tensors", 128, 1, "BF16"), QuantFormat("bf16")
    experts = [
        (f"model.layers.0.mlp.experts.{expert}.{name}", int4, 100)
        for expert in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    drafts = [(f"mtp.layers.0.mlp.experts.{name}", bf16, 300) for name in ("gate_up_proj", "down_proj")]
    assert stored_formats([*experts, *drafts]).experts.unread_by_gpu == ""
