"""`kt serve` in front of a tiny random model, and what the tests of faults ask of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

import tandem
from quiet_clock import PATIENCE
from server_harness import ServerProcess, command_line, free_port, has_ended, plain

HERE = Path(__file__).parent
CONTEXT = 4096
TOKENS, THREADS = ("--max-total-tokens", "65536"), ("--kt-cpuinfer", "2")
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # linux/prctl.h, linux/capability.h
ENGINE, TEMPLATES, IMAGES = "engine_process", "template_worker", "images.worker"  # in their command lines


def fault_model(source: Path, path: Path) -> Path:
    """The tiny model with room for long answers."""
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return path


def spawn_kt(
    model: Path | str,
    log: Path,
    *flags: str,
    port: int | None = None,
    output: int | None = None,
    before: Callable[[], None] | None = None,
    faulty: bool = False,
    **variables: str,
) -> ServerProcess:
    """`kt serve`. before: in the new process, before it is `kt`. faulty: with `faulty_engine`."""
    port = port or free_port()
    threads = () if THREADS[0] in flags else THREADS
    arguments = ["serve", str(model), "--port", str(port), *TOKENS, *threads, *flags]
    package = Path(tandem.__file__).parent.parent
    paths = [str(HERE), str(HERE.parent), str(HERE.parent / "fakes"), str(package), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *(["-c", FAULTY] if faulty else ["-m", "tandem"]), *arguments],
            stdout=out if output is None else output, stderr=subprocess.STDOUT, env=environment,
            preexec_fn=before,  # noqa: PLW1509  a system call or two before exec
        )  # fmt: skip
    return ServerProcess(process, port, log)


FAULTY = """
import sys
from tandem.flags.engine_config import EngineConfig
from tandem.server.launch import serve
config, refused = EngineConfig.possible(sys.argv[2:])
assert config is not None and not refused, refused
sys.exit(serve(config, loader="faulty_engine:load"))
"""


def as_anybody() -> None:
    """For `before`: permissions hold for root, too."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def body(tokens: int, first: int = 97, stream: bool = False, ids: list[int] | None = None) -> dict[str, Any]:
    """Body of `/generate`: a greedy answer of so many tokens."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return {"input_ids": ids or [first, 98, 99], "sampling_params": sampling, "stream": stream}


LONG = 4000  # tokens: seconds, and sixteen have room


def ask(server: ServerProcess, tokens: int = 4, timeout: float = PATIENCE, **more: Any) -> httpx.Response:
    return plain.post(server.url + "/generate", json=body(tokens, **more), timeout=timeout)


def answer(server: ServerProcess, tokens: int = 4) -> list[int]:
    """Token ids of a good answer."""
    response = ask(server, tokens)
    assert response.status_code == 200, response.text
    return list(response.json()["output_ids"])


def good_answer(server: ServerProcess, seconds: float = PATIENCE) -> list[int]:
    """Asked for again and again, as a client with retries does. Only refusals that say so are retried."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with contextlib.suppress(httpx.TransportError):
            response = ask(server)
            if response.status_code == 200:
                return list(response.json()["output_ids"])
            assert response.status_code in (429, 503) and response.headers["retry-after"], response.text
        time.sleep(0.05)
    raise AssertionError(f"no good answer within {seconds} s:\n{server.log.read_text()}")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Error of a refusal, or of the last event of a stream."""
    if response.headers["content-type"].startswith("application/json"):
        return dict(response.json()["error"])
    *_, last, done = [part for part in response.text.split("\n\n") if part]
    assert done == "data: [DONE]", response.text[-500:]
    event = json.loads(last.removeprefix("data: "))
    assert "error" in event, response.text[-1500:]
    return dict(event["error"])


@contextlib.contextmanager
def long_answers(server: ServerProcess, count: int) -> Iterator[list[Future[httpx.Response]]]:
    """Whole and streamed by turns; they run when this begins."""
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, server, LONG, first=i, stream=i % 2 == 1) for i in range(count)]
        wait_until(lambda: server.info()["stats"]["running"] == count)
        yield asked


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


def idle(server: ServerProcess) -> bool:
    """Nothing runs, and every page is free or only kept for later. To be waited for: an engine says so behind the last
    answer."""
    stats = server.info()["stats"]
    return not stats["running"] and not stats["waiting"] and stats["pages_free"] == stats["pages_total"]


def child(server: ServerProcess, kind: str) -> psutil.Process:
    """A process of the server: `ENGINE`, `TEMPLATES` or `IMAGES`."""
    found = [p for p in family(server) if kind in command_line(p)]
    assert len(found) == 1, found
    return found[0]


def family(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return all(map(has_ended, processes))
