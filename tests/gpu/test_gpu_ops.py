"""`GpuOps` against `TorchOps` (on a GPU, or interpreted).

Tolerances: float32 sums of n terms in another order differ by about n * 2^-24 of their size; a bfloat16 result may
round to the neighbour, 2^-7 of its size at most. Attention rounds its weights to bfloat16 (2^-8 of each term).
"""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_triton
from kernel_cases import CODEBOOKS, F32_UNIT, GGUF_BLOCKS, gguf_codes
from paged_batches import Batch, make_batch, random_tables
from tandem import _core
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import best_of
from tandem.engine.sampling.masks import new_mask
from tandem.errors import KernelError
from tandem.formats.codes import WeightCodes, join_nibbles
from tandem.formats.reference import decoded, magnitudes, quantise, stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertCounts, HeadNorms, Ops, RopeTables, Routing
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.router.scores import SCORES, Score
from tandem.mechanisms.router.shape import Router

if AVAILABLE:
    from tandem.kernels.gpu import attention_decode, best, expert_rows, experts
    from tandem.kernels.gpu import mlp as mlp_module
    from tandem.kernels.gpu import rope as rotation
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.kernels.which import FEW_TOKENS

pytestmark = [pytest.mark.gpu, needs_triton]
PAGE = 16
BF16_ULP = 2.0**-7


@pytest.fixture(scope="module")
def ops() -> Ops:
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def there(batch: Batch) -> Batch:
    each = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(
        batch, **{name: part.to(DEVICE) for name, part in each.items() if isinstance(part, torch.Tensor)}
    )


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def near(got: Tensor, expected: Tensor, rtol: float = BF16_ULP, atol: float = 0.0) -> None:
    torch.testing.assert_close(got.cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (1032, torch.float32)])
def test_rows_of_a_table_in_cpu_memory_are_those_of_one_on_the_gpu(ops: Ops, width: int, dtype: torch.dtype) -> None:
    """More rows than are found at a time, and rows that no block of words divides; no row at all is none."""
    table = torch.randn(4099, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    there, beside = (ops.lookup(lambda ids: table[ids], len(table), in_ram) for in_ram in (False, True))
    ids = torch.tensor([0, 4098, 7, 7, 4095, 4096], device=DEVICE)
    for wanted in (ids, ids[:1], ids[:0]):
        assert torch.equal(beside(wanted), there(wanted)) and beside(wanted).device.type == DEVICE.type
    assert torch.equal(beside(ids).cpu(), table[ids.cpu()].bfloat16())


@pytest.mark.parametrize(("rows", "vocab"), [(1, 9000), (5, 4096), (3, 7)])
def test_the_best_logit_of_every_row_is_found(rows: int, vocab: int) -> None:
    """The first of equal ones, infinite and all equal ones too; NaN says so."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).mul(4).round() / 4
    logits[0, [vocab // 2, vocab - 1]] = 100.0
    if rows > 1:
        logits[1], logits[2] = float("-inf"), float("-inf")
        logits[2, 3] = float("inf")
    got = best.best_of(logits.to(DEVICE)).cpu()
    assert got[:, 0].tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert torch.equal(got[:, 1], logits.amax(1).double())
    logits[:, vocab - 2] = float("nan")
    assert best.best_of(logits.to(DEVICE))[:, 1].isnan().all()


@pytest.mark.parametrize(("rows", "vocab"), [(1, 9000), (5, 4096), (3, 151936)])
def test_the_best_logit_among_those_that_a_mask_allows(rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator)
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32, generator=generator)
    place = logits.to(DEVICE)  # the GPU is in use: masks lie where it reads them
    masks = [new_mask(bits.shape[1]) if row % 2 else None for row in range(rows)]  # every other row is free
    for row, mask in enumerate(masks):
        if mask is not None:
            mask[:] = (bits[row] & bits[row].roll(1)).numpy()
    here, there = GraphMasks(rows, torch.device("cpu")), GraphMasks(rows, torch.device(DEVICE))
    here.send(masks)
    there.send(masks)
    there.make(lambda: None)
    assert torch.equal(best.best_of(place, there.device_addresses).cpu(), best_of(logits, here))
    there.send(none := [new_mask(bits.shape[1]) for _ in range(rows)])
    there.make(lambda: None)
    assert best.best_of(place, there.device_addresses)[:, 1].isneginf().all()
    for row, mask in enumerate(none):  # an answer goes on: the same memory, another token
        mask[0] = 1 << row
    assert best.best_of(place, there.device_addresses)[:, 0].tolist() == list(range(rows))


@pytest.mark.parametrize("rows", [1, 16])
def test_the_best_logit_waits_for_masks_that_are_made_meanwhile(rows: int) -> None:
    logits, words = (
        torch.randn(rows, 9000, generator=torch.Generator().manual_seed(2)).to(DEVICE),
        -(-9000 // 32),
    )
    masks, there = [new_mask(words) for _ in range(rows)], GraphMasks(rows, torch.device(DEVICE))
    best.best_of(logits, there.device_addresses)  # compiles, and waits for nobody
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    for step in range(3):  # the same masks in the same memory
        there.send(masks)
        found = best.best_of(logits, there.device_addresses)
        ended.record()
        time.sleep(0.02)
        assert not ended.query()

        def make(step: int = step) -> None:
            for row, mask in enumerate(masks):
                mask[:] = 0
                mask[row + step] = 1 << 5

        there.make(make)
        assert found[:, 0].tolist() == [32 * (row + step) + 5 for row in range(rows)]


def test_the_best_logit_of_free_rows_waits_for_nobody() -> None:
    logits, there = torch.randn(3, 9000).to(DEVICE), GraphMasks(3, torch.device(DEVICE))
    there.send([None, new_mask(-(-9000 // 32)), None])
    there.make(lambda: None)
    there.send([None, None, None])
    assert best.best_of(logits, there.device_addresses)[:, 0].tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("shape", [(1, 2048), (3, 100)])
def test_norm_adds_the_residual_and_normalises(ops: Ops, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, residual, weight = bf16(*shape), bf16(*shape), bf16(shape[1])
    kept = residual.clone().to(DEVICE)
    ulps = 4 if INTERPRETED else 2  # it cuts bits off, which loses up to twice as much as rounding, twice
    near(
        ops.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6),
        TorchOps().rms_norm(x, weight, 1e-6),
        ulps * BF16_ULP,
    )
    got = ops.add_rms_norm(x.to(DEVICE), kept, weight.to(DEVICE), 1e-6)
    near(got, TorchOps().add_rms_norm(x, residual, weight, 1e-6), ulps * BF16_ULP)
    near(kept, residual, BF16_ULP if INTERPRETED else 0.0)


@pytest.mark.parametrize("norm", ["none", "head", "all", "gates"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "value"),
    [(8, 2, 64, 64, 64), (6, 3, 24, 12, 24), (4, 2, 40, 12, 22)],
)
def test_rope_store(
    ops: Ops, norm: str, heads: int, kv_heads: int, dim: int, rotary: int, value: int
) -> None:
    """gates: beside each query head, and norms of heads; they are not beside narrower values."""
    if norm == "gates" and value != dim:
        norm = "head"
    torch.manual_seed(0)
    tables, pages = random_tables(2, 50)
    batch = make_batch([(0, 5), (49, 50)], tables)
    angles = torch.rand(50, rotary // 2) * 6.3
    qkv = bf16(6, ((1 + (norm == "gates")) * heads + kv_heads) * dim + kv_heads * value)
    sizes = {"none": None, "head": (dim, dim), "gates": (dim, dim), "all": (heads * dim, kv_heads * dim)}[
        norm
    ]
    norms = (None, None) if sizes is None else tuple(1 + 0.1 * bf16(n) for n in sizes)
    results = []
    for each, device in ((ops, DEVICE), (TorchOps(), torch.device("cpu"))):
        k_pages, v_pages = (
            torch.zeros(pages, PAGE, kv_heads, n, dtype=torch.bfloat16, device=device) for n in (dim, value)
        )
        q = each.rope_store(
            qkv.to(device), RopeTables(angles.cos().to(device), angles.sin().to(device)),
            there(batch) if each is ops else batch, k_pages, v_pages, heads,
            HeadNorms(*(None if w is None else w.to(device) for w in norms)),
        )  # fmt: skip
        results.append((q, k_pages, v_pages))
    for got, expected in zip(*results, strict=True):
        near(got, expected, 4 * BF16_ULP, 4 * BF16_ULP)  # both norms' roundings, then two products


@pytest.mark.parametrize("norm", ["none", "head", "gates"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value"), [(32, 4, 128, 128), (8, 2, 64, 64), (6, 3, 24, 24), (12, 9, 40, 22)]
)
def test_rows_have_the_same_bits_among_many(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, norm: str, heads: int, kv_heads: int, dim: int, value: int
) -> None:
    """Which then have eight heads a program."""
    gates = norm == "gates" and value == dim
    torch.manual_seed(0)
    tables, pages = random_tables(2, 50)
    batch, angles = there(make_batch([(0, 5), (49, 50)], tables)), torch.rand(50, dim // 4) * 6.3
    rope = RopeTables(angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    qkv = bf16(6, ((1 + gates) * heads + kv_heads) * dim + kv_heads * value).to(DEVICE)
    norms = HeadNorms(*[] if norm == "none" else [(1 + 0.1 * bf16(dim)).to(DEVICE) for _ in "qk"])
    results = []
    for many in (1, 1 << 30):
        monkeypatch.setattr(rotation, "MANY_ROWS", many)
        kept = [torch.zeros(pages, PAGE, kv_heads, n, dtype=torch.bfloat16, device=DEVICE) for n in (dim, value)]
        q = ops.rope_store(qkv, rope, batch, *kept, heads, norms)
        results.append([q, *kept])
    assert all(map(torch.equal, *results))


def test_rows_turn_by_the_row_of_the_tables_that_is_theirs(ops: Ops) -> None:
    """Where they lie is by their positions."""
    torch.manual_seed(0)
    tables, pages = random_tables(2, 50)
    batch, angles = make_batch([(0, 5), (49, 50)], tables), torch.rand(80, 6) * 6.3
    turns, qkv = torch.randperm(80)[:6], bf16(6, 8 * 24)
    where = torch.zeros(50, 6)
    where[batch.positions] = angles[turns]
    results = []
    for rope, rows in ((angles, replace(batch, turns=turns)), (where, batch)):
        k, v = torch.zeros(2, pages, PAGE, 2, 24, dtype=torch.bfloat16).to(DEVICE).unbind()
        tables_ = RopeTables(rope.cos().to(DEVICE), rope.sin().to(DEVICE))
        results.append((ops.rope_store(qkv.to(DEVICE), tables_, there(rows), k, v, 4), k, v))
    assert all(map(torch.equal, *results))
    rows, (k, v) = replace(batch, turns=turns), torch.zeros(2, pages, PAGE, 2, 24, dtype=torch.bfloat16).unbind()
    expected = TorchOps().rope_store(qkv, RopeTables(angles.cos(), angles.sin()), rows, k, v, 4)
    for got, wanted in zip(results[0], (expected, k, v), strict=True):
        near(got, wanted, 4 * BF16_ULP, 4 * BF16_ULP)


def test_copies_that_lie_nowhere_write_no_keys_and_values(ops: Ops) -> None:
    torch.manual_seed(0)
    tables, pages = random_tables(1, 40)
    batch, angles = there(make_batch([(3, 9)], tables)), torch.rand(50, 8).to(DEVICE)
    k, v = torch.full((2, pages, PAGE, 2, 16), 7.0, dtype=torch.bfloat16).to(DEVICE).unbind()
    qkv = bf16(6, 12 * 16).to(DEVICE)

    def written(slots: Tensor) -> list[Tensor]:
        into = [k.clone(), v.clone()]
        rope = RopeTables(angles.cos(), angles.sin())
        ops.rope_store(qkv, rope, replace(batch, cache_slots=slots), *into, 8)
        return into

    four_of_six = torch.where(torch.arange(6) < 4, batch.cache_slots.cpu(), -1).to(DEVICE)
    whole, some = written(batch.cache_slots), written(four_of_six)
    for all_, four, before in zip(whole, some, (k, v), strict=True):
        expected = all_.clone().flatten(0, 1)
        expected[batch.cache_slots[4:]] = before.flatten(0, 1)[0]
        assert torch.equal(four.flatten(0, 1), expected) and not torch.equal(four, all_)


def test_a_norm_over_all_heads_does_not_pass_over_gates(ops: Ops) -> None:
    tables, pages = random_tables(1, 5)
    k, v = torch.zeros(2, pages, PAGE, 2, 24, dtype=torch.bfloat16).to(DEVICE).unbind()
    angles, norms = torch.rand(5, 6).to(DEVICE), (bf16(96).to(DEVICE), bf16(48).to(DEVICE))
    with pytest.raises(KernelError, match="cannot pass over gates"):
        ops.rope_store(
            bf16(5, 12 * 24).to(DEVICE), RopeTables(angles, angles), there(make_batch([(0, 5)], tables)), k, v, 4,
            HeadNorms(*norms),
        )  # fmt: skip


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize(("heads", "width", "each"), [
    (-1, 72, 0), (-1, 3000, 0), (0, 72, 0), (0, 3000, 0), (3, 72, 24), (16, 4096, 256), (3, 72, 1), (16, 4096, 1),
])  # fmt: skip
def test_gated(ops: Ops, heads: int, width: int, each: int, added: bool) -> None:
    """By none, by one gate a row, by one of each head, and by gates that lie between other columns; rounded where plain
    torch rounds."""
    torch.manual_seed(0)
    x, out, wide = bf16(5, width), bf16(5, width), bf16(5, 2 * width + 7)
    results = []
    for own, device in ((ops, DEVICE), (TorchOps(), torch.device("cpu"))):
        moved, to = wide.to(device), out.clone().to(device) if added else None
        gate = moved[:, :1] if heads == 0 else None
        if heads > 0:
            gate = moved[:, : 2 * heads * each].unflatten(1, (heads, 2, each))[:, :, 1]
        results.append(own.gated(x.to(device), gate, to))
    near(*results, 2 * BF16_ULP, 2 * BF16_ULP)  # the sigmoid and the product may round to the other side


SPANS = [
    ([(299, 300), (0, 1), (70, 71)], 0),
    ([(0, 37), (290, 300), (128, 129)], 0),
    ([(299, 300), (70, 71), (0, 37), (290, 300), (5, 6)], 0),
    ([(299, 300), (70, 71), (0, 37), (290, 300), (5, 6)], 2),
]


@pytest.mark.parametrize("sink", [0.0, 1.0, 100.0])  # the size of a head's; 0: there are none
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value"), [(8, 1, 64, 64), (6, 2, 24, 24), (6, 2, 40, 22), (4, 2, 192, 128)]
)
@pytest.mark.parametrize(("spans", "single"), SPANS)
def test_attention(
    ops: Ops,
    window: int,
    heads: int,
    kv_heads: int,
    dim: int,
    value: int,
    spans: list[tuple[int, int]],
    single: int,
    sink: float,
) -> None:
    torch.manual_seed(0)
    sinks = sink * torch.randn(heads) if sink else None
    tables, pages = random_tables(len(spans), 300)
    # Triton's interpreter multiplies the bits of bfloat16, as if they were integers
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    k, v = (torch.randn(pages, PAGE, kv_heads, channels).to(dtype) for channels in (dim, value))
    batch = replace(make_batch(spans, tables), single_rows=single)
    q = torch.randn(len(batch.positions), heads, dim).to(dtype)
    how = dim**-0.5, window
    expected = TorchOps().attention(q, k, v, batch, *how, sinks)
    moved = None if sinks is None else sinks.to(DEVICE)
    got = ops.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), there(batch), *how, moved)
    if INTERPRETED:  # at most 300 terms of size 1
        near(got, expected, 2.0**-15, 2.0**-15)
    else:
        near(got, expected, 2 * BF16_ULP, BF16_ULP)  # weights sum to 1 over values of size 1


def test_a_decoding_row_is_the_same_in_every_batch(ops: Ops) -> None:
    torch.manual_seed(0)
    tables, pages = random_tables(4, 300)
    k, v = (t.to(DEVICE) for t in bf16(2, pages, PAGE, 2, 64).unbind())
    spans = [(299, 300), (10, 11), (70, 71), (3, 40)]
    q = bf16(3 + 37, 8, 64).to(DEVICE)
    decoding = there(make_batch(spans[:3], tables[:3]))
    together = ops.attention(q[:3].contiguous(), k, v, decoding, 0.125)
    beside_a_prompt = replace(there(make_batch(spans, tables)), single_rows=3)
    assert torch.equal(ops.attention(q, k, v, beside_a_prompt, 0.125)[:3], together)
    many = (
        attention_decode.MANY_HEADS // 6 + 1
    )  # x 3 rows x 2 key heads: one block of keys on its way instead of two
    repeated = tables[:3].repeat(many, 1)
    crowd = ops.attention(
        q[:3].repeat(many, 1, 1), k, v, there(make_batch(spans[:3] * many, repeated)), 0.125
    )
    assert torch.equal(crowd[-3:], together)
    for s, span in enumerate(spans[:3]):
        alone = ops.attention(
            q[s : s + 1].contiguous(), k, v, there(make_batch([span], tables[s : s + 1])), 0.125
        )
        assert torch.equal(alone[0], together[s])


@pytest.mark.parametrize("window", [0, 1500])
def test_a_long_row_takes_several_turns(ops: Ops, window: int) -> None:
    """More blocks of keys than programs."""
    torch.manual_seed(0)
    length = attention_decode.PARTS * attention_decode.STEP + 300
    tables, pages = random_tables(1, length)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    k, v = torch.randn(2, pages, PAGE, 1, 16).to(dtype).unbind()
    q, batch = torch.randn(1, 4, 16).to(dtype), make_batch([(length - 1, length)], tables)
    got = ops.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), there(batch), 0.25, window)
    expected = TorchOps().attention(q.double(), k.double(), v.double(), batch, 0.25, window)
    ulp = 2.0**-14 if INTERPRETED else BF16_ULP  # sums of some 2000 terms of size 1
    near(got.cpu().double(), expected, 2 * ulp, ulp)


@pytest.mark.parametrize("spans", [[(69, 70), (30, 31)], [(0, 70), (20, 31)]])
def test_what_others_left_in_a_page_does_not_matter(ops: Ops, spans: list[tuple[int, int]]) -> None:
    """NaN in rows of pages that no sequence has reached, as a request that failed may leave."""
    torch.manual_seed(0)
    tables, pages = random_tables(2, 80)
    k, v = torch.full((2, pages, PAGE, 1, 16), torch.nan).unbind()
    for table, (_, end) in zip(tables.long(), spans, strict=True):
        at = torch.arange(end)
        for pool in (k, v):
            pool[table[at // PAGE], at % PAGE] = torch.randn(end, 1, 16)
    batch = make_batch(spans, tables)
    q = torch.randn(len(batch.positions), 4, 16)
    got = ops.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), there(batch), 0.25)
    finite = (t.nan_to_num() for t in (k, v))
    near(got, TorchOps().attention(q, *finite, batch, 0.25), 2.0**-15, 2.0**-15)


@pytest.mark.skipif(INTERPRETED, reason="NumPy's products may differ by the number of rows")
@pytest.mark.parametrize("window", [0, 100])
def test_a_prompts_rows_are_the_same_wherever_it_is_cut(ops: Ops, window: int) -> None:
    torch.manual_seed(0)
    tables, pages = random_tables(1, 400)
    k, v = (t.to(DEVICE) for t in bf16(2, pages, PAGE, 2, 128).unbind())
    q = bf16(400, 16, 128).to(DEVICE)
    whole = ops.attention(q, k, v, there(make_batch([(0, 400)], tables)), 0.1, window)
    for begin, end in [(0, 37), (37, 300), (300, 400)]:
        chunk = there(make_batch([(begin, end)], tables))
        assert torch.equal(ops.attention(q[begin:end], k, v, chunk, 0.1, window), whole[begin:end])


def test_more_sequences_than_a_tile_looks_through_at_a_time(ops: Ops) -> None:
    """130 prompts of 1 to 3 tokens, after 2 decoding rows: each tile finds its own."""
    torch.manual_seed(0)
    spans = [(40, 41), (9, 10)] + [(0, 1 + s % 3) for s in range(130)]
    tables, pages = random_tables(len(spans), 41)
    k, v = torch.randn(2, pages, PAGE, 1, 16).unbind()
    batch = replace(make_batch(spans, tables), single_rows=2)
    q = torch.randn(len(batch.positions), 16, 16)
    got = ops.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), there(batch), 0.25)
    near(got, TorchOps().attention(q, k, v, batch, 0.25), 2.0**-15, 2.0**-15)


@pytest.mark.parametrize("router", [
    Router(128, 8), Router(12, 3, normalize=False, scale=1.7), Router(64, 6, has_bias=True, least_sum=0.4),
    Router(60, 4, score="sigmoid", epsilon=1e-20, has_bias=True),
    Router(16, 3, score="sigmoid", num_groups=4, top_groups=2, has_bias=True),
    Router(256, 8, score="sigmoid", num_groups=8, top_groups=4, has_bias=True, scale=2.5, epsilon=1e-20),
    Router(160, 6, normalize=False, scale=16.0, num_groups=8, top_groups=3, group_score="max"),
    Router(21, 5, num_groups=3, top_groups=2), Router(384, 8, score="sigmoid", has_bias=True),
    Router(512, 22, score="sigmoid", has_bias=True), Router(1024, 10),
    Router(256, 6, score="sqrt_softplus", has_bias=True, scale=1.5, epsilon=1e-20),
    Router(21, 5, score="sqrt_softplus"),
])  # fmt: skip
@pytest.mark.parametrize("shared", [0, 2])
def test_route(ops: Ops, router: Router, shared: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, router.num_experts)
    logits[0, 3:6] = 9.0  # ties: the lowest ids first
    bias = torch.rand(router.num_experts) if router.has_bias else None
    slot_of = torch.randperm(router.num_experts + shared).int() - 3
    expected = TorchOps().bound(router)(logits, bias, shared, slot_of=slot_of)
    beside = torch.cat((logits, torch.full((9, 1), 99.0)), 1).to(DEVICE)  # a column that is not the router's
    got = ops.bound(router)(
        beside[:, :-1], None if bias is None else bias.to(DEVICE), shared, slot_of=slot_of.to(DEVICE)
    )
    assert torch.equal(got.ids.cpu(), expected.ids)
    assert got.slots is not None and torch.equal(got.slots.cpu(), slot_of[expected.ids])
    near(got.weights, expected.weights, 1e-5)
    rounded = logits.bfloat16()
    assert torch.equal(ops.bound(router)(rounded.to(DEVICE)).ids.cpu(), TorchOps().bound(router)(rounded).ids)


@pytest.mark.parametrize("shared", [0, 1])
def test_experts_that_a_table_names(ops: Ops, shared: int) -> None:
    """Logits from far below to far above 0, where softplus is nearly nothing and nearly its argument."""
    torch.manual_seed(0)
    router = Router(21, 5, score="sqrt_softplus", table=True, scale=1.5)
    logits = torch.randn(9, 21) * 12
    named = torch.rand(9, 21).argsort(-1)[:, :5].int()
    expected = TorchOps().bound(router)(logits, shared=shared, chosen=named)
    got = ops.bound(router)(logits.to(DEVICE), shared=shared, chosen=named.to(DEVICE))
    assert torch.equal(got.ids.cpu(), expected.ids)
    near(got.weights, expected.weights, 1e-5)


@pytest.mark.parametrize("shared", [0, 2])
def test_a_score_without_a_kernel_is_torchs(ops: Ops, monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    monkeypatch.setitem(SCORES, "softsign", Score(lambda x: 0.5 + 0.5 * x / (1 + x.abs())))
    router = Router(60, 4, score="softsign", has_bias=True, num_groups=4, top_groups=2, scale=1.5)
    logits, bias = torch.randn(9, 60), torch.rand(60)
    zeros = torch.zeros(60, dtype=torch.int32, device=DEVICE)
    tally = ExpertCounts(zeros, zeros.clone(), rows=torch.tensor([7], dtype=torch.int32, device=DEVICE))
    expected = TorchOps().bound(router)(logits, bias, shared)
    got = ops.bound(router)(logits.to(DEVICE), bias.to(DEVICE), shared, tally)
    assert torch.equal(got.ids.cpu(), expected.ids)
    assert torch.equal(tally.tokens.cpu(), expected.ids[:7, :4].flatten().long().bincount(minlength=60).int())
    near(got.weights, expected.weights, 1e-5)


SHAPES = [(64, 40, 6), (200, 72, 5)]


def expert_case(tokens: int, hidden: int, width: int, experts: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    gate, up = torch.randn(2, experts, width, hidden) / hidden**0.5
    down = torch.randn(experts, hidden, width) / width**0.5
    x = bf16(tokens, hidden)
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)]).int()
    return gate, up, down, x, ids, torch.rand(tokens, 3)


def check_experts(
    ops: Ops, case: tuple[Tensor, ...], matrices, fmt: str, tiles: bool = False, **options: object
) -> None:
    """Against the CPU kernels on the same packed bytes, which are tested against float64. tiles: in the interpreter,
    too, which cuts numbers off where a GPU rounds, and is slow."""
    x, ids, weights = case[3:]
    if INTERPRETED and len(x) > FEW_TOKENS and not tiles:
        pytest.skip("tiles cut off what they should round, in Triton's interpreter")
    count, width, hidden = case[0].shape
    slot_of = torch.tensor([i - 1 for i in range(count)])  # expert 0 lives elsewhere
    ours = ops.gpu_experts(slot_of, hidden, width, fmt, **options)
    theirs = ops.cpu.experts(count, hidden, width, fmt, **options)
    for e in range(count):
        theirs.load(e, *matrices(e))
        if e:
            ours.load(e, *matrices(e))
    ours.prompts = None  # so that tiles take many rows; `test_gpu_prompts.py` has unpacked experts
    got = ours.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    expected = theirs.forward(x.float(), torch.where(ids == 0, -1, ids), weights)
    # hidden activations and the sum are rounded to bf16, scaled weights of tiles as well; all of size 1 and below
    near(got.float(), expected, 2 * BF16_ULP, 2.0**-6 * (4 if INTERPRETED and tiles else 1))
    if INTERPRETED and tiles:
        return
    # Triton's interpreter does not round to bfloat16 but cuts off, which loses up to twice as much.
    assert (got.cpu().float() - expected).norm() < 2.0**-8 * expected.norm() * (3.0 if INTERPRETED else 1.5)


@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_read_the_packed_bytes_of_the_cpu(
    ops: Ops, fmt: str, tokens: int, shape: tuple[int, ...]
) -> None:
    case = expert_case(tokens, *shape)
    assert (tokens <= FEW_TOKENS) == (tokens < 150)
    check_experts(ops, case, lambda e: (case[0][e], case[1][e], case[2][e]), fmt)


@pytest.mark.parametrize("more", [False, True])
def test_a_long_step_in_pieces_gives_the_same_bits(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    """Pieces of 64 tokens and one of 22; with what the CPU adds, and without."""
    gate, up, down, x, ids, weights = (t.to(DEVICE) for t in expert_case(150, 64, 40, 6))
    layer = ops.gpu_experts(torch.tensor([i - 1 for i in range(6)]), 64, 40, "bf16")
    for e in range(1, 6):
        layer.load(e, gate[e].cpu(), up[e].cpu(), down[e].cpu())
    layer.prompts = None  # so that tiles take the rows
    sizes: list[int] = []

    def pairs(x: Tensor, routing: Routing) -> Tensor:
        """Stands in for tiles in Triton's interpreter, which takes bfloat16 for integers there."""
        sizes.append(len(x))
        assert routing.slots is not None
        factors = torch.where(routing.slots < 0, torch.nan, routing.weights * (routing.slots + 1))
        return (factors[..., None] * x[:, None].float()).view(-1, 64)

    if INTERPRETED:
        monkeypatch.setattr(layer, "_tiled", pairs)
    routing = Routing(ids, weights, layer.table[ids])
    elsewhere = torch.randn(150, 64, device=DEVICE) if more else None
    kept = None if elsewhere is None else elsewhere.clone()
    whole = layer.partial(x, routing).combined(kept)
    monkeypatch.setattr(experts, "SCRATCH_BYTES", 3 * (64 * 4 + 40 * 2) * 100)
    in_pieces = layer.partial(x, routing)
    assert in_pieces.slots is None and in_pieces.values.shape == x.shape
    got = in_pieces.combined(elsewhere)
    if INTERPRETED:  # Triton's interpreter cuts off where PyTorch rounds to bfloat16
        near(got.float(), whole.float(), BF16_ULP)
        assert sizes == [150, 64, 64, 22]
    else:
        assert torch.equal(got, whole)


@pytest.mark.parametrize("fmt", ["bf16", "int4"])
def test_a_row_that_is_no_number_stays_one(ops: Ops, fmt: str) -> None:
    """And the others are what they are."""
    gate, up, down, x, ids, weights = expert_case(3, 64, 40, 6)
    layer = ops.experts(6, 64, 40, fmt)
    layer.load_all(0, list(zip(gate, up, down, strict=True)))
    x[1, 5] = torch.nan
    got = layer.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_ids_that_no_expert_has_are_skipped(ops: Ops) -> None:
    gate, up, down, x, ids, weights = expert_case(4, 64, 40, 6)
    ours, theirs = (make.experts(6, 64, 40, "bf16") for make in (ops, ops.cpu))
    for layer in (ours, theirs):
        layer.load_all(0, list(zip(gate, up, down, strict=True)))
    ids[0, 0], ids[1, 1], ids[2], ids[3, 2] = -1, 6, -7, 1 << 30
    got = ours.forward(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu()
    near(got.float(), theirs.forward(x.float(), ids, weights), 2 * BF16_ULP, 2.0**-6)
    assert got[2].eq(0).all()


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4", "nvfp4", "int4 f16"])
@pytest.mark.parametrize("tokens", [2, 20])
def test_experts_read_scales_of_every_type(ops: Ops, fmt: str, tokens: int) -> None:
    """float32, e8m0, e4m3 times a factor, float16: as they lie in the checkpoint."""
    case = expert_case(tokens, 256, 128, 4)

    def coded(weight: Tensor) -> WeightCodes:
        if fmt != "int4 f16":
            return stored(weight, fmt)
        codes, scales = quantise(weight, "int4", 32)
        joined = join_nibbles((codes.flatten(1).int() & 15).to(torch.uint8))
        return WeightCodes(joined, scales[..., 0].half(), "int4", 32, weight.shape[1])

    check_experts(ops, case, lambda e: tuple(coded(m[e]) for m in case[:3]), "bf16")


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_read_ggufs_blocks(ops: Ops, kind: str, tokens: int) -> None:
    case = expert_case(tokens, 512, 256, 4)
    case[3].mul_(0.5)  # for results of size 1 and below

    def matrices(expert: int) -> tuple[WeightCodes, ...]:
        return tuple(gguf_codes(kind, *m.shape[1:], seed=3 * expert + i) for i, m in enumerate(case[:3]))

    check_experts(ops, case, matrices, "bf16")


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q5_k", *CODEBOOKS])
def test_tiles_read_each_row_of_a_panel(ops: Ops, kind: str) -> None:
    """Rows of a panel may share bytes: what a tile reads has to know which row it is. Small enough for CI."""
    case = expert_case(FEW_TOKENS + 1, 256, 256, 4)
    case[3].mul_(0.5)

    def matrices(expert: int) -> tuple[WeightCodes, ...]:
        return tuple(gguf_codes(kind, *m.shape[1:], seed=3 * expert + i) for i, m in enumerate(case[:3]))

    check_experts(ops, case, matrices, "bf16", tiles=True)


@pytest.mark.parametrize("kind", [*GGUF_BLOCKS, "int8_zeros"])
def test_few_rows_of_experts_are_float32_sums(ops: Ops, kind: str) -> None:
    """Of down alone, against float64. Each term may be rounded as code, scale and offset, and each sum."""
    hidden, width = 256, 512
    shapes = (width, hidden), (width, hidden), (hidden, width)
    gate, up, down = (int8_zeros(*s) if kind == "int8_zeros" else gguf_codes(kind, *s) for s in shapes)
    layer = ops.gpu_experts(torch.tensor([0]), hidden, width, "bf16")
    layer.load(0, gate, up, down)
    first = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    routing, rows = Routing(first, torch.ones_like(first, dtype=torch.float32), first), bf16(3, width)
    given = layer.pool, layer.gate_up.bytes, layer.down, layer.stride
    got = expert_rows.down(rows.to(DEVICE), *given, routing, None).cpu().double()
    exact = rows.double() @ decoded(down).double().T
    size = rows.double().abs() @ magnitudes(down).double().T
    assert ((got - exact).abs() <= (2 * width + 16) * F32_UNIT * size).all()


def int8_zeros(columns: int, depth: int) -> WeightCodes:
    """Groups of 64 with scales and zero points."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (columns, depth), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(columns, depth // 64, generator=generator) * 1e-3).half()
    zeros = torch.randint(-128, 128, scales.shape, dtype=torch.int8, generator=generator)
    return WeightCodes(codes, scales, "int8", 64, depth, zeros=zeros)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("columns", "depth"), [(7, 40), (128, 2048), (1500, 1100)])
@pytest.mark.parametrize("fmt", ["bf16", "f32"])
@pytest.mark.parametrize("biased", [False, True])
def test_dense_matrix(ops: Ops, rows: int, columns: int, depth: int, fmt: str, biased: bool) -> None:
    """One row has a kernel of its own."""
    torch.manual_seed(0)
    x, weight = bf16(rows, depth), torch.randn(columns, depth) / depth**0.5
    weight = weight.bfloat16() if fmt == "bf16" else weight
    bias = torch.randn(columns).bfloat16() if biased else None
    linear = ops.linear(weight, bias, fmt)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T  # float32 sums of `depth` products, in any order
    got = linear(x.to(DEVICE), torch.float32).cpu()
    assert ((got - expected).abs() <= depth * 2.0**-23 * size + 2.0**-22 * expected.abs()).all()
    rounded = linear(x.to(DEVICE)).cpu().double()
    # rounded once, and cuBLAS may round parts of a sum before it adds them
    assert (rounded - expected).norm() < 2.0**-8 * expected.norm() * (3.0 if INTERPRETED else 1.5)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_dense_matrix_may_be_a_transposed_one(ops: Ops, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = bf16(rows, 40), torch.randn(40, 24).bfloat16().T
    got = ops.linear(weight)(x.to(DEVICE), torch.float32).cpu()
    size = x.double().abs() @ weight.double().abs().T
    assert ((got - x.double() @ weight.double().T).abs() <= 40 * 2.0**-23 * size).all()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(("tokens", "scratch"), [(1, 1 << 29), (5, 1 << 29), (150, 1 << 29), (150, 1)])
def test_dense_mlp(ops: Ops, monkeypatch: pytest.MonkeyPatch, tokens: int, scratch: int, coded: bool) -> None:
    """At once and in pieces of 64 rows, of numbers and of codes."""
    monkeypatch.setattr(mlp_module, "MLP_BYTES", scratch)
    gate, up, down, x, _, _ = expert_case(tokens, 128, 256, 1)
    matrices = [stored(m[0], "fp8") if coded else m[0] for m in (gate, up, down)]
    ours, theirs = ops.mlp(128, 256), ops.cpu.mlp(128, 256)
    for mlp in (ours, theirs):
        mlp.load(*matrices)
    expected = theirs(x.float())
    # as for experts; decoded codes are rounded to bfloat16 as well
    got = ours(x.to(DEVICE)).cpu()
    near(got.float(), expected, 2 * BF16_ULP, 2.0**-6)
    assert (got.float() - expected).norm() < 2.0**-8 * expected.norm() * (3.0 if INTERPRETED else 1.5)
    assert ours.packed is None and [read.weights.in_features for read in ours.reads()] == [128, 256]
