"""The real engine, which goes wrong when a prompt's first tokens are one of `COMMANDS`: "faulty_engine:load"."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from tandem import _core
from tandem.engine.engine import Engine
from tandem.engine.sequence import Chunk
from tandem.engine.step.step import Step
from tandem.flags.engine_config import EngineConfig
from tandem.server.engine_process import LoadedEngine, load_engine

LENGTH = 6  # of a command, in token ids below 256


def command(word: str, more: int = 0) -> list[int]:
    """Token ids of a prompt that asks for it, and `more` tokens behind."""
    assert word in COMMANDS
    return [*word.encode(), *([97] * more)]


def raise_in_the_pool(engine: Engine) -> None:
    """A task of the engine's own workers fails: what it reads was cut short meanwhile."""
    assert engine._workers is not None
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8 << 20))
        file.flush()
        mapped = _core.MappedFile(file.fileno(), 8 << 20)
        file.truncate(4096)
        _core.block_checksums(engine._workers, [mapped.view(0, 8 << 20)], 1 << 20, False)


def take_memory(engine: Engine) -> None:
    """As a step with large intermediate results does."""
    torch.empty(256 << 20, dtype=torch.uint8).fill_(1)


def kill_itself(engine: Engine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_gpu_memory(engine: Engine) -> None:
    """All that is free, and more than that."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    del held


def break_the_gpu(engine: Engine) -> None:
    """A device assert: every later call fails, too."""
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()


def let_the_gpu_wait(engine: Engine) -> None:
    """The CPU does not look for posts until the GPU has lost patience."""
    handoff: Any = engine._runner._handoff  # type: ignore[union-attr]
    begin, finish, asked = handoff.begin, handoff.finish, list[int]()

    def late() -> None:
        handoff.begin, handoff.finish = begin, finish
        torch.cuda.synchronize()
        begin(*asked)
        finish()

    handoff.begin, handoff.finish = asked.append, late


def sleep_on_the_gpu(engine: Engine) -> None:
    """A kernel that does not end for an hour."""
    torch.cuda._sleep(int(3600 * 1.5e9))
    time.sleep(0)


COMMANDS: dict[str, Callable[[Engine], None]] = {
    "inpool": raise_in_the_pool, "memory": take_memory, "crash!": kill_itself, "gpumem": take_gpu_memory,
    "assert": break_the_gpu, "nocpu!": let_the_gpu_wait, "kernel": sleep_on_the_gpu,
}  # fmt: skip


def load(config: EngineConfig) -> LoadedEngine:
    """None while the file `FAULTY_ENGINE_WAITS` names is there."""
    while os.path.exists(os.environ.get("FAULTY_ENGINE_WAITS", "")):
        time.sleep(0.02)
    loaded = load_engine(config)
    assert isinstance(loaded.engine, Engine)
    _obey(loaded.engine)
    return loaded


def _obey(engine: Engine) -> None:
    runner: Any = engine._runner
    start = runner.start

    def obeying(step: Step, *others: Any) -> Any:
        for chunk in step.chunks:
            if (asked := _asked(chunk)) is not None:
                asked(engine)
        return start(step, *others)

    runner.start = obeying


def _asked(chunk: Chunk) -> Callable[[Engine], None] | None:
    """Once for each request: at its first step after its prompt, so that on a GPU a graph runs."""
    sequence = chunk.sequence
    if sequence.total_len != sequence.prompt_len + 1:
        return None
    first = sequence.tokens[:LENGTH]
    return COMMANDS.get(bytes(token for token in first if token < 256).decode("latin-1"))
