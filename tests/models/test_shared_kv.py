"""Shared keys, pooled entries, streams: every cut, prefixes that are found, preemption; kernels beside plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sessions import Session, worst
from tandem import LLM, SamplingParams, _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Ops
from tandem.kernels.reference import TorchOps
from tandem.kernels.step_rows import StepRows, step_rows
from tandem.mechanisms.compressed_attention.cpu import OwnKeys
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression, EntryIndex
from tandem.mechanisms.compressed_attention.torch import plain_attend
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperStreams, HyperWeights
from tandem.models.batch import ForwardBatch
from tandem.spec.rope import Rope
from tandem.spec.state import page_tokens, state_layout

OPS = ["torch", *_core.supported_tiers()]
PROMPT, LONG = 41, 300


def ops_of(name: str) -> Ops:
    return TorchOps() if name == "torch" else CpuOps(_core.WorkerPool([-1, -1]), name)


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def exact(path: Path, prompt: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("name", OPS)
def test_every_cut_equals_transformers_in_one_piece(tiny_models, name: str) -> None:
    """Strides of 4 and 8, a window of 7, three chosen entries of ten. All but new rows are NaN at first."""
    path, prompt = tiny_models["deepseek_v4"], tokens(PROMPT)
    expected = exact(path, prompt)
    session = Session(path, ops=ops_of(name))
    for cut in range(1, PROMPT):
        session.lengths = [0, 0, 0]
        got = torch.cat([session.step([(1, part)])[0] for part in (prompt[:cut], prompt[cut:])])
        assert worst([got], [expected]) < 1e-4, cut


@pytest.mark.parametrize("name", OPS[:: len(OPS) - 1])
def test_windows_of_128_tokens_equal_transformers_at_their_borders(tiny_models, name: str) -> None:
    """Then the last tokens one by one."""
    path, prompt = tiny_models["deepseek_v4-narrow"], tokens(LONG)
    expected, session = exact(path, prompt), Session(tiny_models["deepseek_v4-narrow"], ops=ops_of(name), pages=3)
    for cuts in ([LONG], [1, 3, 4, 5, 127, LONG], [128, 129, 255, 256, 257, LONG], [126, 254, *range(255, 263), LONG]):
        session.lengths = [0, 0, 0]
        parts = [prompt[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
        got = torch.cat([session.step([(2, part)])[0] for part in parts])
        assert worst([got], [expected]) < 1e-4, cuts


def test_sequences_of_all_lengths_together_equal_transformers(tiny_models) -> None:
    """One decodes past its window, one begins, one is in the middle of its prompt; then all decode."""
    path, session = tiny_models["deepseek_v4"], Session(tiny_models["deepseek_v4"], ops=ops_of(OPS[-1]))
    prompts = [tokens(n, seed) for seed, n in enumerate((38, 14, 25))]
    got: list[list[Tensor]] = [[], [], []]
    spans = [[(0, 0, 30)], [(0, 30, 31), (1, 0, 5), (2, 0, 11)], [(0, 31, 32), (2, 11, 19), (1, 5, 6)]]
    spans += [[(1, 6 + i, 7 + i), (2, 19 + i, 20 + i), (0, 32 + i, 33 + i)] for i in range(6)]
    for parts in spans:
        for (s, *_), logits in zip(parts, session.step([(s, prompts[s][a:b]) for s, a, b in parts]), strict=True):
            got[s].append(logits)
    for s, rows in enumerate(got):
        found = torch.cat(rows)
        assert worst([found], [exact(path, prompts[s])[: len(found)]]) < 1e-4


def generated(path: Path, calls: list[list[list[int]]], **flags: object) -> tuple[list[list[int]], int, int]:
    """Greedy answers of calls of prompts, one call after the other; tokens that were found, and preemptions."""
    llm = LLM(str(path), dtype="float32", device="cpu", kt_cpuinfer=2, **flags)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = [each.token_ids for call in calls for each in llm.generate(call, greedy, progress=False)]
    stats = llm.engine.stats()
    return answers, stats.cached_tokens, stats.preemptions


def test_found_prefixes_and_preempted_sequences_answer_alike(tiny_models) -> None:
    """Pages of 4 tokens become pages of 8, which the strides divide; a prefix ends where a slot was kept."""
    path, prompts = tiny_models["deepseek_v4"], [tokens(30, seed) for seed in range(3)]
    longer = [[*prompt[:26], 7, 8, 9] for prompt in prompts]
    calls = [prompts, longer]
    plain, none, _ = generated(path, calls, disable_radix_cache=True, max_total_tokens=400, page_size=4)
    cached, found, _ = generated(path, calls, max_total_tokens=400, page_size=4)
    tight, _, preempted = generated(path, calls, max_total_tokens=72, context_length=64, chunked_prefill_size=8)
    assert none == 0 and found >= 3 * 16 and preempted > 0
    assert cached == plain and tight == plain
    for prompt, answer in zip([*prompts, *longer], plain, strict=True):
        scores = exact(path, prompt + answer)
        assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_a_page_has_whole_entries(tiny_models) -> None:
    llm = LLM(str(tiny_models["deepseek_v4-narrow"]), device="cpu", kt_cpuinfer=1, page_size=16, max_total_tokens=512)
    plan = llm.engine.plan
    assert plan.page_size == 128 and plan.num_pages == 4
    assert any("--page-size 16 becomes 128" in notice for notice in plan.notices)


FLASH = Rope(1e4, 64, pairs="neighbours")
SPARSE, HEAVY = Compression(4, True, EntryIndex(64, 128, 512)), Compression(128)


def shared_kv(pool: Compression | None) -> CompressedAttention:
    return CompressedAttention(64, 512, 1024, 128, FLASH, 8, 1024, 1e-6, pool)


def test_what_the_flash_model_keeps() -> None:
    """Entries of 512 and index keys of 128 for every 4th token, of 512 for every 128th; windows, and inputs of entries
    that are open: bfloat16, in bytes."""
    bodies = [shared_kv(None)] * 2 + [shared_kv(SPARSE)] * 21 + [shared_kv(HEAVY)] * 20
    states = [state for body in bodies for state in body.states()]
    layout = state_layout(states, "bfloat16", page_tokens(states, 16))
    assert layout.page == 128
    assert layout.token_bytes == 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128
    assert layout.page_bytes == 128 * layout.token_bytes
    windows, inputs = 43 * 128 * 512 * 2, 21 * 8 * 2560 * 2 + 20 * 128 * 1024 * 2
    assert layout.slot_bytes == windows + inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPS[1:])
def test_own_keys_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    """Keys beyond a row's count are NaN. A score is a sum of 40 products, then 90 weighted keys are summed; bfloat16
    rounds the result, too."""
    g = torch.Generator().manual_seed(2)
    q, keys = (torch.randn(shape, generator=g).to(dtype) for shape in ((5, 6, 40), (5, 90, 40)))
    counts, sinks = torch.tensor([1, 90, 33, 64, 65]), torch.randn(6, generator=g)
    for row, count in enumerate(counts.tolist()):
        keys[row, count:] = float("nan")
    got = OwnKeys(ops_of(name).dense)(q, keys, counts, 0.2, sinks)  # type: ignore[attr-defined]
    for row, count in enumerate(counts.tolist()):
        k = keys[row, :count].double()
        scores = torch.cat((q[row].double() @ k.T * 0.2, sinks.double()[:, None]), 1).softmax(1)[:, :-1]
        expected = scores @ k
        error = (got[row].double() - expected).abs().max()
        assert error <= (40 + 90) * 2.0**-24 * 4 + (2.0**-8 * expected.abs().max() if dtype is torch.bfloat16 else 0)


def test_plain_attention_reads_nothing_beyond_its_counts() -> None:
    q, keys = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    counts, sinks = torch.tensor([2, 5]), torch.randn(3)
    expected = plain_attend(q[:1], keys[:1, :2], counts[:1], 0.3, sinks)
    keys[0, 2:] = float("nan")
    assert torch.equal(plain_attend(q, keys, counts, 0.3, sinks)[:1], expected)


def test_copies_that_fill_up_a_batch_compute_what_the_last_row_does() -> None:
    """They have slot 0, and its page: another value would be written to where its entry lies."""
    rows = step_rows(batch(positions=[9, 4, 4, 4], slots=[3, 2, 0, 0]))
    assert rows.slots.tolist() == [3, 2, 2, 2] and rows.row_per_sequence


def batch(positions: list[int], slots: list[int]) -> ForwardBatch:
    count = len(positions)
    at, lens = torch.tensor(positions), torch.tensor(positions, dtype=torch.int32) + 1
    return ForwardBatch(
        at, at, at, torch.arange(count + 1, dtype=torch.int32), lens, torch.zeros(count, 1, dtype=torch.int32), at,
        torch.tensor(slots, dtype=torch.int32),
    )  # fmt: skip


def test_streams_mix_without_growing() -> None:
    """Columns of the mixing were normed last: they add up to 1 within 1e-6, which is added to their sums, and float32's
    rounding; rows after as many turns nearly so. A block's result is shared out, and streams mix by these weights."""
    shape, hidden = Hyper(4, 20, 1e-6, 1e-6), 24
    torch.manual_seed(4)
    fn = torch.randn(32, 4 * hidden) * 0.1  # 24 of these rows count
    weights = HyperWeights(lambda x: x @ fn.T, torch.ones(32), torch.zeros(32))
    streams = torch.randn(3, 4, hidden)
    x, mix = HyperStreams(shape, weights).entered(streams)
    assert x.shape == (3, hidden) and (mix.mixing >= 0).all() and (mix.share <= 2).all()
    assert (mix.mixing.sum(1) - 1).abs().max() < 1e-5 and (mix.mixing.sum(2) - 1).abs().max() < 1e-3
    y, wide = torch.randn(3, hidden), [t.double() for t in (streams, mix.share, mix.mixing)]
    expected = torch.einsum("tjk,tjd->tkd", wide[2], wide[0]) + wide[1][:, :, None] * y.double()[:, None]
    assert (mix.left(streams, y) - expected).abs().max() < 8 * 2.0**-24 * float(expected.abs().max())


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a decode step's shapes must not depend on values: it may become a graph."""
    monkeypatch.setattr(StepRows, "static", property(lambda rows: rows.row_per_sequence))


@pytest.mark.parametrize("name", OPS[:: len(OPS) - 1])
@pytest.mark.parametrize("variant", ["deepseek_v4", "deepseek_v4-narrow"])
def test_steps_of_one_shape_equal_transformers(tiny_models, static: None, variant: str, name: str) -> None:
    """From the first token on one by one, so that windows are not full and no entry is closed at first."""
    path, prompt = tiny_models[variant], tokens(PROMPT)
    session = Session(path, ops=ops_of(name))
    got = torch.cat([session.step([(1, [token])])[0] for token in prompt])
    assert worst([got], [exact(path, prompt)]) < 1e-4


def padded(batch: ForwardBatch) -> ForwardBatch:
    """As a graph's batch is filled up: two copies of the last row, whose slot is nobody's."""
    def filled(values: Tensor) -> Tensor:
        return torch.cat((values, values[-1:], values[-1:]))

    rows = torch.arange(len(batch.positions) + 2)
    slots = torch.cat((batch.slots, torch.zeros(2, dtype=torch.int32)))
    return ForwardBatch(
        filled(batch.input_ids), filled(batch.positions), filled(batch.cache_slots),
        torch.arange(len(rows) + 1, dtype=torch.int32), filled(batch.seq_lens), filled(batch.block_tables), rows, slots,
    )  # fmt: skip


def test_a_batch_that_is_filled_up_computes_the_same(
    tiny_models, static: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies write what the last row writes, step after step; nobody's slot stays full of NaN."""
    path, prompts = tiny_models["deepseek_v4"], [tokens(PROMPT, seed) for seed in range(2)]
    session = Session(path, ops=ops_of(OPS[-1]))
    forward = session.model.forward
    monkeypatch.setattr(session.model, "forward", lambda batch, states: forward(padded(batch), states)[:2])
    parts = [session.step([(s, [prompts[s][i]]) for s in range(2)]) for i in range(PROMPT)]
    for s in range(2):
        got = torch.cat([part[s] for part in parts])
        assert worst([got], [exact(path, prompts[s])]) < 1e-4
    rings = [array for arrays in session.states for array in arrays if len(array) == 4]
    assert rings and all(ring[0].isnan().all() for ring in rings)
