"""Cold starts: a fresh process without any compiled kernel, then bursts of chats, as a day's first users send them.

    python benchmarks/cold_start.py --kind plain --kind schema --layers 24 --out FILE.json

A start: `kt serve` of a named architecture with made-up weights, half of the experts on the GPU, and empty caches. Then
ten chats one by one, ten, 2, 64 and 256 at once, 128 tokens each. A row says how many requests failed, how long a gap
between two tokens of one answer was at most, which kernels were compiled after the server was ready (its own counter),
and what the driver loaded (CUPTI, where it can be built). It ends with a start that finds the caches warm.

Kinds: plain; ngram, with drafts; still, experts that do not follow the traffic; schema, where half of the chats have a
schema.
"""

from __future__ import annotations

import argparse
import asyncio
import glob
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

FLAGS = {
    "plain": [],
    "ngram": ["--speculative-algorithm", "NGRAM"],
    "still": ["--disable-dynamic-expert-update"],
    "schema": [],
}
BURSTS = (*[1] * 10, 10, 2, 64, 256)
TOKENS = 128
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "number"}}},
    "required": ["name", "sizes"],
}
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


class Server:
    """`kt serve` of made-up weights, with a home of its own."""

    def __init__(
        self, home: Path, folder: Path, source: Path, flags: list[str], trace: Path | None, cpus: set[int]
    ) -> None:
        self.loads = home / "loads.txt"
        env = os.environ | {
            "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TRITON_CACHE_DIR": str(home / "triton"),
            "CUDA_CACHE_PATH": str(home / "cuda"), "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}",
        }  # fmt: skip
        if trace is not None:
            env |= {"CUDA_INJECTION64_PATH": str(trace), "LOAD_TRACE": str(self.loads)}
        self._printed = (home / "server.log").open("w+")
        command = [
            "taskset",
            "--cpu-list",
            ",".join(map(str, sorted(cpus))),
            sys.executable,
            "-P",
            "-m",
            "tandem.bench.gaps.made_up",
            str(folder),
            "--port",
            "0",
            *flags,
        ]
        self.started = time.time()
        self._process = subprocess.Popen(
            command,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            env=env,
        )
        self.address = self._address()
        self.ready = time.time()

    def printed(self) -> str:
        self._printed.seek(0)
        return self._printed.read()

    def _address(self) -> str:
        while True:
            if ready := re.search(r" is ready at (http://\S+)", self.printed()):
                return ready[1]
            if self._process.poll() is not None or time.time() - self.started > 280:
                raise SystemExit(f"the server did not start:\n{self.printed()[-3000:]}")
            time.sleep(0.1)

    def late_loads(self) -> list[str]:
        """The driver's loads after the server was ready, a line each."""
        lines = [
            line for path in glob.glob(f"{self.loads}.*") for line in Path(path).read_text().splitlines()
        ]
        return [line for line in lines if float(line.split()[0]) > self.ready]

    def idle_percent(self, seconds: float) -> float:
        """Share of one core, of all its processes, while nobody asks for so long."""
        before = cpu_seconds(self._process.pid)
        time.sleep(seconds)
        return 100 * (cpu_seconds(self._process.pid) - before) / seconds

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and of all that it has started and that still run."""
    parents, used = dict[int, int](), dict[int, int]()
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = Path(path).read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.split("/")[2])
        parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def below(pid: int) -> bool:
        return pid == root or (pid in parents and below(parents[pid]))

    return sum(ticks for pid, ticks in used.items() if below(pid)) / os.sysconf("SC_CLK_TCK")


class Chats:
    """Bursts of clients, and counts of their answers."""

    def __init__(self, address: str, schema: bool) -> None:
        self._address, self._schema = address, schema
        self.failed, self.requests, self.max_gap, self.errors = 0, 0, 0.0, list[str]()

    async def burst(self, client: httpx.AsyncClient, count: int) -> None:
        await asyncio.gather(*(self._chat(client) for _ in range(count)))

    async def _chat(self, client: httpx.AsyncClient) -> None:
        number, last = self.requests, 0.0
        self.requests += 1
        words = " ".join(str((number * 7919 + i * 104729) % 9973) for i in range(5 + number % 90))
        body: dict[str, Any] = {
            "model": "m", "stream": True, "max_tokens": TOKENS, "temperature": (0.0, 0.8)[number % 2],
            "ignore_eos": True, "messages": [{"role": "user", "content": f"Number {number}: {words}"}],
        }  # fmt: skip
        if self._schema and number % 2:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        try:
            async with client.stream("POST", f"{self._address}/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise ValueError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event or (
                        event["choices"] and event["choices"][0].get("finish_reason") == "error"
                    ):
                        raise ValueError(line[:300])
                    now = time.perf_counter()
                    if event["choices"] and event["choices"][0].get("delta", {}).get("content"):
                        self.max_gap, last = max(self.max_gap, now - last if last else 0.0), now
        except Exception as error:
            self.failed += 1
            self.errors.append(f"{type(error).__name__}: {error}"[:300])

    async def all(self) -> None:
        limits = httpx.Limits(max_connections=300, max_keepalive_connections=300)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            for count in BURSTS:
                await self.burst(client, count)


def counter(address: str, name: str) -> int:
    text = httpx.get(f"{address}/metrics").text
    found = re.search(rf"^{name}(_total)? (\S+)$", text, re.M)
    return int(float(found[2])) if found else -1


def one_start(number: int, kind: str, asked: argparse.Namespace, trace: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        folder = home / "model"
        folder.mkdir()
        write_folder(folder, asked.config, asked.layers)
        flags = [
            "--kt-method",
            asked.format,
            "--kt-gpu-experts-ratio",
            "0.5",
            "--chat-template",
            str(home / "chat.jinja"),
        ]
        flags += ["--context-length", "4096", *FLAGS[kind], *asked.flag]
        (home / "chat.jinja").write_text(TEMPLATE)
        cpus = sorted(os.sched_getaffinity(0))[number % asked.at_once :: asked.at_once]
        server = Server(home, folder, asked.source, flags, trace, set(cpus))
        print(
            f"{kind}: ready after {server.ready - server.started:.1f} s on {len(cpus)} CPUs",
            file=sys.stderr,
            flush=True,
        )
        chats = Chats(server.address, kind == "schema")
        try:
            asyncio.run(asyncio.wait_for(chats.all(), asked.seconds))
            late, loads = counter(server.address, "tandem_late_kernels"), server.late_loads()
            preempted = counter(server.address, "tandem_preemptions")
            idle = server.idle_percent(asked.idle) if asked.idle else -1.0
        except (httpx.HTTPError, TimeoutError) as error:
            late, loads, preempted, idle = -1, [f"{type(error).__name__} {error}"], -1, -1.0
            print(server.printed()[-6000:], file=sys.stderr, flush=True)
        finally:
            server.stop()
        named = re.findall(r"the kernel (.*?) was compiled", server.printed())
        cold = server.ready - server.started
        warm = 0.0
        if not asked.once:
            again = Server(home, folder, asked.source, flags, None, set(cpus))
            again.stop()
            warm = again.ready - again.started
        steps = re.findall(r"ran steps of .*", server.printed())
        return {
            "bench": "cold_start", "kind": kind, "starts": 1, "requests": chats.requests, "failed": chats.failed,
            "late_kernels": late, "late_loads": len(loads), "max_gap_ms": round(chats.max_gap * 1e3, 1),
            "ready_cold_s": round(cold, 1), "ready_warm_s": round(warm, 1), "preemptions": preempted,
            "late_names": named[:20], "loads": [" ".join(load.split()[1:])[:200] for load in loads[:20]],
            "errors": sorted(set(chats.errors))[:3], "warm_kernels": steps[:1], "config": asked.config,
            "idle_percent": round(idle, 3), "layers": asked.layers, "format": asked.format, "flags": asked.flag,
        }  # fmt: skip


def write_folder(folder: Path, config: str, layers: int) -> None:
    from tandem.bench.gaps.made_up import write_folder as write

    write(folder, config, layers)


def built_trace() -> Path | None:
    """The library that names loads; None where CUPTI's or CUDA's headers are missing."""
    packages = sysconfig.get_paths()["purelib"]
    folders = [f"{packages}/nvidia", *glob.glob("/usr/local/cuda*")]

    def found(name: str) -> list[Path]:
        return [Path(path) for folder in folders for path in glob.glob(f"{folder}/**/{name}", recursive=True)]

    libraries, includes = (
        found("libcupti.so*"),
        {path.parent for path in (*found("cupti.h"), *found("cuda.h"))},
    )
    if not libraries or not includes:
        return None
    out, source = (
        Path(tempfile.gettempdir()) / "load_trace.so",
        Path(__file__).with_name("probes") / "load_trace.c",
    )
    command = ["cc", "-shared", "-fPIC", "-o", str(out), str(source), *(f"-I{each}" for each in includes)]
    done = subprocess.run([*command, str(libraries[0]), f"-Wl,-rpath,{libraries[0].parent}"])
    return out if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kind", action="append", choices=list(FLAGS), help="of a start; several: one after the other"
    )
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="INT4")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--source", type=Path, default=Path("src"), help="the folder of the package that is measured"
    )
    parser.add_argument(
        "--flag", action="append", default=[], help="more of kt serve's, as --flag=--kt-cpuinfer --flag=5"
    )
    parser.add_argument("--at-once", type=int, default=1, help="servers side by side")
    parser.add_argument("--seconds", type=float, default=120.0, help="that all bursts of a start may take")
    parser.add_argument("--once", action="store_true", help="no start with warm caches")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds without a request, at the end of each start")
    parser.add_argument("--trace", action="store_true", help="name what the driver loads")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    trace = built_trace() if asked.trace else None
    rows = []

    def start(each: tuple[int, str]) -> dict[str, Any]:
        return one_start(*each, asked, trace)

    with ThreadPoolExecutor(asked.at_once) as pool:
        for row in pool.map(start, enumerate(asked.kind or ["plain"])):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
