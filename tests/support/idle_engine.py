"""Engines without a model or torch, for tests of the supervisor and of processes alone: they start in a moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec

from echo_tokenizer import END, VOCAB
from tandem.engine.protocol import EngineStats, ExpertsRecorded, ExpertTraffic, GenerateRequest, TokenOutput
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.plan import Plan
from tandem.server.engine_process import LoadedEngine

PLAN = Plan(
    dtype="float32", expert_format="f32", tier="scalar", cpus=(0,),
    context_length=64, page_size=4, num_pages=16, max_running_requests=4, max_step_tokens=16, radix_cache=True,
    fuse_shared_experts=False,
)  # fmt: skip


class IdleEngine:
    """Answers every request with one word."""

    def __init__(self) -> None:
        self._queue: list[GenerateRequest] = []
        self._aborted: list[TokenOutput] = []

    def add(self, request: GenerateRequest) -> None:
        if request.prompt_ids == [13]:
            raise ZeroDivisionError("a bug in add")
        self._queue.append(request)

    def abort(self, request_id: str) -> None:
        ended = [r for r in self._queue if request_id in ("", r.id)]
        self._queue = [r for r in self._queue if r not in ended]
        self._aborted += [
            TokenOutput(id=r.id, index=0, text="", token_ids=[], finish_reason="abort") for r in ended
        ]

    def step(self, comes: Callable[[], bool] = bool) -> list[TokenOutput]:
        queue, self._queue = self._queue, []
        aborted, self._aborted = self._aborted, []
        if any(r.prompt_ids == [14] for r in queue):
            raise ZeroDivisionError("a bug in step")
        return aborted + [
            TokenOutput(id=r.id, index=0, text="ok", token_ids=[1], finish_reason="stop") for r in queue
        ]

    def has_work(self) -> bool:
        return bool(self._queue or self._aborted)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._queue))

    def expert_traffic(self) -> ExpertTraffic:
        return ExpertTraffic()

    def flush_cache(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def record_experts(self, action: str) -> Future[ExpertsRecorded]:
        """Never finishes, as on a disk that hangs."""
        return Future()


class PromptEngine(IdleEngine):
    """Answers with the prompt, at once."""

    def step(self, comes: Callable[[], bool] = bool) -> list[TokenOutput]:
        answers = {r.id: [*r.prompt_ids[: r.prompt_ids.index(END)]] for r in self._queue if END in r.prompt_ids}
        return [
            msgspec.structs.replace(output, text=bytes(ids).decode(errors="replace"), token_ids=ids)
            if (ids := answers.get(output.id)) and output.finish_reason == "stop"
            else output
            for output in super().step(comes)
        ]


def load_prompts(config: EngineConfig) -> LoadedEngine:
    """With `echo_tokenizer`, for `spawn_echo`."""
    plan = replace(PLAN, context_length=4096, num_pages=2048, max_running_requests=8, max_step_tokens=512)
    return LoadedEngine(PromptEngine(), plan, "echo", "echo", VOCAB)


def load_and_say(config: EngineConfig) -> LoadedEngine:
    """As the real one prints its plan."""
    for stream in (sys.stdout, sys.stderr):
        print("the plan", file=stream, flush=True)
    return load_prompts(config)


def load_when_told(config: EngineConfig) -> LoadedEngine:
    """When the file `served_model_name` is there."""
    while not Path(str(config.served_model_name)).exists():
        time.sleep(0.02)
    return load_prompts(config)


def load_unless_gone(config: EngineConfig) -> LoadedEngine:
    """When the file `served_model_name` is not there."""
    if Path(str(config.served_model_name)).exists():
        raise ConfigError("the model went away")
    return load_prompts(config)


def load(config: EngineConfig) -> LoadedEngine:
    return LoadedEngine(IdleEngine(), PLAN, "idle", "idle", 16)


def load_once(config: EngineConfig) -> LoadedEngine:
    """`config.model` is a file: when it is there, the model cannot be loaded any more."""
    marker = Path(config.model)
    if marker.exists():
        raise ConfigError("the model went away")
    marker.touch()
    return load(config)


def load_killed(config: EngineConfig) -> LoadedEngine:
    """`config.model` is a file with how often loading ends by a signal, as when memory runs out."""
    marker = Path(config.model)
    if left := int(marker.read_text()):
        marker.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return load(config)
