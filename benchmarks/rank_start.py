"""Cost of ranks to a server, and how soon a missing one is noticed. Other flags are those of `kt serve`.

    PYTHONPATH=src python benchmarks/rank_start.py MODEL --ranks 1 --ranks 2 --failures --keep benchmarks/results

A row of a start: seconds until the server is ready, processor seconds of its processes, and memory of all of them: what
each has for itself, and its share of what several have. Of --starts N the last one counts: with --packed-cache it is
one that packs nothing. A row of --clients N: tokens per second of as many answers at once, each of 128 tokens. A row of
a failure: seconds from the signal to a rank, while it computes a long answer, to the answer's end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.bench.rows import Row, keep, machine_name, stamp
from tandem.machine.machine import Machine

PORT, TOKENS, READY_SECONDS, PATIENCE = 31877, 4000, 1200, 300
CLIENT_TOKENS, CLIENT_PROMPT = 128, 200
HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Server:
    """`kt serve` with so many ranks; seconds: until it was ready."""

    def __init__(self, model: str, ranks: int, flags: list[str], device: str = "cpu") -> None:
        ranked = ["--tp", str(ranks)] if ranks > 1 else []
        cold = ["--skip-server-warmup"] if device == "cpu" else []
        words = ["serve", model, "--device", device, "--port", str(PORT), *cold, *ranked, *flags]
        began = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-m", "tandem", *words], stdout=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{PORT}"
        self._wait(began)
        self.seconds = time.monotonic() - began

    def _wait(self, began: float) -> None:
        while time.monotonic() - began < READY_SECONDS:
            if self.process.poll() is not None:
                sys.exit(f"the server ended: exit code {self.process.returncode}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        sys.exit("the server is not ready")

    def memory_gib(self) -> float:
        """Memory of all processes in GiB, pages that several have divided among them."""
        return float(sum(each.memory_full_info().pss for each in self._processes())) / 2**30

    def cpu_seconds(self) -> float:
        """Processor seconds of all processes: other work on the machine lengthens these less than the start."""
        return float(sum(sum(each.cpu_times()[:2]) for each in self._processes()))

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def rank(self, number: int) -> psutil.Process:
        words = ["tandem.server.ranks.process", "--rank", str(number)]
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in children if all(word in each.cmdline() for word in words))

    def answer(self, tokens: int = TOKENS, prompt: tuple[int, ...] = (5, 6, 7)) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return httpx.post(f"{self.url}/generate", json=body, timeout=PATIENCE)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def start_row(server: Server, options: argparse.Namespace, ranks: int, flags: list[str]) -> Row:
    return {
        "bench": "rank_start", "model": Path(options.model).name, "ranks": ranks, "device": options.device,
        "packed_cache": "--packed-cache" in flags, "seconds": round(server.seconds, 2),
        "cpu_seconds": round(server.cpu_seconds(), 2), "pss_gib": round(server.memory_gib(), 3),
    }  # fmt: skip


def clients_row(server: Server, ranks: int, clients: int) -> Row:
    """Answers of prompts that begin differently, once and then timed."""
    prompts = [tuple((7 * i + 3 * at) % 200 for at in range(CLIENT_PROMPT)) for i in range(clients)]
    with ThreadPoolExecutor(clients) as several:
        for _ in range(2):
            began = time.monotonic()
            answers = list(several.map(lambda prompt: server.answer(CLIENT_TOKENS, prompt), prompts))
            seconds = time.monotonic() - began
    right = [each for each in answers if each.status_code == 200 and len(each.json()["output_ids"]) == CLIENT_TOKENS]
    return {
        "bench": "rank_clients", "ranks": ranks, "clients": clients, "failed": clients - len(right),
        "tok_s": round(len(right) * CLIENT_TOKENS / seconds, 1), "seconds": round(seconds, 2),
    }  # fmt: skip


def failure_row(server: Server, ranks: int, how: str) -> Row:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(server.answer()))
    asking.start()
    time.sleep(1.0)
    rank, began = server.rank(ranks - 1), time.monotonic()
    os.kill(rank.pid, HOW[how])
    asking.join()
    seconds, told = time.monotonic() - began, answers[0].json()
    return {
        "bench": "rank_failure", "how": how, "ranks": ranks, "seconds": round(seconds, 2),
        "status": answers[0].status_code, "told": str(told.get("error", {}).get("message", told))[:200],
    }  # fmt: skip


def rows(options: argparse.Namespace, flags: list[str]) -> Iterator[Row]:
    for ranks in options.ranks or [1, 2]:
        for _ in range(options.starts - 1):
            Server(options.model, ranks, flags, options.device).end()
        server = Server(options.model, ranks, flags, options.device)
        try:
            yield start_row(server, options, ranks, flags)
            for clients in options.clients:
                yield clients_row(server, ranks, clients)
            if options.failures and ranks > 1:
                for how in HOW:
                    yield failure_row(server, ranks, how)
                    server._wait(time.monotonic())
        finally:
            server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--clients", type=int, action="append", default=[])
    parser.add_argument("--failures", action="store_true")
    parser.add_argument("--keep", type=Path, help="directory of results to add the rows to")
    options, flags = parser.parse_known_args()
    said: dict[str, Any] = stamp(machine_name(Machine.detect_cpus()))
    found = []
    for row in rows(options, flags):
        print(json.dumps(row), flush=True)
        found.append(row | said)
    if options.keep:
        keep(found, options.keep)


if __name__ == "__main__":
    main()
