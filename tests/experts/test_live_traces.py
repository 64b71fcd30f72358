"""Routing traces: generated ones keep what they promise, recorded ones are read or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.bench.placement.traces import (
    ROUTINGS,
    UNIFORM,
    TraceShape,
    Zipf,
    expert_counts,
    generate,
    load_trace,
)
from tandem.errors import ConfigError

SHAPE = TraceShape(tokens=900, layers=3, experts=64, top_k=6)


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_a_token_chooses_distinct_experts_and_seeds_decide(name: str) -> None:
    trace = generate(SHAPE, ROUTINGS[name], 1)
    assert trace.shape == (900, 3, 6) and trace.dtype == torch.int16
    assert int(trace.min()) >= 0 and int(trace.max()) < 64
    assert (trace.sort(2).values.diff(dim=2) > 0).all()
    assert torch.equal(trace, generate(SHAPE, ROUTINGS[name], 1))
    assert not torch.equal(trace, generate(SHAPE, ROUTINGS[name], 2))


def test_without_a_change_the_popular_are_chosen_as_zipf_says() -> None:
    """One expert per token: the share of rank r is r ** -1.1 over the sum, within five standard deviations."""
    shape = TraceShape(20000, 1, 16, 1)
    still = Zipf(jump=0.0, drift=0.0)
    shares = expert_counts(generate(shape, still, 3), 16)[0].sort(descending=True).values / 20000
    exact = torch.arange(1, 17.0) ** -1.1
    exact /= exact.sum()
    assert ((shares - exact).abs() < 5 * (exact / 20000).sqrt()).all()


def changed(trace: torch.Tensor, first: int, second: int, count: int = 100) -> float:
    """Share of the most used eighth of one stretch that is not among that of another."""
    tops = [expert_counts(trace[at : at + count], 512).topk(64, 1).indices for at in (first, second)]
    common = sum(len(set(a) & set(b)) for a, b in zip(tops[0].tolist(), tops[1].tolist(), strict=True))
    return 1 - common / tops[0].numel()


def test_popularity_drifts_within_a_request_and_jumps_between_two() -> None:
    law = replace(Zipf(), request_tokens=500)
    trace = generate(TraceShape(1000, 4, 512, 10), law, 5)
    still = generate(TraceShape(1000, 4, 512, 10), replace(law, drift=0.0), 5)
    noise, drift = changed(still, 0, 100), changed(trace, 0, 100)
    assert drift > noise + 0.05
    assert changed(trace, 400, 500) > drift + 0.1  # a new request


def test_statistics_of_other_requests_know_a_little() -> None:
    def hits(law: Zipf) -> float:
        shape = TraceShape(2000, 4, 128, 8)
        known = expert_counts(generate(shape, law, 1), 128).topk(16, 1).indices
        counts = expert_counts(generate(shape, law, 2), 128)
        return float(counts.gather(1, known).sum() / counts.sum())

    assert hits(UNIFORM) < 0.14 < hits(Zipf()) < hits(replace(Zipf(), jump=0.0, drift=0.0))


def saved(tmp_path: Path, stored: object) -> str:
    torch.save(stored, tmp_path / "trace.pt")
    return str(tmp_path / "trace.pt")


def test_recorded_streams_are_joined_repeated_and_cut(tmp_path: Path) -> None:
    trace = generate(TraceShape(7, 3, 64, 6), Zipf(), 1)
    records = [{"topk_ids_of_layer": part.transpose(0, 1).int(), "rank": 0} for part in trace.split(3)]
    for stored in (trace, {"records": records}):
        read = load_trace(saved(tmp_path, stored), SHAPE)
        assert read.shape == (900, 3, 6) and torch.equal(read[7:14], trace)
    assert torch.equal(load_trace(saved(tmp_path, trace), replace(SHAPE, tokens=5)), trace[:5])


def test_padding_is_dropped(tmp_path: Path) -> None:
    trace = generate(TraceShape(7, 3, 64, 6), Zipf(), 1)
    padded = torch.cat((trace[:4], torch.full((2, 3, 6), -1, dtype=torch.int16), trace[4:]))
    assert torch.equal(load_trace(saved(tmp_path, padded), replace(SHAPE, tokens=7)), trace)


@pytest.mark.parametrize(
    "stored",
    [
        torch.zeros(5, 2, 6), torch.zeros(5, 3), {"records": []}, {"logical_count": torch.zeros(3, 64)},
        torch.full((5, 3, 6), 64), torch.full((5, 3, 6), -1),
        {"records": [{"topk_ids_of_layer": torch.zeros(3, 2, 6)}, {"topk_ids_of_layer": torch.zeros(2, 2, 6)}]},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, stored: object) -> None:
    with pytest.raises(ConfigError, match="--routing"):
        load_trace(saved(tmp_path, stored), SHAPE)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.pt").write_text("ids")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(str(tmp_path / "trace.pt"), SHAPE)
