"""Experts of many rows: unpacked panels and grouped products (on a GPU, or in Triton's interpreter).

Rounding to bfloat16 errs by 0.43 * 2^-8 of a number, root mean square over all mantissas. On the way from x to the sum
are eight such roundings, independent of each other: of the weights of gate, up and down where they are scaled, of gate,
up, their product, each expert's result, and the sum; gate's two count up to 1.3 times through silu. Together 1.3 * 2^-8
of the sum, and less where three experts' errors average out. The CPU kernels round up to three numbers, too: 0.7 more,
1.5 in all, and a few rows may have a third more than what is usual. Triton's interpreter cuts bits off: that shrinks a
number by 0.72 * 2^-8 on average, always in the same direction, so those of weights, product and sum add up to
3.8 * 2^-8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from kernel_cases import GGUF_BLOCKS, gguf_codes
from live_bytes import LiveBytes
from tandem import _core
from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.formats.reference import decoded, magnitudes, quantise, stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertBiases, Routing
from tandem.spec.activation import SILU, Activation, ActivationKind
from tandem.spec.gpu_scratch import HOPPER, expert_scratch_bytes, pair_bytes

if AVAILABLE:
    from tandem.kernels import which
    from tandem.kernels.gpu.expert_rows import ExpertActivation
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.kernels.gpu.panels import Panels
    from tandem.kernels.gpu.prompts import grouped, products, rows, wgmma_product
    from tandem.kernels.gpu.prompts.code_product import activated, multiplied
    from tandem.kernels.gpu.prompts.order import order
    from tandem.kernels.gpu.prompts.products import ExpertGroup, PromptExperts, parts_of
    from tandem.kernels.gpu.prompts.unpack import Packed, unpack

pytestmark = [pytest.mark.gpu, needs_triton]
TOLERANCE = (4.5 if INTERPRETED else 2.0) * 2.0**-8
SQUARED = (
    6.5 if INTERPRETED else 2.2
) * 2.0**-8  # without gates: what the activation is made of counts twice
COUNT, TOP_K = 6, 3
PLAIN = ("bf16", "int8", "int4")
STORED = ("fp8", "mxfp8", "mxfp4", "nvfp4", "int4 f16", "int4_zeros", *GGUF_BLOCKS)


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def matrices(hidden: int, width: int, gated: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = torch.randn(2, COUNT, width if gated else width // 2, hidden) / hidden**0.5
    return gate, up, torch.randn(COUNT, hidden, width) / width**0.5


def coded(weight: Tensor, fmt: str) -> Tensor | WeightCodes:
    if fmt in PLAIN:
        return weight
    if fmt in GGUF_BLOCKS:
        return gguf_codes(fmt, *weight.shape, seed=int(weight[0, 0].abs() * 1000))
    if fmt not in ("int4 f16", "int4 bf16"):
        return stored(weight, fmt)
    codes, scales = quantise(weight, "int4", 32)
    joined = join_nibbles((codes.flatten(1).int() & 15).to(torch.uint8))
    kind = torch.float16 if fmt == "int4 f16" else torch.bfloat16
    return WeightCodes(joined, scales[..., 0].to(kind), "int4", 32, weight.shape[1])


def exact(weight: Tensor | WeightCodes) -> Tensor:
    """Numbers of a matrix as it is packed."""
    return weight.bfloat16().float() if isinstance(weight, Tensor) else decoded(weight)


def routed(tokens: int, hidden: int, choose: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights."""
    ids = torch.stack([choose() for _ in range(tokens)]).int()
    return torch.randn(tokens, hidden).bfloat16(), ids, torch.rand(tokens, TOP_K)


def anyone() -> Tensor:
    return torch.randperm(COUNT)[:TOP_K]


class Layer:
    """Experts 1 ... 5 on the GPU, all on the CPU. each: their matrices."""

    def __init__(
        self, ops: GpuOps, fmt: str, hidden: int = 256, width: int = 256, how: Activation = SILU
    ) -> None:
        torch.manual_seed(0)
        packed = fmt if fmt in PLAIN else "bf16"
        each = [tuple(coded(m[e], fmt) for m in matrices(hidden, width, how.gated)) for e in range(COUNT)]
        self.each = each
        slot_of = torch.arange(-1, COUNT - 1, dtype=torch.int32)
        self.there = ops.gpu_experts(slot_of, hidden, width, packed, how)
        self.here = ops.cpu.experts(COUNT, hidden, width, packed, how)
        for e in range(COUNT):
            self.here.load(e, *each[e])
            if e:
                self.there.load(e, *each[e])

    def add_biases(self, hidden: int, rows: int) -> None:
        biases = ExpertBiases(torch.randn(COUNT, rows), torch.randn(COUNT, rows), torch.randn(COUNT, hidden))
        for layer in (self.there, self.here):
            layer.set_biases(biases)

    def check(self, x: Tensor, ids: Tensor, weights: Tensor, tolerance: float = TOLERANCE) -> Tensor:
        """Against the CPU kernels on the same packed bytes, which are tested against float64."""
        expected = self.here.forward(x.float(), torch.where(ids == 0, -1, ids), weights)
        got = self.there.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
        error, size = (got.float() - expected).norm(), expected.norm()
        print(f"{error / size * 256:.2f} * 2^-8")
        assert error <= tolerance * size
        return got


@pytest.fixture(params=["PyTorch's", "ours", "from codes", "by warpgroups"])
def many(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """So few tokens are many; with either grouped product, or from codes where they are read."""
    from_codes = request.param in ("from codes", "by warpgroups")
    if from_codes and not torch.cuda.is_available():
        pytest.skip("codes are decoded on GPUs only")
    if request.param == "by warpgroups" and torch.cuda.get_device_capability(DEVICE) != HOPPER:
        pytest.skip("only Hopper has wgmma")
    if request.param == "ours" and INTERPRETED:
        pytest.skip("the interpreter multiplies the bits of bfloat16, as if they were integers")
    if request.param == "PyTorch's" and not products.has_pytorchs(DEVICE):
        pytest.skip("PyTorch's asks this GPU back")
    monkeypatch.setattr(products, "has_pytorchs", lambda device: request.param != "ours")
    for name in ("CODES_PAIRS", "PLAIN_PAIRS"):
        monkeypatch.setattr(which, name, 192 if from_codes else -1)
    monkeypatch.setattr(which, "WGMMA_LEAST_PAIRS", -1 if request.param == "by warpgroups" else 1 << 30)
    monkeypatch.setattr(products, "ran_by_warpgroups", lambda between: True)
    monkeypatch.setattr(which, "MANY_TOKENS", 17)
    monkeypatch.setattr(which, "MANY_PAIRS", 0)
    monkeypatch.setattr(products, "ALIGNED_TOKENS", 8)


@pytest.mark.parametrize("fmt", [*PLAIN, *STORED])
def test_every_format_is_unpacked(ops: GpuOps, many: None, fmt: str) -> None:
    Layer(ops, fmt).check(*routed(40, 256, anyone))


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_unpacked_numbers_are_the_files(ops: GpuOps, kind: str) -> None:
    """Rounded to bfloat16 once; code * scale + offset are at most two roundings of float32 before."""
    gate, up, down = (gguf_codes(kind, 256, 256, seed) for seed in range(3))
    layer = ops.gpu_experts(torch.tensor([0]), 256, 256, "bf16")
    layer.load(0, gate, up, down)
    got = torch.zeros(1, 512, 256, dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, 1, dtype=torch.int32, device=DEVICE)
    unpack(Packed(layer.pool, layer.stride, 0), 0, layer.gate_up, 2, one, 0, got)
    exact = torch.cat((decoded(gate), decoded(up)))
    size = torch.cat((magnitudes(gate), magnitudes(up)))
    error = (got[0].cpu().float() - exact).abs()
    assert (error <= 2.0 ** (-7 if INTERPRETED else -8) * exact.abs() + 2.0**-22 * size).all()


@pytest.mark.parametrize("shape", [(64, 40), (200, 72), (1096, 24)])
@pytest.mark.parametrize("fmt", ["bf16", "int4"])
def test_shapes_that_fill_no_panel(ops: GpuOps, many: None, fmt: str, shape: tuple[int, int]) -> None:
    Layer(ops, fmt, *shape).check(*routed(24, shape[0], anyone))


@pytest.mark.parametrize("rows", [48, 64])  # warpgroups read 64 at a time
@pytest.mark.parametrize("fmt", ["bf16", "int4", "mxfp4"])
@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_biases(ops: GpuOps, many: None, kind: ActivationKind, fmt: str, rows: int) -> None:
    """Of every kind of expert, and larger than most products: one that is left out or another's is seen."""
    how = Activation(kind, 1.702, 0.7)
    layer = Layer(ops, fmt, 64, rows if how.gated else 2 * rows, how)
    assert layer.there.prompts is not None
    hopper = DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) == HOPPER
    assert layer.there.prompts.wgmma == (hopper and rows == 64)  # 96 columns are no whole chunks either
    case = routed(40, 64, anyone)
    tolerance = TOLERANCE if how.gated else SQUARED
    layer.check(*case, tolerance)
    layer.add_biases(64, rows)
    layer.check(*case, tolerance)


def test_what_a_plan_counts_is_taken(ops: GpuOps, many: None) -> None:
    """Memory of unpacked experts: of a layer that is smaller than what would have room."""
    layer = Layer(ops, "bf16")
    layer.check(*routed(40, 256, anyone))
    prompts = layer.there.prompts
    assert prompts is not None and prompts.at_once == COUNT
    taken = 0 if prompts._scratch is None else prompts._scratch.nbytes  # codes need none
    assert taken in (0, expert_scratch_bytes(products._memory(DEVICE), COUNT, 256, 256))


def test_engines_of_a_process_unpack_beside_each_other(ops: GpuOps) -> None:
    """One's kernels may come between two of another's; layers of one engine have the same memory."""
    first, second = (Layer(ops, "bf16").there for _ in range(2))
    other = Layer(GpuOps(DEVICE, ops.cpu), "int8").there
    counts = torch.ones(1, COUNT, dtype=torch.int32, device=DEVICE)
    unpacked = []
    for layer in (first, second, other):
        (part,) = layer.parts()
        assert layer.prompts is not None
        unpacked.append(layer.prompts._unpacked(part, counts, 0))
        if layer is first:
            before = [matrix.clone() for matrix in unpacked[0]]
    assert all(matrix.eq(own).all() for matrix, own in zip(unpacked[0], before, strict=True))
    addresses = [matrices[0].data_ptr() for matrices in unpacked]
    assert addresses[0] == addresses[1] != addresses[2]


class NoKernel:
    """Stands for a kernel: what calls it only allocates."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **constants: None


@pytest.mark.parametrize(("hidden", "width"), [(64, 192), (192, 64)])
def test_rows_take_what_a_plan_counts(
    ops: GpuOps, monkeypatch: pytest.MonkeyPatch, hidden: int, width: int
) -> None:
    """Gathered rows, then results, beside gate and up, which activations take the place of."""
    layer, (x, _, weights) = Layer(ops, "bf16", hidden, width), routed(40, hidden, anyone)
    prompts, keys = layer.there.prompts, torch.zeros(40, TOP_K, dtype=torch.int32, device=DEVICE)
    matrices = torch.empty(5, 2 * width, hidden, device=DEVICE), torch.empty(5, hidden, width, device=DEVICE)
    whole = order(keys, torch.zeros(5, dtype=torch.int32, device=DEVICE), [5])
    for kernel in ("_gather", "_between"):
        monkeypatch.setattr(rows, kernel, NoKernel())
    monkeypatch.setattr(products, "has_pytorchs", lambda device: True)
    monkeypatch.setattr(products, "MANY_PAIRS", 0)
    monkeypatch.setattr(products, "grouped_product", lambda a, b, offs: a.new_empty(len(a), b.shape[2]))
    assert prompts is not None
    with LiveBytes() as live:
        prompts._products(x.to(DEVICE), whole, Routing(keys, weights), range(5), matrices)
    assert live.most - x.nbytes * (DEVICE.type != "cpu") == keys.numel() * pair_bytes(hidden, width)


def test_parts_and_pieces(ops: GpuOps, many: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts at a time, and eight tokens, of which the last piece has five. Biases follow their experts."""
    layer, case = Layer(ops, "int4"), routed(37, 256, anyone)
    layer.add_biases(256, 256)
    whole = layer.check(*case)
    monkeypatch.setattr(products, "_row_bytes", lambda device: 8 * 2 * TOP_K * 3 * 256)
    assert layer.there.prompts is not None
    layer.there.prompts.at_once = 2
    got = layer.check(*case)
    # float32 sums of the same results in another order, rounded to bfloat16: neighbours at most, or two where bits are
    # cut off
    torch.testing.assert_close(got, whole, rtol=2.0**-7, atol=2.0**-9)


def test_all_pieces_have_one_kernel(ops: GpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece has fewer pairs than whole warpgroups take. No prompt before the start has such a piece, so any
    other kernel would be compiled for it while serving."""
    layer, (x, ids, weights) = Layer(ops, "int4").there, routed(37, 256, anyone)
    prompts, given = layer.prompts, list[int]()
    assert prompts is not None
    prompts.codes = prompts._wgmma = True
    monkeypatch.setattr(products, "ALIGNED_TOKENS", 8)
    monkeypatch.setattr(products, "_row_bytes", lambda device: 8 * 2 * TOP_K * 3 * 256)
    monkeypatch.setattr(which, "WGMMA_LEAST_PAIRS", 3)  # 18 pairs of all experts: a piece has 24, the last one 15

    def activated(x: Tensor, *others: object) -> Tensor:
        given.append(len(x) - wgmma_product.MOST_ROWS)
        return x.new_zeros(len(x), 256)

    monkeypatch.setattr(wgmma_product, "activated", activated)
    monkeypatch.setattr(wgmma_product, "multiplied", lambda between, *others: between)
    keys = layer.table.to(DEVICE)[ids.long().to(DEVICE)]
    routing = Routing(ids.to(DEVICE), weights.to(DEVICE))
    prompts(x.to(DEVICE), keys, routing, parts_of(layer.pool, layer.stride, 5, 5))
    assert given == [8 * TOP_K] * 4 + [5 * TOP_K]


def test_whole_warpgroups_end_in_what_ran() -> None:
    biases = torch.zeros(COUNT, 64)
    assert products.ran_by_warpgroups(ExpertActivation(64))
    assert not products.ran_by_warpgroups(ExpertActivation(64, gate_up=biases, down=biases))
    assert not products.ran_by_warpgroups(ExpertActivation(64, Activation("swiglu_oai", 1.702, 7.0)))


@pytest.mark.parametrize("chosen", [[3, 4, 5], [0, 0, 2], [0, 0, 0]])
def test_all_rows_of_one_expert_and_none(ops: GpuOps, many: None, chosen: list[int]) -> None:
    """Experts without rows; tokens whose experts all live elsewhere get zeros."""
    layer = Layer(ops, "int4")
    got = layer.check(*routed(20, 256, lambda: torch.tensor(chosen)))
    assert any(chosen) or got.eq(0).all()


def test_pairs_that_nobody_has_are_left_out(ops: GpuOps, many: None) -> None:
    layer, (x, ids, weights) = Layer(ops, "bf16"), routed(20, 256, anyone)
    ids[0], ids[1, 0], ids[2, 1] = -1, COUNT, 1 << 30
    expected = layer.here.forward(x.float(), torch.where(ids == 0, -1, ids), weights)
    got = layer.there.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).float().cpu()
    assert (got - expected).norm() <= TOLERANCE * expected.norm() and got[0].eq(0).all()


def test_a_row_that_is_no_number_stays_alone(ops: GpuOps, many: None) -> None:
    layer, (x, ids, weights) = Layer(ops, "int4"), routed(20, 256, anyone)
    ids[4] = torch.tensor([1, 2, 3])
    x[4, 7] = torch.nan
    got = layer.there.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
    assert got[4].isnan().all() and got[torch.arange(20) != 4].isfinite().all()


@pytest.mark.parametrize("mean_rows", [1, 1000])  # chooses the tile
@pytest.mark.parametrize(("n", "k"), [(40, 24), (256, 128), (136, 200)])
def test_our_grouped_product(n: int, k: int, mean_rows: float) -> None:
    """Experts without rows, of one row, of several tiles and their borders; rows behind the last are nobody's. Rows lie
    twice as far apart as they are long, as activations do.

    float16 operands are exact in the sums of float32, and the result is rounded once."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 1, 128, 0, 64, 65, 7, 300, 0])
    rows = int(counts.sum())
    x, matrices = torch.randn(rows + 50, 2 * k).half(), (torch.randn(len(counts), n, k) / k**0.5).half()
    ends = counts.cumsum(0).int()
    left = x.to(DEVICE)[:, :k]
    got = grouped.grouped_product(left, matrices.to(DEVICE), ends.to(DEVICE), mean_rows).cpu()[:rows]
    whose = torch.arange(len(counts)).repeat_interleave(counts)
    expected = torch.einsum("rk,rnk->rn", x[:rows, :k].double(), matrices[whose].double())
    assert (got.double() - expected).norm() <= 2.0**-11 * expected.norm()
    torch.testing.assert_close(got.double(), expected, rtol=2.0**-10, atol=2.0**-10)


@needs_cuda
@pytest.mark.parametrize("mean_rows", [4, 30, 100])  # chooses the tile
@pytest.mark.parametrize("fmt", ["bf16", "int4 bf16", "int4 f16", "fp8", "mxfp4", "mxfp8", "q8_0"])
@pytest.mark.parametrize("shape", [(384, 256), (352, 96)])
def test_products_from_codes(
    ops: GpuOps, fmt: str, shape: tuple[int, int], mean_rows: float
) -> None:
    """Against float64. Numbers of codes are exact, sums float32, and each result is rounded once."""
    made = Layer(ops, fmt, *shape)
    layer = made.there
    assert layer.prompts is not None and layer.prompts.codes
    counts = torch.tensor([0, 1, 130, 17, 65])
    rows, ends = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x = torch.randn(rows + 9, shape[0]).bfloat16()
    numbers = [torch.stack([exact(expert[i]).double() for expert in made.each[1:]]) for i in range(3)]
    packed, whose = Packed(layer.pool, layer.stride, 0), torch.arange(5).repeat_interleave(counts)
    between = activated(x.to(DEVICE), packed, layer.gate_up, ends, mean_rows, ExpertActivation(shape[1]), ends)
    got = multiplied(between, packed, layer.gate_up.bytes, layer.down, ends, mean_rows)
    gate, up = (torch.einsum("rk,rnk->rn", x[:rows].double(), numbers[i][whose]) for i in range(2))
    expected = torch.nn.functional.silu(gate) * up
    h = between.cpu()[:rows].double()
    assert (h - expected).norm() <= 0.5 * 2.0**-8 * expected.norm()
    expected = torch.einsum("rk,rnk->rn", h, numbers[2][whose])
    assert (got.cpu()[:rows].double() - expected).norm() <= 0.5 * 2.0**-8 * expected.norm()


@needs_cuda
@pytest.mark.parametrize("fmt", ["bf16", "int4 bf16", "int4 f16", "fp8", "mxfp4", "mxfp8", "q8_0"])
@pytest.mark.parametrize("shape", [(384, 256), (320, 192)])
def test_products_by_warpgroups(ops: GpuOps, fmt: str, shape: tuple[int, int]) -> None:
    """Against float64, as above, over tiles of each size; twice, the same bits. 20 panels are no whole items."""
    made = Layer(ops, fmt, *shape)
    layer = made.there
    if not all(wgmma_product.reads(panels, DEVICE) for panels in (layer.gate_up, layer.down)):
        pytest.skip(f"{torch.cuda.get_device_name(DEVICE)} or this shape: other products")
    counts = torch.tensor([0, 1, 130, 40, 65 + 5 * wgmma_product.MOST_ROWS])
    count, ends = int(counts.sum()), counts.cumsum(0).int().to(DEVICE)
    x = torch.randn(count + wgmma_product.MOST_ROWS, shape[0]).bfloat16()
    x[count:] = float("nan")  # nobody's rows
    numbers = [torch.stack([exact(expert[i]).double() for expert in made.each[1:]]) for i in range(3)]
    packed, whose = Packed(layer.pool, layer.stride, 0), torch.arange(5).repeat_interleave(counts)
    into, out_of = reordered(x).to(DEVICE), ExpertActivation(shape[1])
    between = wgmma_product.activated(into, packed, layer.gate_up, ends, out_of, ends)
    got = wgmma_product.multiplied(between, packed, layer.gate_up.bytes, layer.down, ends)
    again = wgmma_product.multiplied(between, packed, layer.gate_up.bytes, layer.down, ends)
    assert torch.equal(got[:count], again[:count])
    gate, up = (torch.einsum("rk,rnk->rn", x[:count].double(), numbers[i][whose]) for i in range(2))
    expected = reordered(torch.nn.functional.silu(gate) * up)
    h = between.cpu()[:count].double()
    assert (h - expected).norm() <= 0.5 * 2.0**-8 * expected.norm()
    expected = torch.einsum("rk,rnk->rn", h, reordered(numbers[2][whose]))
    assert (got.cpu()[:count].double() - expected).norm() <= 0.5 * 2.0**-8 * expected.norm()


def reordered(x: Tensor) -> Tensor:
    """Columns as wgmma takes them: `REORDERED` in each 32."""
    column = torch.arange(x.shape[-1])
    out = torch.empty_like(x)
    out[..., column // 32 * 32 + torch.tensor(wgmma_product.REORDERED)[column % 32]] = x
    return out


def test_rows_are_gathered_in_the_order_of_wgmma() -> None:
    torch.manual_seed(0)
    x, keys = torch.randn(9, 96).bfloat16(), torch.tensor([[0], [1], [0], [-1], [1], [1], [0], [2], [2]])
    keys = keys.int().to(DEVICE)
    each = order(keys, torch.zeros(3, dtype=torch.int32, device=DEVICE), [3])
    plain, _ = rows.gather(x.to(DEVICE), each, None, range(3))
    got, _ = rows.gather(x.to(DEVICE), each, None, range(3), reordered=True, spare=5)
    assert len(got) == len(plain) + 5
    assert torch.equal(got[:8].cpu(), reordered(plain[:8].cpu()))


def test_few_rows_are_not_unpacked() -> None:
    """What unpacking takes is worth it from some rows an expert on."""
    experts = 32
    tokens = max(which.MANY_TOKENS, -(-which.MANY_PAIRS * experts // TOP_K))
    reads = which.Reads(True, True)
    assert which.gpu_way(tokens, tokens * TOP_K, experts, reads) is which.ExpertPath.PROMPTS
    assert which.gpu_way(tokens - 1, (tokens - 1) * TOP_K, experts, reads) is which.ExpertPath.TILES


def test_an_order_says_where_each_row_lies() -> None:
    torch.manual_seed(1)
    keys = torch.stack([torch.randperm(9)[:TOP_K] - 1 for _ in range(1500)]).int()
    counts = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    made = order(keys.to(DEVICE), counts, [3, 1, 4])
    assert counts.tolist() == [int((keys == key).sum()) for key in range(8)]
    first, ends, ranks = made.first.cpu(), made.ends.cpu(), made.ranks.cpu()
    assert torch.equal(ends - first, counts.cpu())
    assert [int(first[key]) for key in (0, 3, 4)] == [0, 0, 0]
    for head, tail in ((0, 3), (3, 4), (4, 8)):
        here = (keys >= head) & (keys < tail)
        rows = first[keys[here].long()] + ranks[here]
        assert sorted(rows.tolist()) == list(range(int(here.sum())))
        assert (rows < ends[keys[here].long()]).all()


def test_parts_are_read_as_soon_as_they_arrive(ops: GpuOps) -> None:
    """Each is waited for before its bytes are read, and free before its products."""
    layer, (x, ids, weights) = Layer(ops, "int4").there, routed(20, 256, anyone)
    said: list[str] = []
    assert layer.prompts is not None
    parts = [
        ExpertGroup(
            part.packed,
            part.count,
            lambda i=i: said.append(f"arrive {i}"),
            lambda i=i: said.append(f"read {i}"),
        )
        for i, part in enumerate(parts_of(layer.pool, layer.stride, 5, 2))
    ]
    keys = layer.table.to(DEVICE)[ids.long().to(DEVICE)]
    layer.prompts(x.to(DEVICE), keys, Routing(ids.to(DEVICE), weights.to(DEVICE)), parts)
    assert said == [f"{word} {i}" for i in range(3) for word in ("arrive", "read")]
    assert [part.count for part in parts] == [2, 2, 1]


def test_what_grouped_products_cannot_read() -> None:
    def panels(depth: int) -> Panels:
        return Panels("int4", 64, depth, depth, 4, depth * 8 + 128, depth * 8, "bf16", 32)

    plain = panels(64), panels(40)
    assert PromptExperts.reads(plain, ExpertActivation(40))
    assert PromptExperts.reads(plain, ExpertActivation(40, Activation("relu2")))
    for matrices, between in ((plain, ExpertActivation(42)), ((panels(60), panels(40)), ExpertActivation(40))):
        assert not PromptExperts.reads(matrices, between)
