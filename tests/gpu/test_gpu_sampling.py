"""Choosing from logits that stay on a device gives the tokens that `sampling.sample` gives for the same rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gpu import DEVICE, needs_triton
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling import on_device as device_sampling
from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.logits import DeviceLogits, HostLogits, HostRows, best_of
from tandem.engine.sampling.masks import TokenMask, bits_of, new_mask
from tandem.engine.sequence import Sequence

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]

VOCAB, EOS = 3000, (2,)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampling, "CANDIDATES", 40)


def rows_of(count: int, seed: int, vocab: int = VOCAB, coarse: bool = False) -> torch.Tensor:
    """coarse: as bfloat16 makes them, with many equal values."""
    logits = 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))
    return (logits * 4).round() / 4 if coarse else logits


def sequences_of(count: int, *params: SamplingSettings) -> list[Sequence]:
    kinds = itertools.cycle(params)
    return [
        Sequence("x", i, [3, 4, 5], next(kinds), arrival=0, max_len=100, page_size=16, seed=i)
        for i in range(count)
    ]


def both(logits: torch.Tensor, sequences: list[Sequence], device: str) -> tuple[list, list]:
    rows = list(range(len(sequences)))
    there = logits.to(device)
    ours = DeviceLogits(there, best_of(there).cpu(), HostRows(there.device)).chosen(rows, sequences, EOS)
    return ours, HostLogits(logits.numpy()).chosen(rows, sequences, EOS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), list(itertools.product([-1, 5, 39, 60], [1.0, 0.9, 0.2], [0.0, 0.05]))
)
def test_the_same_tokens_as_on_the_host(device, coarse, top_k, top_p, min_p) -> None:
    params = [SamplingSettings(temperature=t, top_k=top_k, top_p=top_p, min_p=min_p) for t in (0.5, 1.0, 3.0)]
    ours, theirs = both(rows_of(90, 1, coarse=coarse), sequences_of(90, *params), device)
    assert [s.token_id for s in ours] == [s.token_id for s in theirs]


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_vocabulary_is_its_own_candidates(device) -> None:
    params = [SamplingSettings(top_k=k, top_p=p) for k in (-1, 7, 29, 30, 500) for p in (1.0, 0.99, 0.5)]
    ours, theirs = both(rows_of(150, 2, vocab=30), sequences_of(150, *params), device)
    assert [s.token_id for s in ours] == [s.token_id for s in theirs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coarse", [False, True])
def test_log_probabilities(device, coarse) -> None:
    params = [SamplingSettings(temperature=t, top_p=0.8, logprobs=n) for t in (0.0, 1.0) for n in (0, 5, 20)]
    ours, theirs = both(rows_of(60, 3, coarse=coarse), sequences_of(60, *params), device)
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_id == b.token_id and a.logprob is not None and b.logprob is not None
        assert [i for i, _ in a.logprob.top] == [i for i, _ in b.logprob.top]
        np.testing.assert_allclose([p for _, p in a.logprob.top], [p for _, p in b.logprob.top], atol=2e-5)
        assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=2e-5)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
def test_a_row_s_norm_does_not_depend_on_the_others(vocab: int) -> None:
    """To the last bit, in any number of rows; within rounding it is what float64 says."""
    from tandem.kernels.gpu.best import norms_of

    logits = rows_of(9, 3, vocab=vocab)
    logits[3, : vocab // 2] = -math.inf  # forbidden
    logits[5] += 900.0
    there = norms_of(logits.to(DEVICE))
    for first, end in ((0, 1), (3, 4), (2, 6), (5, 9)):
        assert torch.equal(norms_of(logits[first:end].to(DEVICE)), there[first:end])
    assert torch.allclose(there.cpu(), logits.double().logsumexp(1), rtol=1e-15 * vocab**0.5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_more_equal_tokens_than_candidates(device) -> None:
    logits = rows_of(8, 8)
    logits[::2], logits[1] = 0.5, torch.where(logits[1] > 0, 3.0, 0.0)
    params = [SamplingSettings(temperature=t, top_k=k, logprobs=3) for t in (0.0, 1.0) for k in (-1, 10)]
    ours, theirs = both(logits, sequences_of(8, *params), device)
    assert [s.token_id for s in ours] == [s.token_id for s in theirs]
    assert [[i for i, _ in s.logprob.top] for s in ours] == [[i for i, _ in s.logprob.top] for s in theirs]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_something_changes_are_chosen_on_the_host(device) -> None:
    params = [
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=0.0, logit_bias={7: 100.0}),
        SamplingSettings(temperature=1.0, repetition_penalty=1.5),
        SamplingSettings(temperature=0.0, min_tokens=4),
    ]
    ours, theirs = both(rows_of(40, 4), sequences_of(40, *params), device)
    assert [s.token_id for s in ours] == [s.token_id for s in theirs]
    assert all(s.token_id == 7 for s in ours[1::4])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_maximum_choose_nothing_and_leave_the_others_alone(device) -> None:
    logits = rows_of(6, 5)
    logits[1, 100], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf
    sampling = sequences_of(6, SamplingSettings(temperature=1.0), SamplingSettings(temperature=0.0))
    ours, theirs = both(logits, sampling, device)
    assert [s.token_id for s in ours] == [s.token_id for s in theirs]
    assert [s.token_id < 0 for s in ours] == [False, True, True, True, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_picked_and_fetched(device) -> None:
    logits = rows_of(9, 6).to(device)
    made = DeviceLogits(logits, best_of(logits).cpu(), HostRows(logits.device))
    np.testing.assert_array_equal(made.fetched(slice(2, 5)), logits[2:5].cpu().numpy())
    chosen = made.chosen([4, 8], sequences_of(2, SamplingSettings(temperature=0.0)), EOS)
    assert [s.token_id for s in chosen] == logits[[4, 8]].argmax(1).tolist()
    assert made.chosen([], [], EOS) == []


def test_most_rows_are_decided_by_their_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a usual model's settings need is there: nothing is fetched."""
    monkeypatch.setattr(device_sampling, "CANDIDATES", 256)
    logits = 2 * rows_of(50, 7, vocab=20_000)
    sequences = sequences_of(
        50, SamplingSettings(temperature=0.6, top_p=0.95, top_k=20), SamplingSettings(temperature=1.0)
    )
    assert None not in device_sampling.choose(lambda rows: logits[rows], best_of(logits).numpy(), sequences)


def readable(mask: TokenMask) -> TokenMask:
    """Where a GPU can read it."""
    made = new_mask(len(mask))
    made[:] = mask
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_graph", [0, 17, 30])
@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2}]
)
def test_masked_rows_choose_what_they_choose_on_the_host(device, in_graph, change) -> None:
    """Every third row is free. In a graph the best is found by its masks, outside for the rows that need it; masks of
    rows of draft tokens are known after the graph has run."""
    logits = rows_of(30, 7)
    sequences = sequences_of(30, SamplingSettings(**change), SamplingSettings(repetition_penalty=1.2))
    generator = np.random.default_rng(0)
    masks = [
        None if i % 3 == 0 else bits_of(generator.integers(0, VOCAB, 1 + i * i).tolist(), VOCAB) for i in range(30)
    ]
    there = logits.to(device)
    masks = [None if mask is None else readable(mask) for mask in masks]
    graph = GraphMasks(30, there.device)
    if in_graph:
        graph.send(masks[:in_graph])
        graph.make(lambda: None)
    best = best_of(there, graph if in_graph else None).cpu()
    made = DeviceLogits(there, best, HostRows(there.device), masked=[i < in_graph for i in range(30)])
    rows = list(range(30))
    ours = made.chosen(rows, sequences, EOS, masks)
    theirs = HostLogits(logits.numpy()).chosen(rows, sequences, EOS, masks)
    assert [s.token_id for s in ours] == [s.token_id for s in theirs]
    for sampled, mask in zip(ours, masks, strict=True):
        assert mask is None or (int(mask[sampled.token_id // 32]) >> (sampled.token_id % 32)) & 1


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("rows", [1, 6])
def test_the_best_is_written_to_memory_of_the_host(rows) -> None:
    """The first rows of a larger array, as `BestRows` keeps it; those behind stay as they are."""
    from tandem.kernels.gpu import best

    logits = rows_of(rows, 5, coarse=True)
    memory = torch.full((rows + 2, 2), -7.0, dtype=torch.float64, pin_memory=DEVICE.type == "cuda")
    best.best_of(logits.to(DEVICE), None, memory[:rows])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(memory[:rows], best_of(logits)) and memory[rows:].eq(-7.0).all()


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("nbytes", [4, 44, 4096, 4100, 40_028])
def test_an_image_in_pinned_memory_is_read_whole(nbytes) -> None:
    from tandem.kernels.gpu import pinned

    image = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    image = image.pin_memory() if DEVICE.type == "cuda" else image
    there = torch.zeros(nbytes + 64, dtype=torch.uint8, device=DEVICE)
    pinned.read(image, there[:nbytes])
    assert torch.equal(there[:nbytes].cpu(), image) and not there[nbytes:].any()
