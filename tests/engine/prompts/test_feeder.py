"""A thread gives pieces while the engine's thread waits, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from time import monotonic, sleep

import pytest

from tandem.engine.step.streams import LaunchThread


class FakePieces:
    def __init__(self, count: int, fails: int = -1) -> None:
        self.left, self.fails, self.threads = count, fails, set[str]()
        self.room = threading.Event()
        self.room.set()

    def pieces_left(self) -> int:
        return self.left

    def piece(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.left == self.fails:
            raise RuntimeError("a layer failed")
        self.left -= 1

    def wait_for_room(self) -> None:
        self.room.wait()


def until(condition) -> None:
    ends = monotonic() + 60
    while not condition():
        assert monotonic() < ends
        sleep(0.001)


def test_pieces_are_given_while_it_is_open() -> None:
    entered: list[str] = []
    feeder = LaunchThread(lambda: entered.append(threading.current_thread().name))
    pieces = FakePieces(5)
    feeder.start(pieces)
    sleep(0.02)
    assert pieces.left == 5
    with feeder.opened():
        until(lambda: not pieces.left)
    feeder.look()
    feeder.finish()
    assert pieces.threads == set(entered) and threading.current_thread().name not in pieces.threads


def test_nobody_waits_for_an_open_door_at_the_end() -> None:
    feeder, pieces = LaunchThread(), FakePieces(3)
    feeder.start(pieces)
    feeder.finish()
    assert not pieces.left


def test_a_stopped_pass_gives_no_piece_any_more() -> None:
    feeder, first, second = LaunchThread(), FakePieces(3), FakePieces(2)
    first.room.clear()
    feeder.start(first)
    with feeder.opened():
        sleep(0.01)
    threading.Timer(0.05, first.room.set).start()
    feeder.stop()
    assert first.left == 3
    feeder.start(second)
    feeder.finish()
    assert (first.left, second.left) == (3, 0)


def test_what_a_piece_raises_is_raised_in_the_engines_thread() -> None:
    feeder, pieces = LaunchThread(), FakePieces(3, fails=2)
    feeder.start(pieces)
    with pytest.raises(RuntimeError, match="a layer failed"):
        feeder.finish()
    with pytest.raises(RuntimeError, match="a layer failed"):
        feeder.look()
    feeder.stop()
    feeder.look()
    feeder.start(again := FakePieces(1))
    feeder.finish()
    assert not again.left


def test_a_process_ends_with_a_pass_under_way() -> None:
    code = """
from tandem.engine.step.streams import LaunchThread
class Pieces:
    def pieces_left(self): return 3
    def piece(self): ...
    def wait_for_room(self): ...
feeder = LaunchThread()
feeder.start(Pieces())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_thread_ends_with_its_feeder() -> None:
    before = set(threading.enumerate())
    feeder = LaunchThread()
    (thread,) = set(threading.enumerate()) - before
    feeder.start(FakePieces(2))
    feeder.finish()
    del feeder
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_an_error_of_a_pass_that_is_given_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    feeder = LaunchThread()
    feeder.start(FakePieces(3, fails=3))
    with feeder.opened():
        until(lambda: feeder._launched is not None and feeder._launched.ended.is_set())
    feeder.stop()
    assert "a layer failed" in caplog.text
