"""Cost of ranks to a server on a CPU, and how soon a missing one is noticed.

    PYTHONPATH=src python benchmarks/rank_start.py MODEL --ranks 1 --ranks 2 --failures --keep benchmarks/results

A row of a start: seconds until the server is ready, and memory of all its processes: what each has for itself, and its
share of what several have. A row of a failure: seconds from the signal to a rank, while it computes a long answer, to
the answer's end.
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
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.bench.rows import Row, keep, machine_name, stamp
from tandem.machine.machine import Machine

PORT, TOKENS, READY_SECONDS, PATIENCE = 31877, 4000, 1200, 300
HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Server:
    """`kt serve` with so many ranks; seconds: until it was ready."""

    def __init__(self, model: str, ranks: int, flags: list[str]) -> None:
        ranked = ["--tp", str(ranks)] if ranks > 1 else []
        words = ["serve", model, "--device", "cpu", "--port", str(PORT), "--skip-server-warmup", *ranked, *flags]
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
        own = psutil.Process(self.process.pid)
        return sum(each.memory_full_info().pss for each in (own, *own.children(recursive=True))) / 2**30

    def rank(self, number: int) -> psutil.Process:
        words = ["tandem.server.ranks.process", "--rank", str(number)]
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in children if all(word in each.cmdline() for word in words))

    def answer(self) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
        return httpx.post(f"{self.url}/generate", json=body, timeout=PATIENCE)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def start_row(server: Server, model: str, ranks: int) -> Row:
    return {
        "bench": "rank_start", "model": Path(model).name, "ranks": ranks, "seconds": round(server.seconds, 2),
        "pss_gib": round(server.memory_gib(), 3),
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
        server = Server(options.model, ranks, flags)
        try:
            yield start_row(server, options.model, ranks)
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
