"""The MoE driver against float64: formats, activations, routing of every kind, chunks, output modes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernel_cases as cases
from tandem.errors import KernelError
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.fit import as_packed
from tandem.kernels.ops import ExpertBiases
from tandem.kernels.reference import TorchOps
from tandem.spec.activation import Activation, ActivationKind

EXPERTS, HIDDEN, WIDTH = 13, 100, 40  # width: half a pair of panels is padding
ALPHA, LIMIT = 1.702, 1.0  # a limit that cuts many values


@dataclass(frozen=True)
class Weights:
    """One layer's float32 weights and biases, [E, ...]."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor


@functools.cache
def weights_of(seed: int = 0, width: int = WIDTH, halves: int = 1) -> Weights:
    """halves: of the intermediate activations that gate and up make, each `width` of them."""
    g = torch.Generator().manual_seed(seed)
    gate, up = 2 * torch.randn(2, EXPERTS, width, HIDDEN, generator=g) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, halves * width, generator=g) / width**0.5
    biases = torch.randn(2, EXPERTS, width, generator=g)
    return Weights(gate, up, down, biases[0], biases[1], torch.randn(EXPERTS, HIDDEN, generator=g))


def activated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    if kind == "gelu":
        return F.gelu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "relu2":
        return torch.cat((gate, up), -1).clamp(min=0) ** 2
    if kind == "silu_clamp":
        return F.silu(gate).clamp(max=LIMIT) * up.clamp(-LIMIT, LIMIT)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    if kind == "swiglu_clamp":
        return F.silu(gate) * up
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def activation_error(
    kind: str, gate: Tensor, up: Tensor, gate_error: Tensor, up_error: Tensor
) -> Tensor:
    """First order. The slope is below 1.2 in the gate for silu and gelu, times |up|; clamps make nothing steeper."""
    if kind == "relu2":
        x, error = torch.cat((gate, up), -1), torch.cat((gate_error, up_error), -1)
        return (2 * x.clamp(min=0) + error) * error + 4 * cases.F32_UNIT * x**2
    slope = 1.3 * max(1.0, ALPHA)
    error = slope * (up.abs() + 1) * gate_error + (gate.abs() + 1) * up_error
    # exp, division and A&S 7.1.26's erf (1.5e-7 absolute) are good to 4e-7 of gate * up.
    return error + 4e-7 * gate.abs() * (up.abs() + 1)


def load(
    layer: PackedExperts, w: Weights, biased: bool = False, fmt: str = "bf16", group: int = 0
) -> PackedExperts:
    for e in range(EXPERTS):
        cases.load_expert(layer, e, (w.gate[e], w.up[e], w.down[e]), fmt, group)
    if biased:
        layer.set_biases(ExpertBiases(w.gate_bias, w.up_bias, w.down_bias))
    return layer


def exact_and_bound(
    w: Weights,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    fmt: str,
    group: int,
    tier: str,
    kind: str,
    biased: bool,
) -> tuple[Tensor, Tensor]:
    """The float64 result, and how far float32 kernels may be from it.

    First order: the products' own bounds, passed through the activation and down; the intermediate activations are
    rounded to bfloat16 once.
    """
    out, bound = torch.zeros(2, len(x), HIDDEN, dtype=torch.float64)
    for e in range(EXPERTS):
        token, slot = torch.where(ids == e)
        row = x[token].double()
        gate_m, up_m, down_m = (cases.magnitude_of(m[e], fmt, group).double() for m in (w.gate, w.up, w.down))
        gate_w, up_w, down_w = (as_packed(m[e], fmt, group).double() for m in (w.gate, w.up, w.down))
        b = [t[e].double() if biased else 0.0 for t in (w.gate_bias, w.up_bias, w.down_bias)]
        gate, up = row @ gate_w.T + b[0], row @ up_w.T + b[1]
        gate_error = cases.product_bound(row.abs() @ gate_m.T + 3.0, HIDDEN, fmt, group, tier)
        up_error = cases.product_bound(row.abs() @ up_m.T + 3.0, HIDDEN, fmt, group, tier)
        hidden = activated(kind, gate, up)
        hidden_error = activation_error(kind, gate, up, gate_error, up_error)
        if fmt != "f32":
            hidden_error = hidden_error + cases.BF16_UNIT * (hidden.abs() + hidden_error)
        y = hidden @ down_w.T + b[2]
        y_error = hidden_error @ down_w.abs().T
        y_error += cases.product_bound(hidden.abs() @ down_m.T + 3.0, w.down.shape[-1], fmt, group, tier)
        scale = weights[token, slot, None].double()
        out.index_add_(0, token, scale * y)
        bound.index_add_(0, token, scale.abs() * (y_error + 16 * cases.F32_UNIT * y.abs()))
    return out, bound


def random_routing(rows: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """ids int32 [rows, k] with skipped ones (-1 and EXPERTS), weights float32."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, EXPERTS + 1, (rows, k), generator=g, dtype=torch.int32)
    return ids, torch.rand(rows, k, generator=g)


@pytest.mark.parametrize(
    ("fmt", "group", "tier", "algorithm"),
    cases.pairwise(cases.FORMATS, cases.TIERS, ["auto", *cases.ALGORITHMS]),
)
def test_formats(fmt: str, group: int, tier: str, algorithm: str) -> None:
    cases.require_tier(tier)
    layer = cases.packed_experts(cases.workspace_of(tier, algorithm), EXPERTS, HIDDEN, WIDTH, fmt, group)
    load(layer, weights_of(), fmt=fmt, group=group)
    assert layer.tier == tier
    for rows, k in ((1, 1), (1, 12), (3, 3), (150, 4)):
        x, (ids, weights) = cases.activations(rows, HIDDEN, fmt), random_routing(rows, k)
        exact, bound = exact_and_bound(weights_of(), x, ids, weights, fmt, group, tier, "silu", False)
        y = layer.forward(x, ids, weights, out=torch.empty(rows, HIDDEN))
        assert ((y.double() - exact).abs() <= bound).all(), (rows, k)


def check_many_rows(tier: str, fmt: str, group: int, width: int) -> None:
    cases.require_tier(tier)
    w = weights_of(width=width)
    layer = cases.packed_experts(cases.workspace_of(tier, "auto"), EXPERTS, HIDDEN, width, fmt, group)
    load(layer, w, fmt=fmt, group=group)
    rows = torch.tensor([64, 65, 80, 81, 100, 129, 160, 161])
    ids = torch.repeat_interleave(torch.tensor([3, 0, 7, 12, 5, 1, 9, 2]), rows)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1)), None].int()
    x, weights = cases.activations(len(ids), HIDDEN, fmt), torch.rand(len(ids), 1)
    exact, bound = exact_and_bound(w, x, ids, weights, fmt, group, tier, "silu", False)
    y = layer.forward(x, ids, weights, out=torch.empty(len(ids), HIDDEN))
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("tier", ["amx", "amx_standin"])
@pytest.mark.parametrize(("fmt", "group"), [("int4", 32), ("mxfp4", 32), ("int8", 32)])
def test_experts_of_more_rows_than_a_stream(fmt: str, group: int, tier: str) -> None:
    """80 rows are one stream of weights; of 81 to 160, codes of 4 bits are two of them."""
    check_many_rows(tier, fmt, group, WIDTH)


@pytest.mark.parametrize("tier", cases.TIERS)
def test_intermediate_activations_of_several_slices(tier: str) -> None:
    """Tiles load them where they lie, slice after slice of K, of which the last is shorter; but the last rows, where
    tiles are higher than rows are left (129 and 161). Other formats' bounds would hide a wrong slice of so many k."""
    check_many_rows(tier, "bf16", 0, 1100)


@pytest.mark.parametrize("rows", [1, 6, 900])  # digits and streams of few rows, tiles of many
@pytest.mark.parametrize("fmt", ["f32", "bf16", "mxfp4"])
@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_activations_and_biases(kind: ActivationKind, tier: str, fmt: str, rows: int) -> None:
    cases.require_tier(tier)
    how, group = Activation(kind, ALPHA, LIMIT), 32 if fmt == "mxfp4" else 0
    w = weights_of() if how.gated else weights_of(width=48, halves=2)
    numbers = "bf16" if group else fmt
    layer = PackedExperts(cases.workspace_of(tier, "auto"), EXPERTS, HIDDEN, w.down.shape[-1], numbers, how)
    load(layer, w, biased=True, fmt=fmt, group=group)
    x, (ids, weights) = 3 * cases.activations(rows, HIDDEN, fmt), random_routing(rows, 3)
    exact, bound = exact_and_bound(w, x, ids, weights, fmt, group, tier, kind, True)
    y = layer.forward(x, ids, weights, out=torch.empty(rows, HIDDEN))
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_every_activation_with_int8_activations(kind: ActivationKind, tier: str, rows: int) -> None:
    """What lies between the products is rounded to int8, whatever made it. A rounding to 127 steps of a group's largest
    is off by 1/254 of it at most, 1/440 in the mean; the largest of 32 is some 2 to 4 of their deviations. Both
    roundings and the activation's slope make that below 3 % of the result."""
    cases.require_tier(tier)
    how, (ids, weights) = Activation(kind, ALPHA, 3.0), random_routing(rows, 3)
    w = weights_of(width=48, halves=1 if how.gated else 2)
    layers = [
        PackedExperts(cases.workspace_of(tier), EXPERTS, HIDDEN, w.down.shape[-1], "int4", how, int8_activations=on)
        for on in (False, True)
    ]
    x = cases.activations(rows, HIDDEN, "int4")
    plain, rounded = (
        load(each, w, biased=True).forward(x, ids, weights, out=torch.empty(rows, HIDDEN)) for each in layers
    )
    assert (rounded - plain).norm() < 0.03 * plain.norm()
    assert not torch.equal(rounded, plain) or tier.startswith("amx")  # many rows are left to tiles there


@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_what_is_no_number_stays_none(kind: ActivationKind) -> None:
    """A clamp must not make a limit of it."""
    how = Activation(kind, ALPHA, LIMIT)
    w = weights_of(width=48, halves=1 if how.gated else 2)
    layer = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, w.down.shape[-1], "f32", how)
    x = torch.full((1, HIDDEN), torch.nan)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    assert load(layer, w).forward(x, ids, weights).isnan().all()


@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_the_reference_computes_the_same(kind: ActivationKind) -> None:
    how = Activation(kind, ALPHA, LIMIT)
    w = weights_of(width=48, halves=1 if how.gated else 2)
    layer = TorchOps().experts(EXPERTS, HIDDEN, w.down.shape[-1], "f32", how)
    layer.load_all(0, list(zip(w.gate, w.up, w.down, strict=True)))
    layer.set_biases(ExpertBiases(w.gate_bias, w.up_bias, w.down_bias))
    x, (ids, weights) = 3 * cases.activations(20, HIDDEN, "f32"), random_routing(20, 3)
    exact, bound = exact_and_bound(w, x, ids, weights, "f32", 0, "scalar", kind, True)
    assert ((layer.forward(x, ids, weights).double() - exact).abs() <= bound).all()


def test_many_experts_and_many_of_them_for_a_token() -> None:
    """1,024 experts, of which a token chooses 22: as many as any model has."""
    g, experts = torch.Generator().manual_seed(5), 1024
    gate, up = torch.randn(2, experts, 16, 32, generator=g) / 32**0.5
    down = torch.randn(experts, 32, 16, generator=g) / 4
    layer, reference = (
        ops.experts(experts, 32, 16, "f32") for ops in (CpuOps(cases.pool_of(2), "scalar"), TorchOps())
    )
    for each in (layer, reference):
        each.load_all(0, list(zip(gate, up, down, strict=True)))
    for rows in (1, 70):
        x, weights = torch.randn(rows, 32, generator=g), torch.rand(rows, 22, generator=g)
        ids = torch.stack([torch.randperm(experts, generator=g)[:22] for _ in range(rows)]).int()
        torch.testing.assert_close(layer.forward(x, ids, weights), reference.forward(x, ids, weights))


@functools.cache
def plain_layer(tier: str = "scalar", threads: int = 2) -> PackedExperts:
    return load(
        PackedExperts(cases.workspace_of(tier, "auto", threads), EXPERTS, HIDDEN, WIDTH), weights_of()
    )


def check(ids: Tensor, weights: Tensor, threads: int = 2) -> None:
    x = cases.activations(len(ids), HIDDEN, "bf16")
    exact, bound = exact_and_bound(weights_of(), x, ids, weights, "bf16", 0, "scalar", "silu", False)
    y = plain_layer("scalar", threads).forward(x, ids, weights, out=torch.empty(len(ids), HIDDEN))
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("k", range(1, 13))
def test_top_k(k: int) -> None:
    check(*random_routing(9, k, seed=k))


def test_every_token_on_one_expert() -> None:
    check(torch.full((400, 1), 5, dtype=torch.int32), torch.rand(400, 1))


def test_one_expert_twice_for_a_token() -> None:
    check(torch.tensor([[4, 4, 4]], dtype=torch.int32), torch.tensor([[0.25, 0.5, -1.0]]))


def test_more_workers_than_tasks() -> None:
    check(*random_routing(1, 2, seed=5), threads=7)


def test_more_tokens_than_a_chunk() -> None:
    ids, weights = random_routing(2500, 2)
    x = cases.activations(2500, HIDDEN, "bf16")
    y = plain_layer().forward(x, ids, weights)
    for rows in (slice(0, 1300), slice(1300, 2500)):
        assert torch.equal(y[rows], plain_layer().forward(x[rows], ids[rows], weights[rows]))


def test_no_tokens_and_no_experts() -> None:
    empty = torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 3)
    assert plain_layer().forward(torch.empty(0, HIDDEN, dtype=torch.bfloat16), *empty).shape == (0, HIDDEN)
    skipped = torch.tensor([[-1, EXPERTS, 1 << 30]], dtype=torch.int32), torch.rand(1, 3)
    assert not plain_layer().forward(torch.ones(1, HIDDEN).bfloat16(), *skipped).any()


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_and_overwrite(tier: str, dtype: torch.dtype) -> None:
    cases.require_tier(tier)
    x, (ids, weights) = cases.activations(30, HIDDEN, "bf16"), random_routing(30, 3)
    exact = plain_layer(tier).forward(x, ids, weights, out=torch.empty(30, HIDDEN))
    before = torch.randn(30, HIDDEN).to(dtype)
    overwritten = plain_layer(tier).forward(x, ids, weights, out=before.clone())
    added = plain_layer(tier).forward(x, ids, weights, out=before.clone(), add=True)
    assert torch.equal(overwritten, exact.to(dtype))
    assert torch.equal(added, (before.float() + exact).to(dtype))


def test_an_earlier_calls_nan_does_not_leak_through_padding() -> None:
    """Scratch is shared: what another layer left behind padded columns must not be multiplied with weights of 0."""
    workspace = cases.workspace_of("scalar")
    wide = PackedExperts(workspace, 1, HIDDEN, 64)
    wide.load(0, *(torch.full(s, torch.nan) for s in ((64, HIDDEN), (64, HIDDEN), (HIDDEN, 64))))
    one = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    assert wide.forward(torch.ones(4, HIDDEN).bfloat16(), *one).isnan().all()
    y = plain_layer().forward(torch.ones(4, HIDDEN).bfloat16(), *one)
    assert y.isfinite().all()


def test_packed_bytes_move_from_layer_to_layer() -> None:
    w, x = weights_of(), torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    source = load(PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH), w)
    copy = PackedExperts(
        cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH
    )  # nothing was loaded into it before
    with pytest.raises(KernelError, match="has not been loaded"):
        copy.packed(0)
    for e in range(EXPERTS):
        copy.load_packed(e, source.packed(e))
    ids, weights = (
        torch.tensor([[0, 12], [3, 4], [5, 1], [2, 2], [9, 7]], dtype=torch.int32),
        torch.rand(5, 2),
    )
    assert torch.equal(copy.forward(x, ids, weights), source.forward(x, ids, weights))
    with pytest.raises(KernelError, match="no expert 13"):
        copy.load_packed(EXPERTS, source.packed(0))


def test_experts_that_live_elsewhere_take_no_place() -> None:
    """Five places for thirteen experts: what is there computes as in a full layer, wherever it lies."""
    x, full = cases.activations(6, HIDDEN, "bf16"), plain_layer()
    some = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, cpu_slots=5)
    held = [1, 4, 7, 8, 12]
    for expert in held:
        some.load_packed(expert, full.packed(expert))
    some.forget(7)
    some.load_packed(2, full.packed(2))
    some.forget(1)
    some.load_packed(11, full.packed(11))
    assert some.loaded == 5
    ids = torch.tensor([[2, 4], [8, 11], [12, 2], [11, -1], [4, 8], [2, 12]], dtype=torch.int32)
    weights = torch.rand(6, 2)
    assert torch.equal(some.forward(x, ids, weights), full.forward(x, ids, weights))
    for expert in (2, 4, 8, 11, 12):
        assert torch.equal(some.packed(expert), full.packed(expert))
    with pytest.raises(ValueError, match="expert 7 was routed to before it was loaded"):
        some.forward(x[:1], torch.tensor([[7]], dtype=torch.int32), torch.ones(1, 1))


def test_a_full_layer_takes_nothing_more_and_keeps_what_it_has() -> None:
    full = plain_layer()
    some = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, cpu_slots=3)
    w = weights_of()
    matrices = list(zip(w.gate, w.up, w.down, strict=True))
    some.load_all(4, matrices[4:6])
    with pytest.raises(ValueError, match="no slot is left for expert 7 in a layer that has 3"):
        some.load_all(5, matrices[5:8])
    assert some.loaded == 2
    some.load_packed(0, full.packed(0))
    with pytest.raises(ValueError, match="no slot is left"):
        some.load_packed(1, full.packed(1))
    some.load_packed(4, full.packed(4))  # again, in its own place
    assert torch.equal(some.packed(5), full.packed(5))
    some.forget(5)
    with pytest.raises(ValueError, match="expert 5 is not loaded"):
        some.forget(5)
    with pytest.raises(ValueError, match="do not lie side by side"):
        some.bytes(4, 2)
    with pytest.raises(ValueError, match="only some of its experts"):
        some.parts()


@pytest.mark.parametrize("places", [-1, EXPERTS + 1])
def test_wrong_numbers_of_places_are_refused(places: int) -> None:
    with pytest.raises(ValueError, match="slots for them"):
        PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, cpu_slots=places)
