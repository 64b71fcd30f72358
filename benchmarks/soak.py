"""Mixed load for a long time, and whether any process of the server grows.

    PYTHONPATH=src python benchmarks/soak.py --minutes 30 --clients 256 --out benchmarks/results

Starts `kt serve MODEL` and sends what `KINDS` says from so many clients. Each asks again when it is answered or has
left. Every `--sample-seconds` it reads the private memory (USS) of each process of the server. Growth is compared
with the mean of the first minute after `--settle-minutes`: no later minute's mean may be more than `MOST_CHANGE` away.
Exit code 1 where one is, where a process was replaced, or where an answer failed in another way than by a refusal that
says when to come back (429, 503).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import psutil

from tandem.bench.own_server import own_server
from tandem.bench.rows import Row, machine_name, stamp, write
from tandem.machine.machine import Machine

MOST_CHANGE = 0.02
LEAST_BYTES = 2 << 20  # of change that counts: a page more or less of a small process is no growth
PATIENCE_SECONDS = 1800.0  # of a client: beside other work an answer may take minutes, which is no fault
IDLE_SECONDS = 30.0  # after the last client has gone
FLAGS = ("--max-total-tokens", "16384", "--max-running-requests", "64", "--context-length", "4096")
ROLES = {"engine_process": "engine", "template_worker": "templates", "grammar": "grammars", "serve": "server"}
WORDS = "the a river town of stone light under over slowly seven ships carry salt north while rain falls".split()
SCHEMAS = 24  # different grammars


@dataclass
class Tally:
    """Outcomes of all requests, by kind; seconds of those that were answered whole."""

    ended: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


Body = dict[str, Any]


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def chat(dice: random.Random, words: int, tokens: int, **more: Any) -> Body:
    said = [{"role": "user", "content": text(dice, words)}]
    return {"messages": said, "max_tokens": tokens, "temperature": 1.0, **more}


def schema(dice: random.Random) -> Body:
    """One of `SCHEMAS`: more would fill the cache of compiled grammars for half an hour."""
    number = dice.randrange(SCHEMAS)
    fields: Body = {f"name{i}": {"type": "integer", "maximum": 99} for i in range(1 + number % 6)}
    fields["last"] = {"enum": [str(number), "none"]}
    wanted = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}


async def whole(http: httpx.AsyncClient, body: Body) -> httpx.Response:
    response = await http.post("/v1/chat/completions", json=body)
    if response.status_code == 200:
        assert response.json()["choices"][0]["finish_reason"] in ("stop", "length"), response.text
    return response


async def streamed(http: httpx.AsyncClient, body: Body, most_lines: int | None = None) -> httpx.Response:
    """most_lines: after so many the client leaves."""
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines, last = 0, ""
        async for line in response.aiter_lines():
            lines, last = lines + 1, line or last
            if lines == most_lines:
                return response
        assert response.status_code != 200 or last == "data: [DONE]", last
        assert '"error"' not in last
        return response


async def short(http: httpx.AsyncClient, dice: random.Random) -> httpx.Response:
    return await whole(http, chat(dice, 12, dice.randint(1, 24)))


async def stream(http: httpx.AsyncClient, dice: random.Random) -> httpx.Response:
    return await streamed(http, chat(dice, 30, dice.randint(8, 48)))


async def leave(http: httpx.AsyncClient, dice: random.Random) -> httpx.Response:
    return await streamed(http, chat(dice, 30, 200, ignore_eos=True), dice.randint(1, 16))


async def grammar(http: httpx.AsyncClient, dice: random.Random) -> httpx.Response:
    return await whole(http, chat(dice, 12, 64, response_format=schema(dice)))


async def long_prompt(http: httpx.AsyncClient, dice: random.Random) -> httpx.Response:
    return await whole(http, chat(dice, dice.randint(600, 2400), 4))


Ask = Callable[[httpx.AsyncClient, random.Random], Awaitable[httpx.Response]]
KINDS: tuple[tuple[Ask, int], ...] = ((short, 40), (stream, 25), (leave, 15), (grammar, 15), (long_prompt, 5))


async def client(http: httpx.AsyncClient, seed: int, ends: float, tally: Tally) -> None:
    dice = random.Random(seed)
    while monotonic() < ends:
        (ask,) = dice.choices([kind for kind, _ in KINDS], [share for _, share in KINDS])
        began, name = monotonic(), ask.__name__
        try:
            response = await ask(http, dice)
        except (httpx.HTTPError, AssertionError) as error:
            tally.failed[f"{name}: {type(error).__name__}: {error}"[:200]] += 1
            continue
        if response.status_code == 200:
            tally.ended[name] += 1
            tally.seconds[name].append(monotonic() - began)
        elif response.status_code in (429, 503) and "retry-after" in response.headers:
            tally.refused[f"{name}: {response.status_code}"] += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
        else:
            await response.aread()
            tally.failed[f"{name}: {response.status_code}: {response.text}"[:200]] += 1


@dataclass
class Samples:
    """USS in bytes of each process: [(minute, bytes)]."""

    of: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, minute: float) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                words = process.cmdline()
                if not words or words == process.parent().cmdline():  # it has ended; or compiles one grammar
                    continue
                role = next((name for key, name in ROLES.items() if key in " ".join(words)), " ".join(words)[:40])
                self.of[role, process.pid].append((minute, process.memory_full_info().uss))
            except (psutil.Error, AttributeError):  # it, or its parent, has ended
                continue

    def latest(self) -> dict[str, int]:
        """MiB by role."""
        return {role: seen[-1][1] >> 20 for (role, _), seen in self.of.items()}

    def rows(self, settle: float) -> list[Row]:
        """Rows of processes seen more than once: a fork lives for a moment."""
        return [self._row(role, seen, settle) for (role, _), seen in self.of.items() if len(seen) > 1]

    def _row(self, role: str, seen: list[tuple[float, int]], settle: float) -> Row:
        minutes: dict[int, list[int]] = defaultdict(list)
        for minute, nbytes in seen:
            if minute >= settle:
                minutes[int(minute - settle)].append(nbytes)
        means = [statistics.fmean(each) for _, each in sorted(minutes.items())]
        base = means[0] if means else float("nan")
        away = max((abs(mean - base) for mean in means), default=0.0)
        return {
            "process": role, "mib_settled": base / 2**20, "mib_last": means[-1] / 2**20 if means else None,
            "largest_change": away / base if means else None,
            "flat": bool(means) and away <= max(MOST_CHANGE * base, LEAST_BYTES),
            "first_minute": seen[0][0], "last_minute": seen[-1][0],
        }  # fmt: skip


async def load(url: str, asked: argparse.Namespace) -> tuple[Tally, Samples, Row]:
    tally, samples, began = Tally(), Samples(), monotonic()
    ends = began + 60 * asked.minutes
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False) as http:
        clients = [asyncio.create_task(client(http, i, ends, tally)) for i in range(asked.clients)]
        while monotonic() < ends:
            await asyncio.sleep(min(asked.sample_seconds, max(0.0, ends - monotonic())))
            minute = (monotonic() - began) / 60
            await asyncio.to_thread(samples.take, minute)
            print(
                f"{minute:5.1f} min {samples.latest()} {dict(tally.ended)} {tally.refused.total()} refused", flush=True
            )
        await asyncio.gather(*clients)
        return tally, samples, await left_over(http)


async def left_over(http: httpx.AsyncClient) -> Row:
    """State that the server still holds once its clients have gone: a client that leaves is noticed within seconds."""
    ends = monotonic() + IDLE_SECONDS
    while True:
        told = (await http.get("/get_server_info")).json()
        stats = told["stats"]
        held = {
            "running": stats["running"], "waiting": stats["waiting"],
            "pages": stats["pages_total"] - stats["pages_free"], "engine_restarts": told["engine_restarts"],
        }  # fmt: skip
        if not any(held.values()) or monotonic() > ends:
            return {f"left_{name}": count for name, count in held.items()}
        await asyncio.sleep(1)


def total(tally: Tally, left: Row) -> Row:
    late = {
        f"{name}_p99_s": statistics.quantiles(seen, n=100)[98] for name, seen in tally.seconds.items() if len(seen) > 1
    }
    return {
        "process": "all", **{f"{name}_answers": count for name, count in tally.ended.items()},
        "refused": sum(tally.refused.values()), "failed": sum(tally.failed.values()), **late, **left,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--settle-minutes", type=float, default=5, help="before memory is compared")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--sample-seconds", type=float, default=10)
    parser.add_argument("--note", help="what the rows say beside the numbers: what else the machine did, for example")
    parser.add_argument("--out", type=Path, help="a directory of results, or a file")
    asked = parser.parse_args()
    with own_server(asked.model, FLAGS) as url:
        tally, samples, left = asyncio.run(load(url, asked))
    about = {"bench": "soak", "model": asked.model, "clients": asked.clients, "minutes": asked.minutes}
    if asked.note:
        about["note"] = asked.note
    rows = [*samples.rows(asked.settle_minutes), total(tally, left)]
    for row in rows:
        print(json.dumps(row))
    for what, count in tally.failed.most_common():
        print(f"failed {count} times: {what}")
    if asked.out is not None:
        write([about | row | stamp(machine_name(Machine.detect())) for row in rows], asked.out)
    held = [f"{name}: {count}" for name, count in left.items() if count]
    if held:
        print(f"still there after {IDLE_SECONDS:.0f} s: {', '.join(held)}")
    return 0 if not tally.failed and not held and all(row.get("flat", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
