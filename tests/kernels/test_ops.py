"""`CpuOps` (every tier this host runs) against `TorchOps`, and the promise that rows do not depend on each other.

Tolerances: both sides work in float32 and differ in the order of sums, so an n-term sum over 16 lanes differs by at
most about (n / 16 + 4) * 2^-24 of its terms; a bfloat16 result may then round to the neighbour (2^-7 of its size).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paged_batches import PAGE, Batch, make_batch, random_tables
from tandem import _core
from tandem.errors import KernelError
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ColumnRun, HeadNorms, RopeTables
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.router.shape import Router

F32_ULP, BF16_ULP = 2.0**-23, 2.0**-7
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=_core.supported_tiers())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(_core.WorkerPool([-1, -1]), request.param)


def assert_near(got: Tensor, expected: Tensor, terms: int, size: float = 1.0) -> None:
    """Sums of `terms` products of about `size` each, see the module's docstring."""
    f32_error = (terms / 16 + 8) * F32_ULP
    bf16 = got.dtype is torch.bfloat16
    rtol = f32_error + (BF16_ULP if bf16 else 0.0)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=f32_error * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 17), (40, 1024), (5, 1)])
def test_rms_norm(ops: CpuOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, *shape).to(dtype).unbind()
    weight = (1 + 0.1 * torch.randn(shape[1])).to(dtype)
    kept = residual.clone()
    got, expected = ops.rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5)
    assert_near(got, expected, 2 * shape[1])
    assert (got != expected).float().mean() < (0.01 if dtype is torch.bfloat16 else 1)
    got, expected = (
        ops.add_rms_norm(x, residual, weight, 1e-5),
        TorchOps().add_rms_norm(x, kept, weight, 1e-5),
    )
    assert torch.equal(residual, kept)
    assert_near(got, expected, 2 * shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["none", "head", "all"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary", "narrower"),
    [(9, 3, 64, 64, 0), (4, 1, 40, 20, 0), (2, 2, 18, 18, 0), (6, 2, 40, 12, 18)],
)
def test_rope_store(
    ops: CpuOps,
    dtype: torch.dtype,
    norm: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int,
    narrower: int,
) -> None:
    """narrower: by so many channels values are narrower than keys."""
    torch.manual_seed(0)
    tables, pages = random_tables(2, 50)
    batch = make_batch([(0, 21), (49, 50)], tables)
    angles = torch.rand(50, rotary // 2) * 6.3
    rope = RopeTables(angles.cos(), angles.sin())
    value_dim = head_dim - narrower
    qkv = torch.randn(22, (heads + kv_heads) * head_dim + kv_heads * value_dim).to(dtype)
    sizes = {"none": None, "head": (head_dim, head_dim), "all": (heads * head_dim, kv_heads * head_dim)}[norm]
    q_norm, k_norm = (None, None) if sizes is None else (1 + 0.1 * torch.randn(n).to(dtype) for n in sizes)
    results = []
    for each in (ops, TorchOps()):
        dims = head_dim, value_dim
        k_pages, v_pages = (torch.zeros(pages, PAGE, kv_heads, n, dtype=dtype) for n in dims)
        q = each.rope_store(
            qkv, rope, batch, k_pages, v_pages, heads, HeadNorms(q_norm, k_norm),
        )  # fmt: skip
        results.append((q, k_pages, v_pages))
    for got, expected in zip(*results, strict=True):
        if norm == "none":
            assert torch.equal(got, expected)  # the same products, the same roundings
        else:  # one neighbour from the norm, one from its product; the rotation adds two such terms
            slack = 4 * BF16_ULP if dtype is torch.bfloat16 else 64 * F32_ULP
            torch.testing.assert_close(got, expected, rtol=slack, atol=slack)


def attention_case(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, tokens: int, value_dim: int = 0
) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    tables, pages = random_tables(3, tokens)
    dims = head_dim, value_dim or head_dim
    k, v = (torch.randn(pages, PAGE, kv_heads, n).to(dtype) for n in dims)
    return torch.randn(3, tokens, heads, head_dim).to(dtype), k, v, tables


def attend(ops: CpuOps | TorchOps, q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int) -> Tensor:
    return ops.attention(q.contiguous(), k, v, batch, q.shape[-1] ** -0.5, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 7, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(9, 3, 64, 64), (4, 1, 40, 40), (2, 2, 18, 18), (37, 1, 24, 24), (6, 2, 72, 20), (4, 1, 192, 128)],
)
def test_attention(
    ops: CpuOps, dtype: torch.dtype, window: int, heads: int, kv_heads: int, head_dim: int, value_dim: int
) -> None:
    q, k, v, tables = attention_case(dtype, heads, kv_heads, head_dim, 700, value_dim)
    spans = [(0, 37), (690, 700), (128, 129)]
    batch = make_batch(spans, tables)
    rows = torch.cat([q[s, a:b] for s, (a, b) in enumerate(spans)])
    got, expected = attend(ops, rows, k, v, batch, window), attend(TorchOps(), rows, k, v, batch, window)
    # Weights sum to 1 over values of size 1; scores of a few units carry their own sums' error into the exponent.
    assert_near(got, expected, 700 + 4 * head_dim, size=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 300.0])  # so large ones take all, on one side or the other
@pytest.mark.parametrize("window", [0, 7, 600])
def test_sinks(ops: CpuOps, dtype: torch.dtype, window: int, size: float) -> None:
    heads, head_dim, spans = 6, 24, [(0, 37), (690, 700), (128, 129)]
    q, k, v, tables = attention_case(dtype, heads, 2, head_dim, 700)
    batch, sinks = make_batch(spans, tables), size * torch.randn(heads)
    rows = torch.cat([q[s, a:b] for s, (a, b) in enumerate(spans)])
    how = batch, head_dim**-0.5, window
    got, expected = (each.attention(rows, k, v, *how, sinks) for each in (ops, TorchOps()))
    assert_near(got, expected, 700 + 4 * head_dim, size=4.0)
    without = ops.attention(rows, k, v, *how)
    assert not torch.equal(got, without)
    nothing = torch.full((heads,), -1e30)  # a sink that nobody sees
    assert_near(ops.attention(rows, k, v, *how, nothing), without, 1, size=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_turn_by_the_row_of_the_tables_that_is_theirs(ops: CpuOps, dtype: torch.dtype) -> None:
    """Where they lie and what they see is by their positions."""
    torch.manual_seed(0)
    tables, pages = random_tables(2, 50)
    batch, angles = make_batch([(0, 21), (49, 50)], tables), torch.rand(80, 6) * 6.3
    turns, qkv = torch.randperm(80)[:22], torch.randn(22, 8 * 24).to(dtype)
    where = torch.zeros(50, 6)
    where[batch.positions] = angles[turns]
    results = []
    for each, rope, rows in (
        (ops, angles, replace(batch, turns=turns)),
        (TorchOps(), angles, replace(batch, turns=turns)),
        (ops, where, batch),
    ):
        k, v = torch.zeros(2, pages, PAGE, 2, 24, dtype=dtype).unbind()
        q = each.rope_store(qkv, RopeTables(rope.cos(), rope.sin()), rows, k, v, 4)
        results.append((q, k, v, each.attention(q, k, v, rows, 0.2)))
    for first, second, third in zip(*results, strict=True):
        assert_near(first, second, 50, size=4.0)
        assert torch.equal(first, third)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_values_too(ops: CpuOps, dtype: torch.dtype) -> None:
    """Latent attention's cache: one tensor is k_pages and v_pages, nothing else is stored or read."""
    torch.manual_seed(0)
    heads, head_dim, rotary, spans = 33, 52, 12, [(0, 37), (48, 49)]
    tables, pages = random_tables(2, 50)
    angles = torch.rand(50, rotary // 2) * 6.3
    rope, batch = RopeTables(angles.cos(), angles.sin()), make_batch(spans, tables)
    qk, results = torch.randn(38, (heads + 1) * head_dim).to(dtype), []
    old = torch.randn(pages, PAGE, 1, head_dim).to(dtype)
    for each in (ops, TorchOps()):
        kv = old.clone()
        q = each.rope_store(qk, rope, batch, kv, kv, heads)
        results.append((q, kv, each.attention(q, kv, kv, batch, head_dim**-0.5)))
    (q, kv, got), (expected_q, expected_kv, expected) = results
    assert torch.equal(q, expected_q) and torch.equal(kv, expected_kv)
    assert_near(got, expected, 50 + 4 * head_dim, size=4.0)
    apart = ops.attention(q, kv, kv.clone(), batch, head_dim**-0.5)
    assert torch.equal(got, apart)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_columns(ops: CpuOps, dtype: torch.dtype, tokens: int) -> None:
    """Whole runs, every second column, and columns that nothing is copied to."""
    runs = [
        ColumnRun(3, 10, 64),
        ColumnRun(70, 0, 5, step=2),
        ColumnRun(71, 5, 5, step=2),
        ColumnRun(0, 80, 1),
    ]
    x, out = torch.randn(tokens, 90).to(dtype), torch.randn(tokens, 100).to(dtype)
    expected = out.clone()
    TorchOps().columns(runs)(x, expected)
    ops.columns(runs)(x, out)
    assert torch.equal(out, expected)
    assert torch.equal(out[:, 10:74], x[:, 3:67]) and torch.equal(out[:, 5:10], x[:, 71:81:2])


def test_columns_that_are_not_there_are_refused(ops: CpuOps) -> None:
    copy = ops.columns([ColumnRun(0, 4, 3, step=2)])
    for x, out in ((torch.zeros(2, 4), torch.zeros(2, 7)), (torch.zeros(2, 5), torch.zeros(2, 6))):
        with pytest.raises(KernelError, match="fewer columns than are copied"):
            copy(x, out)
    with pytest.raises(KernelError, match="float32|bfloat16|dtype|type"):
        copy(torch.zeros(2, 5), torch.zeros(2, 7, dtype=torch.bfloat16))
    for run in (ColumnRun(-1, 0, 1), ColumnRun(0, -1, 1), ColumnRun(0, 0, 0), ColumnRun(0, 0, 1, step=0)):
        with pytest.raises(KernelError, match="a run needs"):
            ops.columns([run])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rows", "depth"), [(5, 64, 18), (3, 22, 42), (1, 7, 130)])
@pytest.mark.parametrize("tokens", [1, 3, 300])
def test_per_head(ops: CpuOps, dtype: torch.dtype, heads: int, rows: int, depth: int, tokens: int) -> None:
    torch.manual_seed(0)
    weights, x = torch.randn(heads, rows, depth).to(dtype), torch.randn(tokens, heads, depth).to(dtype)
    fmt = "f32" if dtype is torch.float32 else "bf16"
    got = ops.per_head(weights, fmt)(x)
    assert_near(got, TorchOps().per_head(weights, fmt)(x), depth, size=4 * depth**0.5)
    for h in range(heads):  # the bits of each head's own matrix
        assert torch.equal(got[:, h], ops.linear(weights[h], None, fmt)(x[:, h].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 130])
def test_attention_rows_do_not_depend_on_batch_or_chunks(
    ops: CpuOps, dtype: torch.dtype, window: int
) -> None:
    tokens = 1100  # three splits of 512
    q, k, v, tables = attention_case(dtype, 6, 2, 32, tokens)
    whole = attend(ops, q[0], k, v, make_batch([(0, tokens)], tables[:1]), window)
    for start, end in [(0, 1), (0, 515), (515, 1023), (1023, 1024), (1099, 1100)]:
        alone = attend(ops, q[0, start:end], k, v, make_batch([(start, end)], tables[:1]), window)
        assert torch.equal(alone, whole[start:end])
        mixed = make_batch([(3, 60), (start, end), (900, 901)], tables[[1, 0, 2]])
        rows = torch.cat([q[1, 3:60], q[0, start:end], q[2, 900:901]])
        assert torch.equal(attend(ops, rows, k, v, mixed, window)[57 : 57 + end - start], whole[start:end])


def test_attention_ignores_what_is_beyond_the_sequence(ops: CpuOps) -> None:
    q, k, v, tables = attention_case(torch.float32, 2, 1, 16, 64)
    batch = make_batch([(0, 20)], tables[:1])
    expected = attend(ops, q[0, :20], k, v, batch, 0)
    used = tables[0, 20 // PAGE]
    k[used, 20 % PAGE :] = float("nan")
    v[used, 20 % PAGE :] = float("nan")
    assert torch.equal(attend(ops, q[0, :20], k, v, batch, 0), expected)


ROUTERS = [
    Router(num_experts=32, top_k=8, score="sigmoid", scale=1.5, epsilon=1e-20),
    Router(num_experts=60, top_k=4, normalize=False),
    Router(num_experts=64, top_k=6, score="sigmoid", num_groups=8, top_groups=3, scale=2.5),
    Router(num_experts=64, top_k=6, num_groups=4, top_groups=2, group_score="max"),
    Router(num_experts=3, top_k=3),
    Router(num_experts=40, top_k=4, least_sum=0.3),
]


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.score}-{r.num_experts}-{r.num_groups}")
@pytest.mark.parametrize("biased", [False, True])
def test_route(ops: CpuOps, router: Router, biased: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, router.num_experts)
    bias = torch.rand(router.num_experts) if biased else None
    got, expected = ops.bound(router)(logits, bias), TorchOps().bound(router)(logits, bias)
    assert torch.equal(got.ids, expected.ids)
    with_shared, its_reference = ops.bound(router)(logits, bias, 2), TorchOps().bound(router)(logits, bias, 2)
    assert torch.equal(with_shared.ids, its_reference.ids)
    assert torch.equal(with_shared.weights[:, -2:], torch.ones(200, 2))
    assert torch.equal(with_shared.weights[:, :-2], got.weights)
    torch.testing.assert_close(got.weights, expected.weights, rtol=(router.num_experts + 8) * F32_ULP, atol=0)
    single = ops.bound(router)(logits[7:8], bias)
    assert torch.equal(single.ids[0], got.ids[7]) and torch.equal(single.weights[0], got.weights[7])


def test_equal_scores_choose_the_lowest_experts(ops: CpuOps) -> None:
    router = Router(num_experts=32, top_k=5)
    assert ops.bound(router)(torch.zeros(1, 32)).ids.tolist() == [[0, 1, 2, 3, 4]]
    grouped = replace(router, num_groups=8, top_groups=2)
    assert ops.bound(grouped)(torch.zeros(1, 32)).ids.tolist() == [[0, 1, 2, 3, 4]]
    assert sorted(ops.bound(router)(torch.full((1, 32), torch.nan)).ids[0].tolist()) == [0, 1, 2, 3, 4]


def test_a_long_context_on_many_workers_keeps_few_partial_results() -> None:
    """97 MiB of partial results go in two waves of at most 64 MiB, and the bits are those of one worker."""
    torch.manual_seed(0)
    tokens, rows, tier = 12288, 512, _core.supported_tiers()[-1]
    tables, pages = random_tables(1, tokens)
    batch = make_batch([(tokens - rows, tokens)], tables)
    q, (k, v) = torch.randn(rows, 16, 128), torch.randn(2, pages, PAGE, 1, 128).unbind()
    alone = attend(CpuOps(_core.WorkerPool([-1]), tier), q, k, v, batch, 0)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: proc_pid_clear_refs(5)
    together = attend(CpuOps(_core.WorkerPool([-1] * 12), tier), q, k, v, batch, 0)
    assert resident_bytes("VmHWM") - before < 80 << 20
    assert torch.equal(alone, together)


def resident_bytes(field: str) -> int:
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(field)]
    return int(line.split()[1]) << 10


def test_bad_input_is_an_error_that_names_it(ops: CpuOps) -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(KernelError, match="x is float16; expected bfloat16 or float32"):
        ops.rms_norm(x.half(), weight, 1e-5)
    with pytest.raises(KernelError, match="x is not contiguous"):
        ops.rms_norm(torch.randn(8, 2).T, weight, 1e-5)
    with pytest.raises(KernelError, match=r"weight has shape \[7\]; expected \[8\]"):
        ops.rms_norm(x, weight[:7], 1e-5)
    with pytest.raises(KernelError, match=r"residual has shape \[1, 8\]; expected \[2, 8\]"):
        ops.add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(KernelError, match="top_k must be between 1 and the number of experts"):
        ops.bound(Router(num_experts=8, top_k=9))(x)
    with pytest.raises(KernelError, match=r"logits has shape \[2, 8\]; expected \[any, 9\]"):
        ops.bound(Router(num_experts=9, top_k=2))(x)
    q, k, v, tables = attention_case(torch.float32, 2, 1, 16, 64)
    for change, message in [
        ({"block_tables": tables[:1] + 1000}, "a page outside"),
        ({"cache_slots": torch.full((20,), -1)}, "a cache slot lies outside"),
        ({"seq_lens": torch.tensor([5]).int()}, "more new rows than tokens"),
        ({"seq_lens": torch.tensor([500]).int()}, "shorter than its sequence"),
        ({"query_starts": torch.tensor([0, 19]).int()}, "from 0 to T"),
        ({"positions": torch.arange(20).int()}, "positions is int32; expected int64"),
        ({"block_tables": tables[0]}, r"block_tables has shape .*; expected \[any, any\]"),
    ]:
        with pytest.raises(KernelError, match=message):
            attend(ops, q[0, :20], k, v, replace(make_batch([(0, 20)], tables[:1]), **change), 0)
    with pytest.raises(KernelError, match="k_pages: expected bfloat16|k_pages"):
        attend(ops, q[0, :20].bfloat16(), k, v, make_batch([(0, 20)], tables[:1]), 0)
    with pytest.raises(KernelError, match="this CPU cannot run tier 'sse9'"):
        CpuOps(ops.pool, "sse9")


@pytest.mark.parametrize("rows", [1, 256, 257, 600])
def test_a_dense_mlp_is_an_expert_that_every_row_chooses(ops: CpuOps, rows: int) -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(32, 48), torch.randn(32, 48), torch.randn(48, 32)
    mlp, experts, x = ops.mlp(48, 32), ops.experts(1, 48, 32), torch.randn(rows, 48).bfloat16()
    mlp.load(gate, up, down)
    experts.load(0, gate, up, down)
    everyone = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
    assert torch.equal(mlp(x), experts.forward(x, *everyone))
    theirs = TorchOps().mlp(48, 32)
    theirs.load(gate, up, down)
    expected = theirs(x).float()
    assert (mlp(x).float() - expected).norm() < 4 * BF16_ULP * expected.norm()
    assert [read.experts for read in mlp.reads()] == [1]
