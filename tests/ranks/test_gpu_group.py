"""`GpuGroup` without a GPU: which lane ranks agree on, and how columns are put side by side. Lanes are of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu import HAS_TRITON
from tandem.errors import EngineError
from tandem.kernels.ranks.meeting import Meeting

if HAS_TRITON:
    from tandem.kernels.gpu.ranks import gpu_group
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup
    from tandem.kernels.gpu.ranks.lane import COPY

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
RANKS = 2


class ThreadLanes:
    """Makes lanes that meet here. missing: those that cannot be had; wrong: those that lose what rank 1 writes."""

    def __init__(self, missing: tuple[str, ...] = (), wrong: tuple[str, ...] = ()) -> None:
        self.missing, self.wrong = missing, wrong
        self.barrier, self.sent = Barrier(RANKS, timeout=30), [torch.empty(0)] * RANKS
        self.patience: list[tuple[str, float]] = []

    def __call__(self, name: str, meeting: Meeting, device: torch.device) -> Any:
        if name in self.missing:
            raise EngineError("no peers")
        return ThreadLane(self, name, meeting.rank)


class ThreadLane:
    """One rank's."""

    def __init__(self, lanes: ThreadLanes, name: str, rank: int) -> None:
        self.lanes, self.name, self.rank = lanes, name, rank

    def be_patient(self, seconds: float) -> None:
        self.lanes.patience.append((self.name, seconds))

    def send(self, x: Tensor, out: Tensor, kind: int) -> None:
        lanes = self.lanes
        lanes.sent[self.rank] = x.clone()
        lanes.barrier.wait()
        both = [each.clone() for each in lanes.sent]
        lanes.barrier.wait()
        if self.name in lanes.wrong:
            both[1].zero_()
        total = (both[0].float() + both[1].float()).to(x.dtype)
        out.copy_(torch.stack(both, 1) if kind == COPY else total)

    def check(self) -> None: ...


def on_ranks(tmp_path, monkeypatch, lanes: ThreadLanes, work: Callable[[int, GpuGroup], Any]) -> list[Any]:
    """Of each rank, what `work` gives."""
    monkeypatch.setattr(gpu_group, "Lane", lanes)
    monkeypatch.setattr(gpu_group.GpuGroup, "_tried", lambda self, lane: {"peer": 2e-6, "host": 4e-6}[lane.name])

    def of_rank(rank: int) -> Any:
        return work(rank, GpuGroup(Meeting(rank, RANKS, f"{tmp_path}/ranks", 30.0), torch.device("cpu")))

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(of_rank, range(RANKS)))


@pytest.mark.parametrize(
    ("how", "chosen", "says"),
    [({}, "peer", "peer 2.0 us, host 4.0 us"), ({"missing": ("peer",)}, "host", "peer: no peers"),
     ({"wrong": ("peer",)}, "host", "peer: wrong sums")],
)  # fmt: skip
def test_the_fastest_lane_that_is_right_on_all_ranks_is_taken(tmp_path, monkeypatch, how, chosen, says) -> None:
    lanes = ThreadLanes(**how)
    for lane, text in on_ranks(tmp_path, monkeypatch, lanes, lambda _, group: (group.lane.name, group.text())):
        assert lane == chosen and says in text
    assert (chosen, gpu_group.TRY_SECONDS) in lanes.patience and lanes.patience[-1] == ("host", gpu_group.START_SECONDS)


def test_no_lane_at_all_is_an_error(tmp_path, monkeypatch) -> None:
    with pytest.raises(EngineError, match="no way between GPUs works: peer: no peers; host: wrong sums"):
        on_ranks(tmp_path, monkeypatch, ThreadLanes(("peer",), ("host",)), lambda _, group: group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "whole"), [(1, 100), (5, 203), (3, 16), (0, 64)])
def test_columns_lie_side_by_side(tmp_path, monkeypatch, dtype, rows, whole) -> None:
    """The last rank may have fewer; a chunk without logits has no rows."""
    columns = torch.randn(rows, whole, generator=torch.Generator().manual_seed(whole)).to(dtype)
    each = -(-whole // RANKS)
    own = [columns[:, :each], columns[:, each:]]
    gathered = on_ranks(tmp_path, monkeypatch, ThreadLanes(), lambda rank, group: group.gather(own[rank], whole))
    assert all(torch.equal(one, columns) for one in gathered)


def test_nothing_is_summed_without_a_kernel(tmp_path, monkeypatch) -> None:
    empty = on_ranks(tmp_path, monkeypatch, ThreadLanes(), lambda _, group: group.sum(torch.empty(0, 8)))
    assert all(each.shape == (0, 8) for each in empty)
