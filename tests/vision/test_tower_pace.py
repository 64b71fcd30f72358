"""How long those who decode wait for an image: pieces are given to a GPU that is a row of numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tandem.engine.vision.pace import (
    DEVICE_SHARE,
    HOST_SHARE,
    IDLE_SECONDS,
    MOST_SECONDS,
    DeviceWatch,
    HostWatch,
    TowerPace,
    pace_of,
)

STEP = 0.008  # seconds of a decoding step alone
LAUNCH = 5e-5  # of the host, for a piece


class Gpu:
    """One stream, whose work is done in order; the host has a clock of its own."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0

    def work(self, seconds: float) -> None:
        self.busy_until = max(self.host, self.busy_until) + seconds

    def event(self) -> Event:
        return Event(self, max(self.host, self.busy_until))


class Event:
    def __init__(self, gpu: Gpu, at: float) -> None:
        self._gpu, self.at = gpu, at

    def query(self) -> bool:
        return self._gpu.host >= self.at

    def synchronize(self) -> None:
        self._gpu.host = max(self._gpu.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def gaps(pieces: list[float], share: float = DEVICE_SHARE) -> tuple[list[float], float]:
    """Seconds between ends of decoding steps while an image is read, and what its pieces took by the pace."""
    gpu, left, ends = Gpu(), list(pieces), [0.0]
    pace = TowerPace(DeviceWatch(gpu.event), share)
    pace.begin_image()
    while left or not pace.ended():
        pace.begin(share * STEP)
        while left and pace.fits():
            gpu.host += LAUNCH
            gpu.work(left.pop(0))
            pace.launched()
        gpu.work(STEP)
        gpu.host = gpu.busy_until
        ends.append(gpu.host)
    return [after - before for before, after in pairwise(ends)], pace.seconds


@pytest.mark.parametrize("piece", [0.00005, 0.0003, 0.0009, 0.0027])
def test_a_step_waits_no_longer_than_its_share(piece: float) -> None:
    """And for the first launch: while the host gives the others, the GPU computes."""
    found, seconds = gaps([piece] * 84)
    most = STEP * DEVICE_SHARE + LAUNCH
    assert max(found) <= STEP + most + 1e-9
    each = max(piece, LAUNCH)
    assert seconds == pytest.approx(84 * each, rel=0.15)  # the host's part of a slice's first piece is in it
    fitting = max(1, int(STEP * DEVICE_SHARE / (each + LAUNCH)))
    assert len(found) <= 84 // fitting + 2 + fitting.bit_length()  # 1, 2, 4 pieces … in the first slices


def test_a_piece_that_is_longer_is_given_alone() -> None:
    found, _ = gaps([0.02] * 5)
    assert len(found) == 5 and max(found) <= STEP + 0.02 + LAUNCH + 1e-9


def test_unlike_pieces_take_their_share_on_the_whole() -> None:
    """Attention takes three times as long as what is before and behind it: no step waits for one piece too many."""
    found, _ = gaps([0.0002, 0.0006, 0.0002] * 28)
    assert max(found) <= STEP * (1 + DEVICE_SHARE) + 0.0006 + LAUNCH
    assert sum(found) / len(found) <= STEP * (1 + DEVICE_SHARE)


def test_a_step_is_told_what_it_waited_for() -> None:
    gpu = Gpu()
    pace = TowerPace(DeviceWatch(gpu.event), DEVICE_SHARE)
    pace.begin_image()
    pace.begin(1.0)
    gpu.work(0.001)
    pace.launched()
    assert not pace.fits() and not pace.ended()  # what a piece takes is not known yet
    gpu.work(STEP)
    gpu.host = gpu.busy_until
    assert pace.delay() == pytest.approx(0.001) and pace.delay() == 0.0 and pace.ended()


def test_a_gpu_never_has_more_to_do_than_some_milliseconds() -> None:
    """Before any step has told how long one takes, a slice may take a quarter of a second."""
    gpu = Gpu()
    pace = TowerPace(DeviceWatch(gpu.event), DEVICE_SHARE)
    pace.begin_image()
    for _ in range(10):
        pace.begin(0.25)
        before = gpu.host
        while pace.fits():
            gpu.work(0.0003)
            pace.launched()
        gpu.host = gpu.busy_until
        assert gpu.host - before <= MOST_SECONDS + 1e-9
    assert pace.seconds > 0.03


def test_an_idle_gpu_always_has_something_to_do() -> None:
    gpu, left = Gpu(), 200
    pace = TowerPace(DeviceWatch(gpu.event), DEVICE_SHARE)
    pace.begin_image()
    while left:
        pace.wait(everything=False)
        pace.begin(IDLE_SECONDS)
        while left and pace.fits():
            gpu.host += LAUNCH
            gpu.work(0.0003)
            pace.launched()
            left -= 1
    pace.wait(everything=True)
    assert pace.ended() and gpu.host <= 200 * 0.0003 + 4 * LAUNCH


def test_an_image_that_was_given_up_says_nothing_of_the_next() -> None:
    gpu = Gpu()
    pace = TowerPace(DeviceWatch(gpu.event), DEVICE_SHARE)
    pace.begin_image()
    pace.begin(1.0)
    gpu.work(0.5)
    pace.launched()
    pace.begin_image()
    assert pace.seconds == 0.0 and pace.ended() and gpu.host == 0.5
    pace.begin(0.001)
    assert pace.fits()


def test_a_cpu_stops_by_the_clock() -> None:
    """A piece has ended when it returns, so a slow one ends its slice, and no step waits for it later."""
    now = [0.0]
    pace = TowerPace(HostWatch(lambda: now[0]), HOST_SHARE)
    pace.begin_image()
    counts = []
    for seconds in (0.001, 0.004):
        pace.begin(0.0085)
        count = 0
        while pace.fits():
            now[0] += seconds
            pace.launched()
            count += 1
        counts.append(count)
    assert counts[0] == 8 and counts[1] == 2 and pace.ended() and pace.delay() == 0.0
    assert pace.seconds == pytest.approx(8 * 0.001 + 2 * 0.004)


def test_a_tower_on_a_cpu_has_the_share_of_a_prompt() -> None:
    """Both in one gap are less than two and a half steps, with the step itself."""
    pace = pace_of(torch.device("cpu"))
    assert pace.share_behind(False) == HOST_SHARE and 1 + HOST_SHARE + pace.share_behind(True) < 2.5
    device = TowerPace(DeviceWatch(Gpu().event), DEVICE_SHARE)
    assert device.share_behind(True) == device.share_behind(False) == DEVICE_SHARE
