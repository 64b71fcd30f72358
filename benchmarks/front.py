"""The front of several models beside its model's server: what it adds to a request, and what streams cost it.

    python benchmarks/front.py --out FILE.json
    python benchmarks/front.py --model /models/X --out FILE.json --flag kt_gpu_experts_ratio=0.5

Both ends are asked in turns, so that a busy machine hurts both. The model is tests/support/stub_model.py: only HTTP is
measured. `added_ms`: median of a small chat through the front less the median without. `cores`: CPU seconds of
the front a second, while streams bring `events_s` events through it. `lost`: of that many clients at once.

With --model a real server is behind the front, and the other end is its own socket: tokens a second of 32 clients that
stream 64 tokens each, through the front and without, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
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

ROOT = Path(__file__).parents[1]
LIMITS = httpx.Limits(max_connections=None)
CLIENTS, TOKENS, ROUNDS = 32, 64, 5
STUB = ROOT / "tests" / "support" / "stub_model.py"
FRONT = """
import sys
from tandem.flags.engine_config import EngineConfig
from tandem.server.front.launch import serve_models
stub, folder, toml, port = sys.argv[1:]
command = lambda entry, path: ([sys.executable, stub, path, entry.name, folder], b"")

class Room:
    async def check(self, entry, loaded):
        from tandem.server.front.room import Verdict
        return Verdict()

config = EngineConfig(models=toml, port=int(port), log_level="error")
sys.exit(serve_models(config, command=command, make_room=lambda file: Room()))
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ModelEnds:
    """`kt serve --models` with one model, and the socket on which its child serves."""

    def __init__(self, scratch: Path, model: str, flags: list[str]) -> None:
        toml = scratch / "models.toml"
        toml.write_text("\n".join(["[models.stub]", f"model = {json.dumps(model)}", "preload = true", *flags]))
        self.port = free_port()
        command = [sys.executable, "-m", "tandem", "serve", "--models", str(toml), "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(scratch)})
        self.scratch = scratch

    async def clients(self) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        """Through the front, and without: the child's socket is there once the front has loaded it."""
        front = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=300, limits=LIMITS)
        async with httpx.AsyncClient(base_url=front.base_url, timeout=300) as first:
            await ready(first)
        (child,) = self.scratch.glob("tandem-*/*.sock")
        direct = httpx.AsyncHTTPTransport(uds=str(child), limits=LIMITS)
        return front, httpx.AsyncClient(transport=direct, base_url="http://child", timeout=300)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


class Ends:
    """The front on a port, and its model's socket, which a client may ask, too."""

    def __init__(self, scratch: Path) -> None:
        self.port = free_port()
        (scratch / "models.toml").write_text('[models.stub]\nmodel = "stub"\n')
        command = [sys.executable, "-c", FRONT, str(STUB), str(scratch), str(scratch / "models.toml"), str(self.port)]
        self.process = subprocess.Popen(command)
        self.direct_socket = scratch / "direct.sock"
        self.stub = subprocess.Popen([sys.executable, str(STUB), str(self.direct_socket), "stub", str(scratch)])

    def clients(self) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        """Through the front, and without."""
        direct = httpx.AsyncHTTPTransport(uds=str(self.direct_socket), limits=LIMITS)
        return (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=120, limits=LIMITS),
            httpx.AsyncClient(transport=direct, base_url="http://stub", timeout=120),
        )

    def close(self) -> None:
        for process in (self.process, self.stub):
            process.terminate()
            process.wait()


def body(text: str, stream: bool = False) -> dict[str, Any]:
    return {"model": "stub", "messages": [{"role": "user", "content": text}], "stream": stream}


async def ready(client: httpx.AsyncClient) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if (await client.post("/v1/chat/completions", json=body("hi"))).status_code == 200:
                return
        await asyncio.sleep(0.1)


async def seconds(client: httpx.AsyncClient) -> float:
    began = time.perf_counter()
    (await client.post("/v1/chat/completions", json=body("hi"))).raise_for_status()
    return time.perf_counter() - began


async def added_ms(
    front: httpx.AsyncClient, direct: httpx.AsyncClient, turns: int, process: psutil.Process
) -> dict[str, float]:
    """front_cpu_ms: CPU time of the front for a request, which a busy machine does not change."""
    took: tuple[list[float], list[float]] = ([], [])
    before = sum(process.cpu_times()[:2])
    for _ in range(turns):
        for client, times in zip((front, direct), took, strict=True):
            times.append(await seconds(client))
    through, without = (statistics.median(times) * 1e3 for times in took)
    cpu = (sum(process.cpu_times()[:2]) - before) / turns * 1e3
    return {
        "front_ms": round(through, 3), "direct_ms": round(without, 3), "added_ms": round(through - without, 3),
        "front_cpu_ms": round(cpu, 3),
    }  # fmt: skip


async def count(client: httpx.AsyncClient, events: int, pace: float) -> int:
    """Events of a stream. The stub waits `pace` seconds after each."""
    found = 0
    ask = body(f"count {events} {pace}", stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=ask) as response:
        async for line in response.aiter_lines():
            found += line.startswith("data: {")
    return found


async def streams(client: httpx.AsyncClient, process: psutil.Process, clients: int, wanted: int) -> dict[str, float]:
    """`wanted` events a second over all clients, for some seconds."""
    pace = clients / wanted
    each = max(1, round(8.0 / pace))
    cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
    found = await asyncio.gather(*(count(client, each, pace) for _ in range(clients)))
    wall = time.monotonic() - began
    used = sum(process.cpu_times()[:2]) - cpu
    rate = sum(found) / wall
    return {
        "events_s": round(rate), "cores": round(used / wall, 3), "us_per_event": round(1e6 * used / sum(found), 1),
        "lost": sum(one != each for one in found),
    }  # fmt: skip


async def burst(client: httpx.AsyncClient, clients: int) -> int:
    """How many of so many clients at once got no whole stream."""
    found = await asyncio.gather(*(count(client, 5, 0.0) for _ in range(clients)), return_exceptions=True)
    return sum(one != 5 for one in found)


async def ratio(front: httpx.AsyncClient, direct: httpx.AsyncClient, clients: int) -> float:
    """Events a second through the front, of those without, as fast as they come; in turns."""
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(5):
        for client, found in zip((front, direct), rates, strict=True):
            began = time.monotonic()
            total = sum(await asyncio.gather(*(count(client, 100, 0.02) for _ in range(clients))))
            found.append(total / (time.monotonic() - began))
    return round(statistics.median(rates[0]) / statistics.median(rates[1]), 3)


async def stream_tokens(client: httpx.AsyncClient, number: int) -> int:
    """Completion tokens of one streamed chat, as its usage says."""
    ask = body(f"{number}: count", stream=True) | {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    tokens = 0
    async with client.stream(
        "POST", "/v1/chat/completions", json=ask | {"stream_options": {"include_usage": True}}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                tokens = int(usage["completion_tokens"])
    return tokens


async def tokens_a_second(client: httpx.AsyncClient) -> float:
    began = time.monotonic()
    counts = await asyncio.gather(*(stream_tokens(client, number) for number in range(CLIENTS)))
    assert counts == [TOKENS] * CLIENTS, counts
    return sum(counts) / (time.monotonic() - began)


async def measure_model(ends: ModelEnds) -> dict[str, Any]:
    front, direct = await ends.clients()
    async with front, direct:
        await tokens_a_second(direct)
        pairs = []
        for number in range(ROUNDS):  # every second round backwards
            order = (front, direct) if number % 2 else (direct, front)
            speeds = {client: await tokens_a_second(client) for client in order}
            pairs.append((speeds[front], speeds[direct]))
    ratios = sorted(through / without for through, without in pairs)
    through, without = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    return {
        "bench": "front", "clients": CLIENTS, "front_tok_s": round(through, 1), "direct_tok_s": round(without, 1),
        "ratio": round(statistics.median(ratios), 3), "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
    }  # fmt: skip


async def measure(ends: Ends, turns: int, wanted: int) -> dict[str, Any]:
    front, direct = ends.clients()
    async with front, direct:
        await asyncio.gather(ready(front), ready(direct))
        process = psutil.Process(ends.process.pid)
        row: dict[str, Any] = {"bench": "front", **await added_ms(front, direct, turns, process)}
        row |= {"ratio": await ratio(front, direct, 32), "ratio_clients": 32}
        row |= await streams(front, process, 50, wanted)
        row |= {"burst": 200, "burst_lost": await burst(front, 200)}
        row["front_mb"] = round(process.memory_info().rss / 1e6)
    return row


async def measured(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    ends = ModelEnds(scratch, options.model, options.flag) if options.model else Ends(scratch)
    try:
        if isinstance(ends, ModelEnds):
            return await measure_model(ends)
        return await measure(ends, options.turns, options.events)
    finally:
        ends.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--events", type=int, default=2000, help="a second")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="a real one behind the front")
    parser.add_argument("--flag", action="append", default=[], help="of the model, as in TOML: name=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        row = asyncio.run(measured(Path(scratch), options))
    row |= {"command": " ".join(["python", *sys.argv]), "cpus": len(os.sched_getaffinity(0))}
    row["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(row))
    if options.out:
        options.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
