"""Sleep and wake: what an engine that sleeps gives back, how long a wake takes, and that cycles leave nothing behind.

    python benchmarks/sleep.py demo --cycles 100 --out FILE.json

A cycle: `/release_memory_occupation`, memory of the server's processes, one chat, which wakes the engine. `asleep_mb`
is memory of the API process alone that no file backs (RssAnon), first and last cycle; `growth_kb` is its slope over the
second half of the cycles. `wake_cpu_s` is processor time of the new engine until its first answer has come: what a wake
takes of the cores, whatever else they do. `bound_s` is 8 seconds and the model's bytes from a disk of 1 GB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}
DISK_BYTES_A_SECOND = 1e9
WAKE_SECONDS = 8.0
PATIENCE = 600.0


class Server:
    def __init__(self, model: str, flags: list[str], log: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-m", "tandem", "serve", model, "--port", self.url.rpartition(":")[2], *flags]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def wait(self) -> None:
        while self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        sys.exit("the server ended; give another model or --flags")

    def post(self, path: str, **body: object) -> Any:
        response = self.client.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def processes(self) -> list[psutil.Process]:
        whole = psutil.Process(self.process.pid)
        return [whole, *whole.children(recursive=True)]

    def memory_mb(self) -> tuple[float, float]:
        """Megabytes of the API process, and of all that it started: RssAnon + RssShmem."""
        each = [own_bytes(process.pid) / 1e6 for process in self.processes()]
        return each[0], sum(each[1:])


def own_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return sum(1024 * int(kb) for kb in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.M))
    return 0


def cpu_seconds(server: Server) -> float:
    """CPU seconds of all processes that were started for the engine: they are new after each wake."""
    times = [process.cpu_times() for process in server.processes()[1:] if is_engine(process)]
    return sum(each.user + each.system for each in times)


def is_engine(process: psutil.Process) -> bool:
    return any("engine_process" in word for word in process.cmdline())


def cycle(server: Server) -> dict[str, float]:
    began = time.monotonic()
    server.post("/release_memory_occupation")
    asleep = time.monotonic()
    api, others = server.memory_mb()
    answer = server.post("/v1/chat/completions", **CHAT)
    woke = time.monotonic()
    spent = cpu_seconds(server)
    assert answer["usage"]["completion_tokens"] > 0
    files = psutil.Process(server.process.pid).num_fds()
    return {
        "sleep_s": asleep - began, "wake_s": woke - asleep, "wake_cpu_s": spent, "api_mb": api, "others_mb": others,
        "files": files, "awake_mb": sum(server.memory_mb()), "left": len(server.processes()),
    }  # fmt: skip


def slope_kb(values: list[float]) -> float:
    """Slope of megabytes by cycle, over the second half."""
    half = values[len(values) // 2 :]
    return statistics.linear_regression(range(len(half)), half).slope * 1e3 if len(half) > 1 else 0.0


def row(model: str, nbytes: int, cycles: list[dict[str, float]]) -> dict[str, Any]:
    wakes = sorted(each["wake_s"] for each in cycles)
    api = [each["api_mb"] for each in cycles]
    return {
        "bench": "sleep", "model": model, "cycles": len(cycles), "model_gb": round(nbytes / 1e9, 3),
        "sleep_s": round(statistics.median(each["sleep_s"] for each in cycles), 2),
        "wake_s": round(statistics.median(wakes), 2), "wake_most_s": round(wakes[-1], 2),
        "wake_cpu_s": round(statistics.median(each["wake_cpu_s"] for each in cycles), 2),
        "slow_wakes_s": [round(each, 1) for each in wakes if each > 3 * statistics.median(wakes)],
        "bound_s": round(WAKE_SECONDS + nbytes / DISK_BYTES_A_SECOND, 2),
        "awake_mb": round(cycles[-1]["awake_mb"]), "asleep_mb": [round(api[0], 1), round(api[-1], 1)],
        "others_mb": round(max(each["others_mb"] for each in cycles), 1), "growth_kb": round(slope_kb(api), 1),
        "files": [cycles[0]["files"], cycles[-1]["files"]],
        "processes": [cycles[0]["left"], cycles[-1]["left"]],
        "command": " ".join(["python", *sys.argv]), "cpus": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(options.model, flags, Path(scratch, "log"))
        try:
            server.wait()
            server.post("/v1/chat/completions", **CHAT)
            nbytes = server.client.get("/api/tags").json()["models"][0]["size"]
            cycles: list[dict[str, float]] = []
            for _ in range(options.cycles):  # kept along the way: a hundred take a while
                cycles.append(cycle(server))
                found = row(options.model, nbytes, cycles)
                if options.out:
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            server.process.terminate()
            server.process.wait()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
