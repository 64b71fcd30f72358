"""Whole models of shared keys, pooled entries and mixed streams, on a GPU or in Triton's interpreter.

On a GPU the reference is the same model in float32 on the CPU, which is compared with Transformers elsewhere, and the
tolerance is the error that bfloat16 has there, half as much again. The interpreter computes in float32, against
Transformers. Where bfloat16 is measured, every expert and entry is chosen: other choices are no errors of arithmetic.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from gpu_sessions import DECODED, PROMPT, ROWS, Session, check_answers, on_the_cpu, rms
from sessions import Session as PlainSession
from sessions import ours, reference, worst
from tandem import LLM, SamplingParams, _core
from tandem.engine.state.slots import SlotPool
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.reference import TorchOps
from tandem.kernels.step_rows import StepRows, step_rows
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression, EntryIndex
from tandem.mechanisms.compressed_attention.torch import CompressedHeads, Projected, plain_attend
from tandem.mechanisms.compressed_attention.weights import CompressedWeights, CompressionWeights
from tandem.models.batch import ForwardBatch
from tandem.spec.rope import Rope

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.mechanisms.compressed_attention.gpu import append as enter
    from tandem.mechanisms.compressed_attention.gpu.attend import EntriesSeen
    from tandem.mechanisms.compressed_attention.gpu.heads import GpuCompressedHeads
    from tandem.mechanisms.compressed_attention.gpu.prompt import attend_rows

pytestmark = [pytest.mark.gpu, needs_triton]
ALL_CHOSEN = "deepseek_v4-every"
ANSWER = 12  # tokens


@pytest.mark.skipif(not INTERPRETED, reason="bfloat16 on a GPU")
@pytest.mark.parametrize("static", [False, True], ids=["prompts", "graphs"])
@pytest.mark.parametrize("variant", ["deepseek_v4", "deepseek_v4-narrow"])
def test_float32_logits_equal_transformers(
    tiny_models, monkeypatch: pytest.MonkeyPatch, variant: str, static: bool
) -> None:
    """Prompts in chunks, several sequences together, decode steps; experts are plain torch's."""
    ops = GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1]), "scalar"))
    for name in ("experts", "mlp"):
        monkeypatch.setattr(ops, name, getattr(TorchOps(), name))
    if static:
        monkeypatch.setattr(StepRows, "static", property(lambda rows: rows.row_per_sequence))
    session = PlainSession(tiny_models[variant], ops=ops)
    assert worst(ours(session), reference(tiny_models[variant])) < 1e-4


def check(path: Path, got: torch.Tensor, first: int = 0) -> None:
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    assert rms(got, exact[:, first:]) < 1.5 * rms(theirs[:, first:], exact[:, first:])


@needs_cuda
@pytest.mark.parametrize("together", [True, False], ids=["batch8", "batch1"])
@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["kernels", "graphs"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_placement_does_not_change_the_logits(tiny_models, share, graphs, together) -> None:
    check(tiny_models[ALL_CHOSEN], Session(tiny_models[ALL_CHOSEN], share, graphs).logits(together))


@needs_cuda
def test_cut_prompts_go_on_from_their_state(tiny_models) -> None:
    """Then they are computed anew, as after preemption, in slots that hold something else."""
    path, everyone = tiny_models[ALL_CHOSEN], list(range(ROWS))
    session = Session(path, 0.5, (1, 8))
    parts = [session.step(everyone, first, count) for first, count in ((0, 3), (3, 9), (12, PROMPT - 12))]
    check(path, torch.cat([*parts, *session.decoded(everyone)], 1))
    again = torch.cat(
        [session.step(everyone, 0, PROMPT + 4), session.step(everyone, PROMPT + 4, DECODED - 4)], 1
    )
    check(path, again)


@needs_cuda
@pytest.mark.parametrize("variant", ["deepseek_v4", ALL_CHOSEN])
def test_a_graph_is_filled_up_with_copies_that_change_nothing(tiny_models, variant: str) -> None:
    """Three rows in a graph of eight give the bits that they give among eight, step after step."""
    whole, few = (Session(tiny_models[variant], 0.5, (8,)) for _ in range(2))
    for session in (whole, few):
        session.step(list(range(ROWS)), 0, PROMPT)
    for i in range(DECODED):
        expected = whole.step(list(range(ROWS)), PROMPT + i, 1)
        assert torch.equal(few.step([0, 1, 2], PROMPT + i, 1), expected[:3])


@needs_cuda
def test_a_snapshot_on_the_device_is_the_state(tiny_models) -> None:
    session, everyone = Session(tiny_models[ALL_CHOSEN], 0.5, (1, 8)), list(range(ROWS))
    pool, spare = SlotPool(session.slots), ROWS + 1
    session.step(everyone, 0, PROMPT)
    pool.copy(3, spare, PROMPT)  # of sequence 2
    first = torch.cat(session.decoded([2]), 1)
    pool.copy(spare, 3, PROMPT)
    assert torch.equal(torch.cat(session.decoded([2]), 1), first)


SHAPE = CompressedAttention(
    4, 32, 24, 6, Rope(1e4, 8, pairs="neighbours"), 2, 16, 1e-6, Compression(4, True, EntryIndex(8, 16, 3))
)
STEPS = ((0, 9), (9, 17), *((i, i + 1) for i in range(17, 40)))  # of a sequence: rows of each step


def heads(device: torch.device, kernels: bool) -> CompressedHeads:
    g = torch.Generator().manual_seed(1)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(device)

    groups, angles = made(2, 16, 64), torch.arange(64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    pools = tuple(CompressionWeights(made(8, width), made(width)) for width in (32, 16))
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    weights = CompressedWeights(cos, sin, made(4), groups, pools)
    if kernels:
        return GpuCompressedHeads(SHAPE, weights, groups)
    return CompressedHeads(SHAPE, weights, plain_attend, lambda x: torch.einsum("tgk,gnk->tgn", x, groups))


class Walk:
    """Two sequences from their first token on, by steps; every array is NaN before it is written."""

    def __init__(self, device: torch.device, kernels: bool, places: int = 0) -> None:
        """places: of draft tokens, in rings."""
        self.device, self.attention = device, heads(device, kernels)
        g = torch.Generator().manual_seed(2)
        widths = 128, 32, SHAPE.compression.inputs(32), 128, 8
        self.rows = [torch.randn(2, 40, width, generator=g) for width in widths]
        sizes = (3, 6 + places, 32), (3, 8 + places, SHAPE.compression.inputs(32)), (24, 1, 32), (24, 1, 16)
        self.states = [torch.full(size, float("nan"), device=device) for size in sizes]
        self.states[:2] = (torch.cat((ring, ring), 1)[:, : ring.shape[1]] for ring in self.states[:2])  # have a stride

    def step(self, first: int, last: int, apart: bool = False, wrong: int = 0) -> torch.Tensor:
        """[2, rows, G * rank]. apart: each row is a sequence of its own; wrong: that many last rows are of others."""
        count, positions = last - first, torch.arange(first, last).repeat(2)
        tables = torch.arange(12, dtype=torch.int32) + torch.tensor([[0], [12]], dtype=torch.int32)
        whose = torch.arange(2).repeat_interleave(count)
        starts = torch.arange(1 + (2 * count if apart else 2), dtype=torch.int32) * (1 if apart else count)
        lens = positions.int() + 1 if apart else torch.full((2,), last, dtype=torch.int32)
        slots = torch.tensor([1, 2], dtype=torch.int32)
        batch = ForwardBatch(
            positions, positions, tables[whose, positions // 4].long() * 4 + positions % 4, starts, lens,
            tables[whose] if apart else tables, positions, slots[whose] if apart else slots,
        )  # fmt: skip
        arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
        there = replace(batch, **{n: x.to(self.device) for n, x in arrays.items() if isinstance(x, torch.Tensor)})
        sign = torch.where(torch.arange(count) < count - wrong, 1.0, -1.0)[:, None]
        rows = Projected(*((x[:, first:last] * sign).flatten(0, 1).to(self.device) for x in self.rows))
        out = self.attention(rows, step_rows(there), self.states[0], tuple(self.states[1:]))
        return out.cpu().unflatten(0, (2, count))


def walked(device: torch.device, kernels: bool = True) -> torch.Tensor:
    walk = Walk(device, kernels)
    return torch.cat([walk.step(*each) for each in STEPS], 1)


TOLERANCE = 128 * 2.0**-24 * 16  # sums of 128 float32 products are divided in other ways


@pytest.mark.parametrize("elements", [2048, 128])
def test_shared_keys_on_a_gpu_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Prompts in pieces and single tokens, whose shapes are fixed on a GPU; an index that leaves out seven of ten
    entries. elements: of a program that closes an entry, which has one of all its channels, or one of two."""
    monkeypatch.setattr(enter, "ELEMENTS", elements)
    expected, got = walked(torch.device("cpu"), kernels=False), walked(DEVICE)
    assert (got - expected).abs().max() < TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_rows_of_drafts_are_sequences_over_the_same_rings(wrong: int) -> None:
    """Four rows in a step, of which the last are wrong, and computed anew by the next. Windows of 6, entries of 4."""
    expected, walk = walked(torch.device("cpu"), kernels=False), Walk(DEVICE, True, places=3)
    got, at = [walk.step(0, 9), walk.step(9, 17)], 17
    while at + 4 <= 40:
        got.append(walk.step(at, at + 4, apart=True, wrong=wrong)[:, : 4 - wrong])
        at += 4 - wrong
    assert at >= 37
    assert (torch.cat(got, 1) - expected[:, :at]).abs().max() < TOLERANCE * float(expected.abs().max())


@needs_cuda
@pytest.mark.parametrize("heads_", [64, 20])
@pytest.mark.parametrize("chosen", [None, 24])
def test_rows_of_prompts_attend_as_in_float64(heads_: int, chosen: int | None) -> None:
    """Two sequences, of which one has a past, with heads of DeepSeek-V4's width. Weights of keys and results are
    rounded to bfloat16."""
    g, dim, window, size, stride, page = torch.Generator().manual_seed(3), 512, 128, 131, 4, 16
    shape = replace(SHAPE, heads=heads_, dim=dim, window=window, compression=Compression(stride))
    first, length = torch.tensor([0, 150]), (90, 61)
    places = torch.cat([f + torch.arange(n) for f, n in zip(first, length, strict=True)])
    whose = torch.arange(2).repeat_interleave(torch.tensor(length))
    new, ring = (torch.randn(n, dim, generator=g).bfloat16() for n in (len(places), 3 * size))
    q, entries = (torch.randn(n, dim, generator=g).bfloat16() for n in (len(places) * heads_, 12 * page))
    tables, counts = torch.tensor([[3, 1, 9, 0], [2, 7, 4, 11]]), ((places + 1) // stride).tolist()
    most, every = chosen or tables.shape[1] * page, torch.arange(tables.shape[1] * page)
    entries_of = tables[:, every // page] * page + every % page
    seen = [entries_of[w, :n] for w, n in zip(whose, counts, strict=True)]
    seen = [s if chosen is None else s[torch.randperm(len(s), generator=g)[:most]].sort().values for s in seen]
    listed = torch.stack([torch.nn.functional.pad(s[:most], (0, most - len(s[:most]))) for s in seen]).int()
    sinks = torch.randn(heads_, generator=g)
    rows = StepRows(
        places, places, whose, torch.tensor([1, 2]), torch.arange(2), torch.tensor([0, 90]), first,
        first + torch.tensor(length) - 1, tables, row_per_sequence=False,
    )  # fmt: skip
    there = replace(rows, **{n: v.to(DEVICE) for n, v in vars_of(rows).items()})
    weights = CompressedWeights(*(torch.zeros(1, 4),) * 2, sinks.to(DEVICE), torch.empty(0))
    pages = entries.view(12, page, dim).to(DEVICE)
    pool = EntriesSeen(pages, None if chosen is None else listed.to(DEVICE), most, stride)
    rings, queries = ring.view(3, size, dim).to(DEVICE), q.view(len(places), -1).to(DEVICE)
    got = attend_rows(queries, new.to(DEVICE), there, shape, weights, rings, pool)
    for t, (position, w) in enumerate(zip(places.tolist(), whose.tolist(), strict=True)):
        at = torch.arange(max(0, position + 1 - window), position + 1)
        old = at[at < first[w]] % size + (w + 1) * size
        keys = torch.cat((ring[old], new[at[at >= first[w]] - first[w] + rows.begins[w]], entries[seen[t]])).double()
        scores = q.view(len(places), heads_, dim)[t].double() @ keys.T * shape.scale
        shares = torch.cat((scores, sinks.double()[:, None]), 1).softmax(1)[:, :-1]
        expected = shares @ keys
        assert (got[t].cpu().double() - expected).norm() <= 2.0**-8 * expected.norm()


def vars_of(rows: StepRows) -> dict[str, torch.Tensor]:
    return {f.name: x for f in fields(rows) if isinstance(x := getattr(rows, f.name), torch.Tensor)}


@needs_cuda
def test_answers_from_snapshots_and_after_preemption(tiny_models) -> None:
    path, sampling = tiny_models[ALL_CHOSEN], SamplingParams(
        temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0
    )
    flags = {"device": "cuda", "kt_cpuinfer": 2, "kt_gpu_experts_ratio": 0.5, "max_running_requests": 4}
    cached = LLM(str(path), **flags, page_size=4)  # which becomes 8, as the strides want
    prompts = [list(range(40, 90))]
    answers = cached.generate(prompts, sampling)
    prompts.append([*prompts[0], *answers[0].token_ids, 7, 8, 9])
    answers += cached.generate(prompts[1:], sampling)
    assert answers[1].cached_tokens >= len(prompts[1]) - 3 - 2 * 8
    tight = LLM(str(path), **flags, page_size=8, max_total_tokens=160)
    many = [list(range(40 + n, 81 + n)) for n in range(6)]  # nothing is shared, so four do not fit
    answers += tight.generate(many, sampling)
    assert tight.engine.stats().preemptions > 0
    check_answers(path, [*prompts, *many], answers)
