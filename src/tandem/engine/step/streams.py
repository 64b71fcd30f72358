"""`Streams`: the CUDA streams of an engine, which are made here alone. `LaunchThread`: the thread that gives pieces to
one.

A kernel of high priority waits until a block before it has ended. On multiprocessors that a prompt never has, it waits
for nobody. So prompts may leave some alone; CUDA calls a share of them a green context.

Giving a piece of a prompt costs the host about as long as the GPU takes to compute it. The engine's thread would either
let the GPU idle or let those who decode wait. So another thread gives pieces, while that one waits for a step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol, TypeVar
from weakref import finalize

import torch

from tandem.errors import EngineError

HIGH_PRIORITY = -1
SWITCH_SECONDS = 2e-4  # in which Python's lock changes hands: with its usual 5 ms a step's end would wait for pieces
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Streams:
    """One for steps that are replayed and for choosing tokens, which has the right of way; one for all other steps.
    None: there is only one. A third one for tasks beside which graphs are replayed, where some multiprocessors are
    reserved; it is the second one elsewhere."""

    def __init__(self, device: torch.device, overlap: bool, reserved_sms: int = 0) -> None:
        """reserved_sms: multiprocessors that tasks leave to steps."""
        self._device = device
        self.steps: torch.cuda.Stream | None = None
        self._others = self._tasks = self.steps
        self._reserved_sms = reserved_sms
        if overlap and device.type == "cuda":
            self.steps, self._others = _leased(self, (device,), partial(_pair, device))
            self._tasks = self._others
            if reserved_sms:
                reserved = partial(reserved_stream, device, reserved_sms)
                self._tasks = _leased(self, (device, reserved_sms), reserved)

    def enter(self) -> None:
        """Before anything is captured. This thread computes on the first one from now on."""
        if self.steps is not None:
            torch.cuda.synchronize(self.steps.device)
            torch.cuda.empty_cache()  # what another stream has freed cannot be used on this one
            torch.cuda.set_stream(self.steps)

    @contextmanager
    def side_stream(self, after: bool = True, reserve_sms: bool = False) -> Iterator[None]:
        """after: what is computed here comes after all that the first stream was given until now. False: it needs
        nothing of that, and a graph may be running there. reserve_sms: `reserved_sms` are left to steps, if any."""
        stream = self._tasks if reserve_sms else self._others
        if stream is None:
            yield
            return
        if after:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The first stream goes on after all that was computed aside."""
        for stream in (self._others, self._tasks):
            if stream is not None and self.steps is not None:
                self.steps.wait_stream(stream)

    def cut(self, reserve_sms: bool) -> AbstractContextManager[None]:
        """Around the capture of what is replayed there: products are cut for its multiprocessors."""
        return products_leave(self._reserved_sms if reserve_sms else 0)

    def finish(self) -> None:
        """Waits for what was computed aside; of only one stream for all: images of the next task would be written while
        the last one's are read."""
        if self.steps is None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for stream in (self._others, self._tasks):
            if stream is not None:
                stream.synchronize()


_idle: dict[tuple[object, ...], list[Any]] = {}
"""Streams that no engine has, by what they are for."""


def _leased(owner: object, key: tuple[object, ...], create: Callable[[], T]) -> T:
    """Streams that are one engine's as long as it lives: another one's steps would be recorded in its graphs. An engine
    that is made anew finds what the memory of the last one belongs to."""
    idle = _idle.setdefault(key, [])
    try:
        streams: T = idle.pop()  # without a look before: another thread's engine may take the last ones in between
    except IndexError:
        streams = create()
    finalize(owner, idle.append, streams).atexit = False
    return streams


def _pair(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY), torch.cuda.Stream(device, priority=0)


def reserved_stream(device: torch.device, count: int, driver: Any = None) -> torch.cuda.Stream:
    """Stream that leaves multiprocessors alone. count: multiprocessors that are left alone, at least; the GPU divides
    them in groups of its own. driver: `cuda.bindings.driver`, or what stands for it in a test. Raises EngineError where
    the driver is too old, or the GPU too small."""
    if driver is None:
        driver = _driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        stream = _create(driver, _called(driver, "cuDeviceGet", index), count)
    return torch.cuda.ExternalStream(stream, device=torch.device("cuda", index))


@contextmanager
def products_leave(count: int) -> Iterator[None]:
    """Gives library products that are captured meanwhile `count` blocks fewer. Blocks for a whole GPU would take two
    rounds: half of the experts on an H100, 16 reserved, prompts at 0.74 of their speed in place of 0.67."""
    leave = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if leave is None or not count:
        yield
        return
    leave(count)
    try:
        yield
    finally:
        leave(None)


def _create(driver: Any, number: Any, count: int) -> int:
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _called(driver, "cuDeviceGetDevResource", number, kind)
    if not 0 < count < whole.sm.smCount:
        raise EngineError(
            f"--prefill-reserved-sms {count}: this GPU has {whole.sm.smCount}; give fewer, or leave it out"
        )
    _, _, rest = _called(driver, "cuDevSmResourceSplitByCount", 1, whole, 0, count)
    described = _called(driver, "cuDevResourceGenerateDesc", [rest], 1)
    context = _called(driver, "cuGreenCtxCreate", described, number, _DEFAULT_STREAM)
    return int(_called(driver, "cuGreenCtxStreamCreate", context, _NON_BLOCKING, 0))


def _called(driver: Any, name: str, *arguments: Any) -> Any:
    """Results of a driver's function besides its error. Raises EngineError."""
    try:
        error, *outputs = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as missing:  # it has no such function
        raise EngineError(_refused(f"{name} is missing")) from missing
    if int(error):
        raise EngineError(_refused(f"{name} fails with error {int(error)}"))
    return outputs[0] if len(outputs) == 1 else outputs


def _refused(why: str) -> str:
    return (
        f"--prefill-reserved-sms: {why}. It needs CUDA 12.4 or newer, in the driver and in cuda-bindings; "
        "update them, or leave the flag out"
    )


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineError(_refused("the package cuda-bindings is missing")) from error
    return driver


# -- the thread ---


class LaunchablePieces(Protocol):
    """A giver of pieces."""

    def pieces_left(self) -> int: ...

    def piece(self) -> None: ...

    def wait_for_room(self) -> None:
        """Returns when the GPU has little enough to do."""
        ...


class QueuedLaunches:
    """One task on its way. error: what ended it before its time."""

    def __init__(self, paused: LaunchablePieces) -> None:
        self.paused, self.ended = paused, Event()
        self.stopped = False
        self.error: BaseException | None = None

    def run(self, open_: Event) -> None:
        try:
            while self.paused.pieces_left() and not self.stopped:
                self.paused.wait_for_room()
                open_.wait()
                if not self.stopped:
                    self.paused.piece()
        except BaseException as error:  # the engine's thread raises it
            self.error = error
        finally:
            self.ended.set()


class LaunchThread:
    """One thread, one task at a time. It is made before the engine's thread is pinned to a CPU, so it shares none. A
    process ends without waiting for it: the GPU may never answer."""

    def __init__(self, enter: Callable[[], object] = lambda: None) -> None:
        """enter: called in the thread first."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._queue, self._open = SimpleQueue[QueuedLaunches | None](), Event()
        self._launched: QueuedLaunches | None = None
        Thread(
            target=_serve, args=(enter, self._queue, self._open), name="tandem-prompts", daemon=True
        ).start()

    def start(self, paused: LaunchablePieces) -> None:
        self._launched = QueuedLaunches(paused)
        self._queue.put(self._launched)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Pieces are given meanwhile, by the launch thread. One may still be under way at the end. Within itself
        nothing changes."""
        before = self._open.is_set()
        self._open.set()
        try:
            yield
        finally:
            if not before:
                self._open.clear()

    def look(self) -> None:
        """Raises what a piece raised."""
        if self._launched is not None and self._launched.error is not None:
            raise self._launched.error

    def finish(self) -> None:
        """Waits until all pieces are given. Raises what one of them raised."""
        if self._launched is not None:
            with self.opened():
                self._launched.ended.wait()
            self.look()

    def stop(self) -> None:
        """No piece is given any more when this returns."""
        work, self._launched = self._launched, None
        if work is None:
            return
        work.stopped = True
        with self.opened():
            work.ended.wait()
        if work.error is not None:
            _log.warning("a prompt that was given up had failed before: %s", work.error)

    def __del__(self) -> None:
        self._queue.put(None)


def _serve(enter: Callable[[], object], queue: SimpleQueue[QueuedLaunches | None], open_: Event) -> None:
    """Holds no `LaunchThread`: the thread ends with its engine."""
    enter()
    while (feeding := queue.get()) is not None:
        feeding.run(open_)
        del feeding
