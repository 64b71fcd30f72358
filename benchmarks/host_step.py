"""Microseconds that the host takes of a decode step, by part: a real engine and tokenizer, and a device that has the
tokens already. Without a GPU.

    PYTHONPATH=src python benchmarks/host_step.py --batch 1 64 256 --out rows.json

schedule: which sequences run. batch: their rows, as a graph reads them. sample: a token of each row. commit: tokens,
pages, stops and outputs of sequences. text: tokens to text. message: the outputs in msgpack. step_us is all of these,
as one: it is timed without clocks inside. server_us is the API process's: the message read, and its SSE events written.
--sampled: rows have a temperature, top_k and top_p; their candidates have come from the device already.

Columns are medians of steps; step_us and server_us are time of their thread. --old: sources of another commit. Each has
a process, and they are timed in turns: old, new, new, old. Columns are then medians of these, and `times` is how many
times as fast a step has become.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from tandem.bench.rows import machine_name, stamp, write
from tandem.engine.engine import Engine
from tandem.engine.graphs.inputs import GraphInputs, GraphPlan
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.sampling import on_device
from tandem.engine.sampling.logits import DeviceLogits, HostRows
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.batch import BatchArrays
from tandem.engine.step.step import Running, Step, StepOutput
from tandem.machine.machine import Machine
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.planner.plan import Plan
from tandem.process.garbage import loaded_is_kept
from tandem.server.chat.answer_parser import AnswerRules
from tandem.server.chat.openai.schema import ChatMessage, ChatRequest
from tandem.server.chat.openai.writer import ChatWriter
from tandem.server.engine_client import EngineClient, decode
from tandem.server.messages import StepOutputs
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope
from tandem.text.tokenizer import Tokenizer

CPU, SOURCES = torch.device("cpu"), Path(__file__).parent.parent / "src"
PAGE, CONTEXT, PROMPT, WARM, VOCAB = 16, 4096, 64, 20, 1 << 18
OTHER = "Größe und Maß; 速度は毎秒百万トークン; скорость 42 %; 🙂🚀 naïve café.\n"
TEXT = 3 * (SOURCES.parent / "CONTRIBUTING.md").read_text() + OTHER
SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
Clocks = dict[str, float]


class Told:
    """`Executor` of steps whose tokens are known. best: of the next one, as a graph's last kernel writes them."""

    def __init__(self, batch: int) -> None:
        self._arrays = BatchArrays(PAGE, max(batch, 2) * PROMPT, row_per_sequence=True)
        self._inputs = GraphInputs(batch, GraphPlan((batch,), CONTEXT // PAGE), CPU)
        self._logits, self._rows = torch.zeros(1, 1).expand(batch, VOCAB), HostRows(CPU)
        self.best: torch.Tensor = torch.zeros(batch, 2, dtype=torch.float64)

    def start(self, step: Step, overlaps: bool = False) -> Running[StepOutput]:
        filled = self._arrays.fill(step.chunks)
        if filled.single_rows == len(step.chunks):
            self._inputs.fill(filled)
        return Running(lambda: StepOutput(step, DeviceLogits(self._logits, self.best, self._rows)))

    def commit(self, tokens: int) -> None: ...

    def pause(self, chunks: Any) -> None:
        return None

    def runs_beside(self, chunks: Any) -> bool:
        return True

    def step_ended(self) -> bool:
        return True

    def after_failure(self) -> None: ...


def engine_of(tokenizer: Tokenizer, batch: int) -> Engine:
    norm = Norm(1e-6)
    layer = pre_norm(Gqa(heads=1, kv_heads=1, head_dim=1, rope=Rope(1.0, 0)), Dense(1), norm)
    config = ModelConfig(
        model_type="fake", hidden=1, vocab=VOCAB, layers=(layer,), norm=norm, tied_embeddings=False,
        max_positions=CONTEXT, eos_ids=(2,),
    )  # fmt: skip
    plan = Plan(
        dtype="float32", expert_format="f32", tier="scalar", cpus=(0,), context_length=CONTEXT, page_size=PAGE,
        num_pages=batch * CONTEXT // PAGE, max_running_requests=batch, max_step_tokens=max(batch, 2) * PROMPT,
        radix_cache=True, fuse_shared_experts=False,
    )  # fmt: skip
    engine: Any = Engine.from_parts(EngineParts(plan, config, None, tokenizer))  # type: ignore[arg-type]
    engine._runner = engine._overlap._executor = Told(batch)
    return engine  # type: ignore[no-any-return]


class Session:
    """Sequences that all decode, and the tokens that each is to get."""

    def __init__(self, tokenizer: Tokenizer, asked: Namespace, batch: int) -> None:
        self.engine, self.batch, self._at = engine_of(tokenizer, batch), batch, PROMPT - 1
        self._ids = np.array(tokenizer.encode(TEXT, add_special_tokens=False))
        self._offsets = np.arange(batch) * 37
        self.runner: Told = self.engine._runner  # type: ignore[assignment]
        self._encoder = msgspec.msgpack.Encoder()
        sampling = SamplingSettings(ignore_eos=True, **(SAMPLED if asked.sampled else {"temperature": 0.0}), seed=3)
        self.requests = [
            GenerateRequest(id=str(i), prompt_ids=self._tokens(range(PROMPT))[:, i].tolist(), sampling=sampling)
            for i in range(batch)
        ]
        for request in self.requests:
            self.engine.add(request)
        self.tell()
        self.prompts = self.engine.step()
        assert len(self.prompts) == batch

    def _tokens(self, at: range) -> Any:
        """int [positions, batch]."""
        return self._ids[(np.array(at)[:, None] + self._offsets[None]) % len(self._ids)]

    def tell(self) -> None:
        """The next tokens. Not the host's part."""
        self._at += 1
        best = np.zeros((self.batch, 2))
        best[:, 0] = self._tokens(range(self._at, self._at + 1))[0]
        self.runner.best = torch.from_numpy(best)

    def step(self) -> bytes:
        return self.message(self.engine.step())

    def message(self, outputs: list[TokenOutput]) -> bytes:
        return self._encoder.encode(StepOutputs(outputs=list(outputs)))


class Near:
    """`_fetched` of a device: the most probable tokens of rows, the same for all but for their ids."""

    def __init__(self, ids: Any) -> None:
        self._ids = np.unique(ids)
        self._rows = dict[int, Any]()

    def __call__(self, logits: Any, best: Any, numbers: Any, count: int) -> Any:
        if len(best) not in self._rows:
            ids = np.stack([np.resize(np.roll(self._ids, row), count) for row in range(len(best))])
            values = np.broadcast_to(np.linspace(0.0, -12.0, count), ids.shape)
            mass = np.full((len(best), 1), np.exp(values[0] / SAMPLED["temperature"]).sum())
            columns = mass, np.full_like(mass, 3.0), ids[:, :1], values[:, :1], ids, values
            self._rows[len(best)] = np.concatenate(columns, axis=1)
        return self._rows[len(best)]


class Server:
    """The API process's part, without sockets: a reader for each request, which writes events."""

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        quiet: Any = SimpleNamespace(
            first_token=lambda *_: None, next_token=lambda *_: None, finished=lambda *_: None, used=lambda: None
        )
        self._client = EngineClient(quiet)
        self._client.attach(lambda message: None)
        state: Any = SimpleNamespace(tokenizer=tokenizer, model_name="demo")
        body = ChatRequest(messages=[ChatMessage(role="user", content="hi")])
        prepared: Any = SimpleNamespace(prompt_ids=[1], new_parser=AnswerRules().new_parser)
        self._streams = [self._client.submit([request]) for request in session.requests]
        self._writers = [ChatWriter(state, body, prepared, request.id) for request in session.requests]
        self.nbytes = 0

    async def read(self) -> None:
        async def stream(number: int) -> None:
            while outputs := await self._streams[number].next():
                self.nbytes += len(self._writers[number].frames(outputs))

        self._readers = [asyncio.create_task(stream(number)) for number in range(len(self._streams))]
        await asyncio.sleep(0)

    async def take(self, message: bytes) -> float:
        started, before = thread_time(), self.nbytes
        self._client.deliver(decode(message))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert self.nbytes > before
        return thread_time() - started

    async def seconds(self, messages: list[bytes]) -> list[float]:
        await self.read()
        times = [await self.take(message) for message in messages]
        for reader in self._readers:
            reader.cancel()
        return times


@contextmanager
def clocked(clocks: Clocks, *calls: tuple[Any, str, str]) -> Iterator[None]:
    """Adds up the seconds inside of (owner, method, part)."""
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in calls]
    for owner, name, part in calls:
        setattr(owner, name, timed(getattr(owner, name), clocks, part))
    try:
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method) if method is not None else delattr(owner, name)


def timed(call: Callable[..., Any], clocks: Clocks, part: str) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        started = perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            clocks[part] = clocks.get(part, 0.0) + perf_counter() - started

    return run


def parts_of(session: Session, steps: int) -> list[Clocks]:
    """Seconds of each part, step by step."""
    from tandem.text.detokenizer import IncrementalDecoder

    engine: Any = session.engine
    clocks: Clocks = {}
    rows: list[Clocks] = []
    calls = (
        (engine._scheduler, "next", "schedule"), (session.runner, "start", "batch"), (DeviceLogits, "chosen", "sample"),
        (engine, "_committed", "commit"), (IncrementalDecoder, "push", "text"), (session, "message", "message"),
        (engine, "step", "engine"),
    )  # fmt: skip
    with clocked(clocks, *calls):
        for _ in range(steps):
            session.tell()
            clocks.clear()
            session.step()
            rows.append(parted(dict(clocks)))
    return rows


def parted(clocks: Clocks) -> Clocks:
    own = clocks["commit"] - clocks["sample"] - clocks["text"]
    rest = clocks.pop("engine") - sum(clocks[part] for part in ("schedule", "batch", "commit"))
    return clocks | {"commit": own, "rest": rest}


def whole_steps(session: Session, steps: int) -> tuple[list[float], list[bytes]]:
    """Seconds of steps, and their messages."""
    seconds, messages = [], []
    for _ in range(steps):
        session.tell()
        started = thread_time()
        message = session.step()
        seconds.append(thread_time() - started)
        messages.append(message)
    return seconds, messages


def measured(asked: Namespace, tokenizer: Tokenizer, batch: int) -> dict[str, Any]:
    session = Session(tokenizer, asked, batch)
    server, first = Server(session, tokenizer), session.message(session.prompts)
    with loaded_is_kept():
        _, before = whole_steps(session, WARM)
        seconds, messages = whole_steps(session, asked.steps)
        parts = parts_of(session, asked.steps)
        served = asyncio.run(server.seconds([first, *before, *messages]))[1 + WARM :]
    middle = {f"{part}_us": statistics.median(row[part] for row in parts) * 1e6 for part in parts[0]}
    middle |= {"step_us": statistics.median(seconds) * 1e6, "server_us": statistics.median(served) * 1e6}
    columns = {name: round(value, 1) for name, value in middle.items()}
    return {"batch": batch, "steps": asked.steps, "sampled": asked.sampled} | columns


class Sources:
    """A process that runs this file with some sources."""

    def __init__(self, folder: Path, asked: Namespace) -> None:
        flags = ["--serve", "--steps", str(asked.steps), *(["--sampled"] if asked.sampled else [])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *flags, *(["--tokenizer", asked.tokenizer] if asked.tokenizer else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(folder)},
        )  # fmt: skip

    def measured(self, batch: int) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(batch, file=self._process.stdin, flush=True)
        row: dict[str, Any] = json.loads(self._process.stdout.readline())
        return row


def in_turns(asked: Namespace) -> Iterator[dict[str, Any]]:
    old, new = Sources(asked.old, asked), Sources(SOURCES, asked)
    for batch in asked.batch:
        runs: dict[Sources, list[dict[str, Any]]] = {old: [], new: []}
        for source in (old, new, new, old) * asked.rounds:
            runs[source].append(source.measured(batch))
        before, after = map(middle_of, runs.values())
        yield before | {"sources": "old", "rounds": asked.rounds}
        times = round(before["step_us"] / after["step_us"], 2)
        yield after | {"sources": "new", "rounds": asked.rounds, "times": times}


def middle_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The first, with medians for its times."""
    times = [name for name in runs[0] if name.endswith("_us")]
    return runs[0] | {name: round(statistics.median(run[name] for run in runs), 1) for name in times}


def alone(asked: Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    for batch in map(int, sys.stdin) if asked.serve else asked.batch:
        yield {"bench": "host_step"} | measured(asked, tokenizer, batch)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="folder; default: the demo model's, which is built")
    parser.add_argument("--old", type=Path, help="folder with another commit's tandem/ and its extension")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="batches come by line; for --old")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in in_turns(asked) if asked.old else alone(asked, tokenizer_of(asked)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if asked.out is not None:
        write([row | stamp(machine_name(Machine.detect(), 1)) for row in rows], asked.out)


def tokenizer_of(asked: Namespace) -> Tokenizer:
    from tandem.checkpoint import resolve_model
    from tandem.checkpoint.demo import build_demo

    tokenizer = Tokenizer.load(asked.tokenizer or build_demo(resolve_model("demo")))
    if asked.sampled:
        on_device._fetched = Near(tokenizer.encode(TEXT, add_special_tokens=False))  # type: ignore[assignment]
    return tokenizer


if __name__ == "__main__":
    main()
