"""Latent attention on a GPU (or interpreted) against its definition in float64: keys and values of every head.

Tolerances are of a row's length: float32 sums of n terms of size 1 differ by about n * 2^-24. In bfloat16 queries,
latents, weights of keys and results are rounded to 2^-9 of their size, each in its turn, and scores of size 3 make of
that as much of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from paged_batches import Batch, make_batch, random_tables
from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import RopeTables
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.mechanisms.latent.gpu import decode as decoding
    from tandem.mechanisms.latent.gpu import heads as heads_module
    from tandem.mechanisms.latent.gpu import per_head as per_head_module
    from tandem.mechanisms.latent.gpu import prompt
    from tandem.mechanisms.latent.gpu.prompt import Square, square_of
    from tandem.mechanisms.latent.gpu.prompt_kernels import attended

pytestmark = [pytest.mark.gpu, needs_triton]
PAGE = 16
DTYPE = (
    torch.float32 if INTERPRETED else torch.bfloat16
)  # the interpreter multiplies bfloat16 as if it were integers
TOLERANCE = 2.0**-15 if INTERPRETED else 2.0**-5
AWKWARD = LatentSizes(heads=5, nope=18, rope=12, rank=42, value=22)
FITTING = LatentSizes(heads=4, nope=32, rope=16, rank=64, value=32)


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def there(batch: Batch) -> Batch:
    tensors = {
        f.name: getattr(batch, f.name) for f in fields(batch) if torch.is_tensor(getattr(batch, f.name))
    }
    return replace(batch, **{name: tensor.to(DEVICE) for name, tensor in tensors.items()})


class Case:
    """Weights, and sequences whose keys up to `spans` are cached as the definition has them."""

    def __init__(
        self, sizes: LatentSizes, spans: list[tuple[int, int]], single: int = 0, neighbours: bool = True
    ):
        torch.manual_seed(0)
        self.sizes, self.spans, s = sizes, spans, sizes
        longest = max(end for _, end in spans)
        self.tables, pages = random_tables(len(spans), longest)
        self.batch = replace(make_batch(spans, self.tables), single_rows=single)
        self.pages = torch.full(
            (pages, PAGE, 1, s.width), torch.nan, dtype=DTYPE
        )  # what nobody wrote must not matter
        angles = torch.rand(longest, s.rope // 2) * 6.3
        self.weights = LatentWeights(
            self.made(s.heads, s.rank, s.nope) / s.nope**0.5, self.made(s.heads, s.value, s.rank) / s.rank**0.5,
            1 + 0.1 * self.made(s.rank), 1e-6, RopeTables(angles.cos(), angles.sin()), 0.7 * (s.nope + s.rope) ** -0.5,
            neighbours,
        )  # fmt: skip
        self.kv = [self.made(end, s.rank + s.rope) for _, end in spans]
        rows = len(self.batch.positions)
        self.q = self.made(rows, s.heads * (s.nope + s.rope))
        for i, (start, _) in enumerate(spans):
            self.cache(i, start)

    def made(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(DTYPE)

    def cache(self, i: int, count: int) -> None:
        at = torch.arange(count)
        self.pages[self.tables[i].long()[at // PAGE], at % PAGE, 0] = self.keys(i)[:count].to(DTYPE)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, …, rope] float64, as halves."""
        half, w = self.sizes.rope // 2, self.weights
        shape = (len(x), *[1] * (x.dim() - 2), half)
        cos, sin = (t.to(DTYPE).double()[positions].view(shape) for t in (w.rope.cos, w.rope.sin))
        a, b = (x[..., ::2], x[..., 1::2]) if w.neighbours else (x[..., :half], x[..., half:])
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def keys(self, i: int) -> Tensor:
        """[n, width] float64."""
        kv, s, w = self.kv[i].double(), self.sizes, self.weights
        c = kv[:, : s.rank]
        c = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + w.eps) * w.norm.double()
        return torch.cat((self.turned(kv[:, s.rank :], torch.arange(len(kv))), c), 1)

    def expected(self) -> Tensor:
        s, w, rows = self.sizes, self.weights, []
        q = self.q.double().view(-1, s.heads, s.nope + s.rope)
        positions = self.batch.positions
        q = torch.cat((q[..., : s.nope], self.turned(q[..., s.nope :], positions)), -1)
        for row, position in enumerate(positions.tolist()):
            i = int((self.batch.query_starts[1:] <= row).sum())
            key = self.keys(i)[: position + 1]
            c = key[:, s.rope :]
            k = torch.einsum("nr,hrd->nhd", c, w.keys.double())
            k = torch.cat((k, key[:, None, : s.rope].expand(-1, s.heads, -1)), -1)
            p = (torch.einsum("hd,nhd->hn", q[row], k) * w.scale).softmax(-1)
            rows.append(torch.einsum("hn,nr,hvr->hv", p, c, w.values.double()).flatten())
        return torch.stack(rows)

    def got(self, ops: GpuOps) -> tuple[Tensor, Tensor]:
        """Values, and the pages afterwards."""
        w, pages, each = self.weights, self.pages.to(DEVICE), there(self.batch)
        moved = w._replace(
            keys=w.keys.to(DEVICE), values=w.values.to(DEVICE), norm=w.norm.to(DEVICE),
            rope=RopeTables(w.rope.cos.to(DEVICE), w.rope.sin.to(DEVICE)),
        )  # fmt: skip
        layer = ops.bound(self.sizes, moved, "f32" if DTYPE is torch.float32 else "bf16")
        kv = torch.cat([self.kv[i][start:end] for i, (start, end) in enumerate(self.spans)])
        return layer(self.q.to(DEVICE), kv.to(DEVICE), each, pages).cpu(), pages.cpu()

    def check(self, ops: GpuOps) -> None:
        out, pages = self.got(ops)
        near(out, self.expected())
        for i, (_, end) in enumerate(self.spans):
            at = torch.arange(end)
            near(pages[self.tables[i].long()[at // PAGE], at % PAGE, 0], self.keys(i))


def near(got: Tensor, expected: Tensor) -> None:
    """Row by row: values of a long row are small, because they are means."""
    assert got.isfinite().all()
    error = (got.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert error.max() < TOLERANCE, error


DECODE = [(299, 300), (0, 1), (70, 71)]


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("sizes", [AWKWARD, FITTING])
def test_rows_that_decode(ops: GpuOps, sizes: LatentSizes, neighbours: bool) -> None:
    Case(sizes, DECODE, neighbours=neighbours).check(ops)


@pytest.mark.parametrize("spans, single", [
    ([(40, 41), (0, 9), (20, 53), (7, 8)], 1),
    ([(0, 1), (0, 3)], 0),
    ([(30, 47)], 0),
])  # fmt: skip
def test_chunks_of_few_rows_are_asked_like_rows_that_decode(
    ops: GpuOps, spans: list[tuple[int, int]], single: int
) -> None:
    Case(AWKWARD, spans, single).check(ops)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PIECE": 32,
        "SQUARE": 48,
        "ROUND_ROWS": 8,
        "ROUND_KEYS": 16,
        "HEAD_BYTES": 60_000,
    }.items():
        monkeypatch.setattr(prompt, name, value)
    monkeypatch.setattr(heads_module, "FEW_ROWS", 4)


@pytest.mark.parametrize("sizes", [AWKWARD, FITTING])
@pytest.mark.parametrize("spans, single", [
    ([(0, 37)], 0),
    ([(75, 76), (100, 170), (0, 5), (3, 6), (0, 80)], 1),  # pieces, several squares, few rows between
    ([(96, 128), (64, 72)], 0),
])  # fmt: skip
def test_chunks_of_many_rows(
    ops: GpuOps, small_pieces: None, sizes: LatentSizes, spans: list[tuple[int, int]], single: int
) -> None:
    Case(sizes, spans, single).check(ops)


def test_the_square_takes_what_is_no_whole_piece() -> None:
    piece = prompt.PIECE
    assert square_of(0, 2048) == Square(0, 2048, 0, 2048, ())
    whole = square_of(piece + 700, 100)
    assert whole == Square(piece + 512, 512, 188, 100, ((0, piece), (piece, piece + 512)))
    assert whole.pieces_first == 0 and square_of(300, 10).pieces_first == 256


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", ["own", "cudnn"])
def test_attention_and_its_sums(causal: bool, attend: str) -> None:
    """With values that lie apart, as they come from the product."""
    sizes = LatentSizes(heads=3, nope=128, rope=64, rank=512, value=128)
    if INTERPRETED:
        sizes = LatentSizes(heads=3, nope=16, rope=8, rank=32, value=24)
    kernel: Callable[..., tuple[Tensor, Tensor]] = attended
    if attend == "cudnn":
        kernel = prompt.attention_for(sizes, DEVICE)
        if kernel is attended:
            pytest.skip("cuDNN's attention is not here")
    torch.manual_seed(0)
    rows, keys = 256, 256 if causal else 512
    q, k = (torch.randn(n, 3, sizes.nope + sizes.rope).to(DTYPE) for n in (rows, keys))
    both = torch.randn(keys, 3, sizes.nope + sizes.value).to(DTYPE)
    v, scale = both[..., sizes.nope :], 0.1
    out, lse = kernel(q.to(DEVICE), k.to(DEVICE), both.to(DEVICE)[..., sizes.nope :], scale, causal, sizes)
    scores = torch.einsum("thd,nhd->htn", q.double(), k.double()) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), float("-inf"))
    near(out.cpu(), torch.einsum("htn,nhd->thd", scores.softmax(-1), v.double()))
    torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1), rtol=2.0**-12, atol=2.0**-12)


def test_a_long_row_takes_several_turns(ops: GpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks of keys than programs; and rows of which not all fit the scratch at once."""
    monkeypatch.setattr(decoding, "PARTS", 16)
    monkeypatch.setattr(decoding, "PARTIAL_BYTES", 2 * AWKWARD.heads * 16 * (AWKWARD.rank + 2) * 4)
    keys = decoding.tile_of(DEVICE, AWKWARD).keys
    longest = 2 * 16 * keys + 17
    Case(AWKWARD, [(longest - 1, longest), (16 * keys - 1, 16 * keys), (keys, keys + 1)]).check(ops)


@pytest.mark.parametrize("sizes", [FITTING._replace(heads=n) for n in (20, 40, 128)])
def test_many_heads_are_several_tiles(ops: GpuOps, sizes: LatentSizes) -> None:
    Case(sizes, [(99, 100), (2, 3)]).check(ops)


@pytest.mark.skipif(INTERPRETED, reason="bfloat16 alone")
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("kernel", ["chosen", "triton"])
def test_deepseeks_own_sizes(ops: GpuOps, monkeypatch: pytest.MonkeyPatch, heads: int, kernel: str) -> None:
    """On Hopper, Gluon's kernel for many heads, and Triton's. Several turns, and blocks with few keys."""
    if kernel == "triton":
        monkeypatch.setattr(decoding, "hopper_kernel", lambda device, sizes: None)
    elif heads > 32 and torch.cuda.get_device_capability() == (9, 0):
        assert decoding.hopper_kernel(DEVICE, LatentSizes(heads, 128, 64, 512, 128)) is not None
    spans = [(4999, 5000), (0, 1), (64, 65), (2047, 2048), (2048, 2049)]
    Case(LatentSizes(heads, 128, 64, 512, 128), spans).check(ops)


def test_many_rows_are_divided_among_fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of heads; and never fewer than eight, for rows that are longer than the others."""
    deepseek = LatentSizes(128, 128, 64, 512, 128)
    monkeypatch.setattr(decoding, "_processors", lambda device: 132)
    monkeypatch.setattr(decoding, "tile_of", lambda device, sizes: decoding.MANY_HEADS[0])
    parts = [decoding.parts_of_rows(DEVICE, deepseek, rows) for rows in (1, 2, 3, 4, 5, 8, 64)]
    assert parts == [64, 32, 16, 16, 8, 8, 8]
    assert decoding.parts_of(deepseek, decoding.MANY_HEADS[0]) == 32
    monkeypatch.setattr(decoding, "tile_of", lambda device, sizes: decoding.FEW_HEADS[0])
    assert {decoding.parts_of_rows(DEVICE, deepseek._replace(heads=16), rows) for rows in (1, 64)} == {64}


@pytest.fixture(scope="module")
def same_in_every_batch() -> GpuOps:
    cpu = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    return GpuOps(DEVICE, cpu, deterministic=True)


@pytest.mark.skipif(INTERPRETED, reason="NumPy's products may differ by the number of rows")
@pytest.mark.parametrize(
    "heads, mode", [(16, "ops"), (16, "same_in_every_batch"), (128, "same_in_every_batch")]
)
def test_a_row_that_decodes_is_the_same_in_every_batch(
    request: pytest.FixtureRequest, heads: int, mode: str
) -> None:
    """With many heads in the deterministic mode alone: else fewer programs share a row's keys in a larger batch."""
    ops: GpuOps = request.getfixturevalue(mode)
    sizes = LatentSizes(heads, 128, 64, 512, 128)
    spans = [(2999, 3000), (10, 11), (700, 701), (100, 140)]
    case = Case(sizes, spans, 3)
    together, _ = case.got(ops)
    for i in range(3):
        alone = Case(sizes, spans, 3)
        alone.spans, alone.q, alone.kv = [spans[i]], case.q[i : i + 1], [case.kv[i]]
        alone.batch, alone.tables = make_batch([spans[i]], case.tables[i : i + 1]), case.tables[i : i + 1]
        alone.pages = case.pages
        assert torch.equal(alone.got(ops)[0][0], together[i])


@pytest.mark.parametrize("rows", [1, 5, 150])
@pytest.mark.parametrize("shape", [(5, 22, 42), (16, 128, 64)])
def test_per_head(rows: int, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    heads, columns, depth = shape
    weights, x = torch.randn(shape).to(DTYPE), torch.randn(rows, heads, depth).to(DTYPE) / depth**0.5
    out = torch.empty(rows, heads, columns, dtype=DTYPE, device=DEVICE)
    got = per_head_module.per_head(x.to(DEVICE), weights.to(DEVICE), out)
    near(got.cpu(), torch.einsum("thk,hnk->thn", x.double(), weights.double()))
    assert per_head_module.block_of(128, 512) == 128 and per_head_module.block_of(16, 128) == 16
