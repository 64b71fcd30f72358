"""`ShmGroup`: processes sum in float32 in the order of ranks, and one that goes missing is named in bounded time."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from lane_process import TYPES, Message, Numbers, bits, lane_process
from tandem.errors import EngineError, RankLost
from tandem.kernels.ranks import shm
from tandem.kernels.ranks.shm import ShmGroup

SECONDS = 2.0  # of patience, where a rank stands still
LATEST = 20.0  # until a test says that a wait is not bounded: other processes may have the CPUs


def together(ranks: int, of_rank, **how) -> list:
    """Of all ranks, as threads, what `of_rank` gives of each one's group."""
    first = ShmGroup(0, ranks, **how)
    groups = [first, *(ShmGroup(rank, ranks, first.path, **how) for rank in range(1, ranks))]
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of_rank, range(ranks), groups))


def sums(ranks: int, count: int, most: int) -> None:
    """By so many processes, of which this one is the first; all compare bits."""
    group, numbers, wrong = ShmGroup(0, ranks), Numbers(ranks), 0
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(lane_process(rank, ranks, group.path, count, most)) for rank in range(1, ranks)]
        for call in range(count):
            message = Message(call, most)
            wrong += not torch.equal(bits(group.sum(numbers.own(0, message))), bits(numbers.sum(message)))
        assert [wrong, *(int(other.stdout.readline()) for other in others)] == [0] * ranks


def test_sums_of_two_processes_have_the_bits_of_float32_in_the_order_of_ranks() -> None:
    sums(2, 5000, 64 << 10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "count", "most"), [(2, 100_000, 64 << 10), (4, 1000, 1 << 20)], ids=["long", "four"]
)
def test_more_of_them(ranks, count, most) -> None:
    sums(ranks, count, most)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_messages_of_every_tail(ranks) -> None:
    """Around a unit, a line and a piece; in every type."""
    numbers = Numbers(ranks)
    sizes = [1, 2, 3, 7, 8, 15, 16, 17, 31, 4095, 8192, 8193, 33000]

    def of_rank(rank: int, group: ShmGroup) -> None:
        for each, total in zip(numbers.of_rank[rank], numbers.sums, strict=True):
            for size in sizes:
                assert torch.equal(bits(group.sum(each[None, :size].clone())), bits(total[None, :size])), size

    together(ranks, of_rank)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_no_number_stays_none(dtype) -> None:
    """On all ranks of the same bits."""
    rows = torch.tensor([[torch.nan, -torch.nan, torch.inf, -torch.inf, torch.inf, 0.0, -0.0]], dtype=dtype)
    other = torch.tensor([[1.0, torch.nan, -torch.inf, -torch.inf, 1.0, torch.nan, -0.0]], dtype=dtype)
    found = together(2, lambda rank, group: group.sum((rows, other)[rank].clone()))
    assert torch.equal(bits(found[0]), bits(found[1]))
    assert str(found[0].tolist()) == "[[nan, nan, nan, -inf, inf, nan, -0.0]]"


def test_rows_that_are_no_block_of_memory() -> None:
    numbers = [torch.randn(6, 10) for _ in range(2)]
    found = together(2, lambda rank, group: group.sum(numbers[rank].t()))
    assert all(torch.equal(each, (numbers[0] + numbers[1]).t()) for each in found)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("whole", [1, 5, 40, 50_001])
def test_columns_side_by_side(ranks, whole) -> None:
    """The last ranks have fewer, or none. Sums go on after that."""
    each = -(-whole // ranks)
    rows = [torch.randn(3, whole).to(dtype) for dtype in TYPES]

    def of_rank(rank: int, group: ShmGroup) -> None:
        for _ in range(3):
            for expected in rows:
                own = expected[:, rank * each : (rank + 1) * each]
                assert torch.equal(group.gather(own, whole), expected)
            assert group.sum(torch.ones(1, 5)).tolist() == [[float(ranks)] * 5]

    together(ranks, of_rank)


def test_nothing_is_summed_of_no_rows() -> None:
    assert [len(each) for each in together(2, lambda _, group: group.sum(torch.empty(0, 8)))] == [0, 0]


def test_numbers_of_calls_start_again() -> None:
    """Past 2³² − 1 comes 2: the next call is in the other half. Ranks are apart by chance, many times over."""
    def of_rank(rank: int, group: ShmGroup) -> None:
        for call in range(40):
            if (call + rank) % 3 == 0:
                time.sleep(0.001)
            assert group.sum(torch.full((1, 300), float(call))).unique().tolist() == [2.0 * call]

    for before in range(8):
        together(2, of_rank, call=2**32 - 1 - before)


def missing(group: ShmGroup, seconds: float) -> str:
    """What is said of the rank that does not answer, after how long at most."""
    began = time.monotonic()
    with pytest.raises(RankLost) as lost:
        while True:
            group.sum(torch.zeros(1, 7168))
    assert time.monotonic() - began < seconds
    return str(lost.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [(signal.SIGKILL, "rank 1 has ended"), (signal.SIGSTOP, "rank 1 has not answered for 2.")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_goes_missing_in_the_middle(how, text) -> None:
    """Nobody reaps the killed one meanwhile. The other rank waits no longer than its patience."""
    group, numbers = ShmGroup(0, 2, seconds=SECONDS), Numbers(2)
    with lane_process(1, 2, group.path, 10**9) as other:
        for call in range(50):
            group.sum(numbers.own(0, Message(call, 64 << 10)))
        os.kill(other.pid, how)
        assert text in missing(group, LATEST)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)  # its files are closed before its end
        assert psutil.Process(other.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def test_of_three_the_missing_one_is_named_by_both() -> None:
    """Not the one that gave up first."""
    barrier, said = threading.Barrier(2), {}

    def of_rank(rank: int, group: ShmGroup) -> None:
        group.sum(torch.zeros(1, 8))
        if rank != 1:
            barrier.wait(LATEST)
            with pytest.raises(RankLost, match=r"rank 1 has not answered for 2\.\d seconds"):
                group.sum(torch.zeros(1, 8))
            said[rank] = True

    together(3, of_rank, seconds=SECONDS)  # in less a thread may not have begun its first sum
    assert sorted(said) == [0, 2]


def test_a_rank_that_never_came_is_waited_for_as_long() -> None:
    """It says how long it has waited: longer than asked, where it had no CPU to look, by less than a second."""
    assert re.fullmatch(r"rank 1 has not answered for 2\.\d seconds", missing(ShmGroup(0, 2, seconds=SECONDS), LATEST))


def test_a_pause_of_a_process_is_no_wait() -> None:
    """The terminal may stop all ranks (Ctrl-Z), and go on later than their patience."""
    group, numbers = ShmGroup(0, 2, seconds=60), Numbers(2)
    with lane_process(1, 2, group.path, 2, seconds=4.0) as other:
        for call in range(2):  # it waits for the second one
            time.sleep(0.2 * call)
            if call == 1:
                other.send_signal(signal.SIGSTOP)
                time.sleep(4.5)  # of which one second counts; the others are this process's, if it has no CPU
                other.send_signal(signal.SIGCONT)
            message = Message(call, 64 << 10)
            assert torch.equal(bits(group.sum(numbers.own(0, message))), bits(numbers.sum(message)))
        assert other.stdout.readline() == "0\n"


def test_memory_that_cannot_be_had_is_an_error_that_says_so(monkeypatch) -> None:
    def refuse(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(EngineError, match="KiB of memory that ranks share cannot be had.*leave --tp out"):
        ShmGroup(0, 2)
    assert open_files() <= before


def test_memory_of_a_rank_that_has_ended_is_an_error_that_says_so() -> None:
    with pytest.raises(RankLost, match="rank 0 has ended, or its memory cannot be opened"):
        ShmGroup(1, 2, "/proc/4194304/fd/3")


def test_a_system_without_such_locks_waits_for_patience_alone(monkeypatch) -> None:
    monkeypatch.setattr(shm, "_locked", lambda *_: False)
    found = together(2, lambda rank, group: group.sum(torch.full((1, 3), rank + 1.0)).tolist())
    assert found == [[[3.0] * 3]] * 2


def open_files() -> Counter[str]:
    """By their names. Threads of other tests may close theirs meanwhile, so there may be fewer afterwards."""
    found = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


def test_nothing_is_left_of_it() -> None:
    """No file anywhere, no open file, and not a byte in /dev/shm, where other processes may have some."""
    gc.collect()  # groups that failed, with what was raised
    before, mapped = open_files(), mapped_files()

    def of_rank(_: int, group: ShmGroup) -> None:
        group.sum(torch.ones(1, 2))
        new = mapped_files() - mapped
        assert "/memfd:tandem-ranks (deleted)" in new and not [each for each in new if each.startswith("/dev/shm/")]

    together(2, of_rank)
    assert open_files() <= before and not [each for each in mapped_files() - mapped if "tandem-ranks" in each]


def mapped_files() -> Counter[str]:
    """How often each is mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
