"""Signals that wait for the end of a step: none is lost, whatever others do, and handlers are as before."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tandem.process.held_signals import HELD, held_signals


class Came(BaseException):
    """Raised by a handler."""


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Signals that reached their handlers, each of which raises."""
    numbers: list[int] = []

    def handler(number: int, _frame: object) -> None:
        numbers.append(number)
        raise Came

    before = [signal.signal(number, handler) for number in HELD]
    yield numbers
    for number, handler_before in zip(HELD, before, strict=True):
        signal.signal(number, handler_before)


def test_every_signal_that_came_is_handled(came: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in HELD]
    with pytest.raises(Came), held_signals():
        for number in HELD:
            signal.raise_signal(number)
        assert came == []
    assert came == list(HELD)
    assert [signal.getsignal(number) for number in HELD] == handlers


def test_a_second_signal_does_not_wait(came: list[int]) -> None:
    with pytest.raises(Came), held_signals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Came):
            signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
    assert came == [signal.SIGINT, signal.SIGINT]


def test_one_that_strikes_while_handlers_are_given_back_swallows_no_other(
    came: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back, set_handler = [], signal.signal

    def striking(number: int, handler: object) -> object:
        before = set_handler(number, handler)
        if hasattr(before, "give_back"):
            given_back.append(number)
            signal.raise_signal(number)
        return before

    with monkeypatch.context() as patched, pytest.raises(Came):
        patched.setattr(signal, "signal", striking)
        with held_signals():
            pass
    assert given_back == came == [HELD[0]]
    for number in HELD[1:]:
        with pytest.raises(Came):
            signal.raise_signal(number)
    assert came == list(HELD)


def test_a_handler_that_is_set_meanwhile_stays(came: list[int]) -> None:
    with held_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_handlers_that_are_not_pythons_are_not_held() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with held_signals():
            assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)
