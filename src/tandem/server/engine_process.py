"""The engine's own process: `python -m tandem.server.engine_process`. Started only by the supervisor.

Loop: take what has arrived, run one step, send its tokens in one message. With nothing to do it sleeps on the socket.
It sends `EngineStats` at least every `HEARTBEAT_SECONDS`; the supervisor's watchdog listens for them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import zmq

from tandem.engine.protocol import (
    AbortRequest,
    EngineStats,
    ExpertsRecorded,
    ExpertTraffic,
    GenerateRequest,
    LookAtExperts,
    RecordExperts,
    SamplingSettings,
    TokenOutput,
)
from tandem.errors import (
    BusyError,
    EngineError,
    RequestError,
    TandemError,
)
from tandem.flags.engine_config import EngineConfig
from tandem.machine.memory_claims import memory_claims
from tandem.planner.memory import gib
from tandem.planner.plan import Plan
from tandem.process.children import signal_at_end_of
from tandem.process.garbage import loaded_is_kept
from tandem.server.engine_errors import describe, lost_rank, start_failed
from tandem.server.load_progress import LoadProgress
from tandem.server.messages import (
    CacheFlushed,
    EngineConnected,
    EngineEnds,
    EngineReady,
    FlushCache,
    FromEngine,
    RequestRefused,
    StartEngine,
    StepOutputs,
    StopEngine,
    ToEngine,
    WayChosen,
)
from tandem.server.terminal import log_to_terminal, outlive_terminal, tell_lost_ranks
from tandem.spec.vision import Tower

if TYPE_CHECKING:
    from tandem.engine.engine import Engine
    from tandem.engine.start.parts import EngineParts

HEARTBEAT_SECONDS = 1.0  # an idle engine reports this often
STATS_SECONDS = 0.25  # a busy engine reports at most this often
FILE_SECONDS = 0.02  # how often an idle engine looks whether a file is written
START_MESSAGE_SECONDS = 60.0  # the supervisor sends StartEngine at once; without it there is nobody to serve
HEARD_SECONDS = 10.0  # until the supervisor has heard why a start failed: it may be busy


class SteppedEngine(Protocol):
    """Part of `tandem.engine.Engine` that the loop needs; the tests' fake engine has the same methods."""

    def add(self, request: GenerateRequest) -> object: ...
    def abort(self, request_id: str) -> object: ...
    def step(self, has_new_request: Callable[[], bool] = ...) -> Sequence[TokenOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def flush_cache(self) -> object: ...
    def expert_traffic(self) -> ExpertTraffic: ...
    def record_experts(self, action: str) -> Future[ExpertsRecorded]: ...
    def close(self) -> object: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what the API process is told about it."""

    engine: SteppedEngine
    plan: Plan
    model_path: str
    model_type: str
    vocab_size: int
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    vision: Tower | None = None

    def ready_message(self) -> EngineReady:
        return EngineReady(**{name: getattr(self, name) for name in EngineReady.__struct_fields__})


Tell = Callable[[FromEngine], None]
"""Tells the API process."""


def load_engine(
    config: EngineConfig, ranks: str = "", failed: Sequence[str] = (), tell: Tell = lambda _: None
) -> LoadedEngine:
    """Resolve the model, print the plan, build the real engine and say how far it is. ranks, failed: as `StartEngine`
    has them."""
    from tandem.checkpoint import resolve_model
    from tandem.engine.engine import Engine
    from tandem.engine.ranks.leader import leading
    from tandem.engine.start.loader import chosen_way, load_parts
    from tandem.engine.start.sampling_defaults import sampling_defaults
    from tandem.kernels.free_memory import keep_free_memory
    from tandem.kernels.kernel_loads import kernel_loads, watch_triton

    watch_triton()
    path = resolve_model(config.model)
    with memory_claims(config.model) as claims:  # until all memory is taken
        way = chosen_way(config, failed, claims)
        config = way.choice.config
        if way.choice.decision is not None:
            sizes = config.tensor_parallel_size, config.pipeline_parallel_size
            tell(WayChosen(ranks=sizes[0], stages=sizes[1], flag=way.choice.decision.value))
        endpoint = ranks if config.tensor_parallel_size > 1 else ""
        with LoadProgress() as progress, leading(endpoint, config.tensor_parallel_size) as leader:
            parts = load_parts(config, progress, lambda plan: print_plan(plan, config.notices()), leader, way, claims)
            engine = Engine.from_parts(parts)
        take_cpus(parts)
        keep_free_memory()
        if not config.skip_server_warmup:
            warm_up(engine, engine.model_config.vocab)
            warm_gpu(engine, parts)
    kernel_loads.ready()
    model = engine.model_config
    defaults = sampling_defaults(config, path)
    facts = (str(path), model.model_type, model.vocab, defaults, model.vision)
    return LoadedEngine(engine, engine.plan, *facts)


def take_cpus(parts: EngineParts) -> None:
    """This thread runs steps from now on, and has worker 0's CPU. Beside a GPU it shares that with the thread that
    answers posts: one of them sleeps while the other has much to do. It also has those that no worker has; of several
    ranks each has its own CPUs alone."""
    cpu, free = parts.plan.cpus[0], os.sched_getaffinity(0) - set(parts.plan.cpus)
    free = free if parts.plan.ranks == 1 else set()
    pin_main_thread(cpu)
    if parts.handoff is not None and cpu >= 0:
        os.sched_setaffinity(0, free | {cpu})


def pin_main_thread(cpu: int) -> None:
    """This thread is the pool's worker 0, so it gets that worker's CPU (-1: none). Only once the pool's own threads
    exist: a new thread inherits the affinity of the one that makes it."""
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})


def print_plan(plan: Plan, known_notices: Sequence[str]) -> None:
    """With what it takes of each memory, and the notices that were not said yet: those that depend on the machine and
    the model."""
    if plan.idle:
        print(f"note: {plan.idle}; `kt plan` with the same flags says what would use it", flush=True)
    for decision in plan.decisions:
        print(f"  {decision.name:<24} {decision.value:<16}  {decision.reason}", flush=True)
    for ledger in plan.ledgers:
        parts = ", ".join(f"{entry.name} {gib(entry.nbytes)}" for entry in ledger.entries)
        total = f"together {gib(ledger.total_bytes)} of {gib(ledger.budget_bytes)} that may be used"
        print(f"  {ledger.place}: {parts}; {total}", flush=True)
    for notice in plan.notices:
        if notice not in known_notices:
            print(f"note: {notice}", flush=True)


def warm_up(engine: SteppedEngine, vocab_size: int) -> None:
    """A first request, whose answer nobody sees: first uses of memory and libraries are slow. Raises EngineError if it
    fails: an engine that cannot answer must not count as ready."""
    sampling = SamplingSettings(max_tokens=2, temperature=0.0, ignore_eos=True)
    engine.add(GenerateRequest(id="warm-up", prompt_ids=[vocab_size // 2] * 2, sampling=sampling))
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason == "error":
                raise EngineError(f"the first step failed: {output.error}")
    engine.flush_cache()


def warm_gpu(engine: Engine, parts: EngineParts) -> None:
    """Loads kernels of prompts, batches and sampling before somebody waits for them. Not for modules of Transformers
    that keep more than keys and values: they may look at sequences, and these steps have none."""
    from tandem.engine.step.prefill import PausingModel
    from tandem.mechanisms.cost import cost_of

    mixers = parts.model_config.mixers
    ours = isinstance(parts.model, PausingModel) or all(cost_of(mixer).warms_up for mixer in mixers)
    if ours and parts.handoff is not None and parts.handoff.device.type == "cuda":
        from tandem.engine.start.warm_kernels import warm_kernels

        warm_kernels(engine.gpu_runner, parts)


class EngineLoop:
    """Feeds one engine from one socket until `StopEngine`."""

    def __init__(self, engine: SteppedEngine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._stopping = False
        self._early = deque[ToEngine]()  # came while a step ran
        self._stats_at = 0.0
        self._recordings: deque[Future[ExpertsRecorded]] = deque()  # answered in this order

    def has_work(self) -> bool:
        return bool(self._early) or self._engine.has_work()

    def run(self) -> None:
        while not self._stopping:
            if not self.has_work():
                self._socket.poll(int(1000 * (FILE_SECONDS if self._recordings else HEARTBEAT_SECONDS)))
            self.turn()

    def turn(self) -> None:
        """Messages, one step, news. An idle engine, or one that has just become so, reports at once, and before the
        step's outputs: who has its whole answer finds it counted."""
        changed = self._receive()
        outputs = self._engine.step(self._has_new_request) if self.has_work() else ()
        self._answer_recordings()
        self._report(force=changed or not self.has_work())
        if outputs:
            self._send(StepOutputs(outputs=list(outputs)))

    def _receive(self) -> bool:
        """Handle every message that has arrived; True if there was one."""
        changed = False
        while self._take() or self._early:
            changed = True
            self._handle(self._early.popleft())
        return changed

    def _take(self) -> bool:
        """The next message, if there is one."""
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        message: ToEngine = self._decoder.decode(data)  # msgspec types it from 0.23 on
        self._early.append(message)
        return True

    def _has_new_request(self) -> bool:
        """Whether a request came while a step runs, or one is to end. Nothing is handled before its end."""
        while self._take():
            pass
        return any(isinstance(message, GenerateRequest | AbortRequest) for message in self._early)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case GenerateRequest():
                self._add(message)
            case AbortRequest(id=request_id):
                self._engine.abort(request_id)
            case FlushCache():
                self._engine.flush_cache()
                self._report(force=True)  # first: who asks next finds the cache empty
                self._send(CacheFlushed())
            case LookAtExperts():
                self._send(self._engine.expert_traffic())
            case RecordExperts(action=action):
                self._recordings.append(self._engine.record_experts(action))
            case StopEngine():
                self._stopping = True
            case StartEngine():
                raise EngineError("the engine was started twice")

    def _add(self, request: GenerateRequest) -> None:
        """A request that the engine does not take, for whatever reason, is answered; the others go on."""
        try:
            self._engine.add(request)
        except RequestError as error:
            self._send(RequestRefused(id=request.id, message=str(error), param=error.param))
        except BusyError as error:
            self._send(RequestRefused(id=request.id, message=str(error), fault="busy"))
        except Exception as error:
            traceback.print_exc()
            self._engine.abort(request.id)
            self._send(RequestRefused(id=request.id, message=describe(error), fault="engine"))

    def _answer_recordings(self) -> None:
        while self._recordings and self._recordings[0].done():
            self._send(_recorded(self._recordings.popleft()))

    def _report(self, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_at >= STATS_SECONDS:
            self._stats_at = now
            self._send(self._engine.stats())

    def _send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def _recorded(done: Future[ExpertsRecorded]) -> ExpertsRecorded:
    error = done.exception()
    if error is None:
        return done.result()
    return ExpertsRecorded(
        error=describe(error), fault="request" if isinstance(error, RequestError) else "engine"
    )


def find_loader(name: str) -> Callable[..., LoadedEngine]:
    module, _, function = name.partition(":")
    return cast(Callable[..., LoadedEngine], getattr(importlib.import_module(module), function))


def tie_to_parent(parent: int) -> None:
    """Die when the API process does, and leave Ctrl+C and a group-wide SIGTERM to it: it drains, then stops us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal_at_end_of(parent, signal.SIGKILL)


def connect(endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)  # never block or drop: a burst of tokens waits in memory
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(endpoint)
    socket.send(msgspec.msgpack.encode(EngineConnected()))
    return socket


def receive_start(socket: zmq.Socket[bytes]) -> StartEngine:
    if not socket.poll(int(START_MESSAGE_SECONDS * 1000)):
        raise EngineError("the engine process was started by hand; use `kt serve`")
    return msgspec.msgpack.decode(socket.recv(), type=StartEngine)


def _tell(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(msgspec.msgpack.encode(message))


def run_engine(socket: zmq.Socket[bytes]) -> int:
    """Build the engine, say so, and loop. Returns the exit code."""
    try:
        start = receive_start(socket)
        log_to_terminal(start.config.log_level)
        load, tell = find_loader(start.loader), partial(_tell, socket)
        loaded = load(start.config, start.ranks, start.failed, tell) if start.ranks else load(start.config)
    except Exception as error:
        if not isinstance(error, TandemError | MemoryError):
            traceback.print_exc()
        _tell(socket, start_failed(error))
        socket.poll(int(HEARD_SECONDS * 1000))  # once this process has ended, nobody listens to it for long
        return 1
    try:
        with loaded_is_kept():
            _tell(socket, loaded.ready_message())
            EngineLoop(loaded.engine, socket).run()
    except EngineError as error:
        if lost := lost_rank(error):
            _tell(socket, EngineEnds(message=str(lost)))
        raise
    finally:
        loaded.engine.close()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the API process")
    options: Any = parser.parse_args(arguments)
    tie_to_parent(options.parent)
    outlive_terminal()
    tell_lost_ranks()
    socket = connect(options.endpoint)
    try:
        return run_engine(socket)
    except EngineError as error:  # no later step could work
        if lost_rank(error) is None:
            raise
        print(f"the engine ends: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        socket.close()
        zmq.Context.instance().term()


if __name__ == "__main__":
    sys.exit(main())
