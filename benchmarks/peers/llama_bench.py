"""llama.cpp beside Tandem on a GPU machine: Qwen3-30B-A3B's dimensions with made-up weights, in turns, in one run.

    PYTHONPATH=src python benchmarks/peers/llama_bench.py --program BUILD/out/bin/llama-bench --folder /dev/shm

Experts are Q4_0 there and int4 in groups of 32 here: codes of the same 4.5 bits. Other projections are Q4_0 and
int4-g128 (or bf16 in both: --dense bf16); the head is Q6_K there and bf16 here. With half on the GPU, llama.cpp has the
experts of half the layers there, and Tandem half the experts of each layer. llama.cpp runs with several flags, and the
best counts at each point. Rows: {"bench": "peers", "peer": "llama.cpp", "gpu_share": …, "ratio": …}; above 1: Tandem
is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "src"))

from made_up_gguf import QWEN3_30B, FileTypes, Sizes, room, write  # noqa: E402

PROMPTS = 512, 2048, 8192
DECODE, CONTEXT = 64, 128  # tokens decoded there; tokens of the sequence here
WARM, TIMED = 4, 4  # prompts of each length: a start's first ones teach what bus and CPU take; `-r` there
OURS_DENSE = {"q4_0": "int4-g128", "bf16": "bf16"}
Point = tuple[str, int]
"""What is measured ("decode" or "prompt"), and of how many tokens."""
Rates = dict[Point, float]
"""Tokens per second."""


class Peer:
    """`llama-bench` on one file."""

    def __init__(self, program: Path, file: Path, layers: int, threads: int) -> None:
        self._words = [str(program), "-m", str(file), "-r", str(TIMED), "-o", "json", "-t", str(threads)]
        self._layers, self.version, self.best = layers, "", dict[tuple[float, Point], str]()

    def rates(self, share: float, cpu_only: bool = False) -> Rates:
        """The best of all flags that are tried, at each point."""
        found = Rates()
        for flags in self._flags(share, cpu_only):
            for point, rate in self._run(flags).items():
                if rate > found.get(point, 0.0):
                    found[point] = rate
                    self.best[share, point] = " ".join(flags)
        return found

    def _flags(self, share: float, cpu_only: bool) -> Iterator[list[str]]:
        """Experts in plain host memory are streamed to the GPU for prompts; repacked, the CPU has them faster."""
        prompts = ",".join(map(str, PROMPTS))
        if cpu_only:
            yield ["-ngl", "0", "-p", "64", "-n", "8"]
            return
        base = ["-ngl", "99", "-fa", "on", "-lm", "none", "-n", str(DECODE), "-b", "8192"]
        if share == 1.0:
            yield [*base, "-p", prompts, "-ub", "512,2048"]
            return
        base += ["-ncmoe", str(round((1 - share) * self._layers))]
        yield [*base, "--repack", "0", "-p", prompts, "-ub", "2048,8192"]
        yield [*base, "--repack", "1", "-p", str(PROMPTS[0]), "-ub", "2048"]

    def _run(self, flags: list[str]) -> Rates:
        done = subprocess.run([*self._words, *flags], capture_output=True, text=True, timeout=240)
        if done.returncode:
            print(f"llama-bench {' '.join(flags)}: {done.stderr[-400:]}", file=sys.stderr, flush=True)
            return {}
        rates: Rates = {}
        for row in json.loads(done.stdout):
            self.version = f"{row['build_number']} {row['build_commit']}"
            point = ("decode", row["n_gen"]) if row["n_gen"] else ("prompt", row["n_prompt"])
            rates[point] = max(rates.get(point, 0.0), float(row["avg_ts"]))
        return rates


class Ours:
    """A model of made-up weights on the GPU, with a share of its experts there."""

    def __init__(self, share: float, dense: str, layers: int | None, threads: int | None) -> None:
        from tandem.bench import hybrid, prefill

        flags = prefill.PrefillFlags("qwen3-30b-a3b", ("INT4",), (share,), PROMPTS, layers, threads=threads)
        request = dataclasses.replace(flags.model(), dense=OURS_DENSE[dense], steps=DECODE, repeats=2)
        self._built = hybrid.build(
            request, "INT4", share, chunked_prefill_size=flags.chunk, kt_gpu_prefill_token_threshold=None
        )
        self._decode = dataclasses.replace(request, context=CONTEXT)

    def rates(self) -> Rates:
        from tandem.bench import hybrid, prefill

        rates: Rates = {("decode", DECODE): 1 / min(hybrid.step_times(self._built, 1, self._decode))}
        for tokens in PROMPTS:
            times = list(prefill.prompt_seconds(self._built, tokens, WARM + TIMED - 1))
            print(f"prompts of {tokens}, ms: {[round(1e3 * each, 1) for each in times]}", file=sys.stderr, flush=True)
            rates["prompt", tokens] = tokens / statistics.median(times[-TIMED:])
        return rates


def in_turns(ours: Ours, peer: Peer, share: float, rounds: int, until: float) -> dict[str, dict[Point, list[float]]]:
    """Rates of each; a round after `until` (of perf_counter) is left out, but for the first."""
    found: dict[str, dict[Point, list[float]]] = {"kt": defaultdict(list), "llama.cpp": defaultdict(list)}
    engines = {"kt": ours.rates, "llama.cpp": lambda: peer.rates(share)}
    for number in range(rounds):
        if number and perf_counter() > until:
            break
        for name in sorted(engines, reverse=bool(number % 2)):
            for point, rate in engines[name]().items():
                found[name][point].append(rate)
            print(f"share {share}, round {number + 1}: {name} {dict(found[name])}", file=sys.stderr, flush=True)
    return found


def rows_of(found: dict[str, dict[Point, list[float]]], peer: Peer, share: float, dense: str) -> list[dict[str, Any]]:
    rows = []
    for point in found["kt"].keys() & found["llama.cpp"].keys():
        own, theirs = (statistics.median(found[name][point]) for name in ("kt", "llama.cpp"))
        rows.append({
            "bench": "peers", "peer": "llama.cpp", "version": peer.version, "config": "qwen3-30b-a3b",
            "format": "int4", "peer_format": "q4_0", "dense": OURS_DENSE[dense], "peer_dense": dense,
            "gpu_share": share, "what": point[0], "tokens": point[1], "tok_s": round(own, 1),
            "tok_s_peer": round(theirs, 1), "ratio": round(own / theirs, 3), "peer_flags": peer.best[share, point],
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["what"], row["tokens"]))


def try_peer(peer: Peer) -> int:
    """For a machine without a GPU."""
    rates = peer.rates(0.0, cpu_only=True)
    print(peer.version, rates)
    return 0 if rates else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="llama-bench, with CUDA")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for the file: 17 GB")
    parser.add_argument("--dense", default="q4_0", choices=list(OURS_DENSE))
    parser.add_argument("--layers", type=int, default=QWEN3_30B.layers)
    parser.add_argument("--experts", type=int, default=QWEN3_30B.experts, help="fewer: with --peer-only")
    parser.add_argument("--share", type=float, action="append", help="default: 0, 0.5, 1")
    spinning = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument("--threads", type=int, default=spinning, help="of llama.cpp, which spins")
    parser.add_argument("--own-threads", type=int, help="default: all cores")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no second round begins")
    parser.add_argument("--peer-only", action="store_true", help="try llama.cpp on the CPU, and measure nothing")
    parser.add_argument("--out", type=Path, help="JSON")
    flags, began = parser.parse_args(), perf_counter()
    sizes: Sizes = dataclasses.replace(QWEN3_30B, layers=flags.layers, experts=flags.experts)
    if room(flags.folder) < 18e9 * flags.layers / QWEN3_30B.layers:
        parser.error(f"{flags.folder} has {room(flags.folder) / 1e9:.0f} GB left")
    file = write(flags.folder / "peers.gguf", sizes, FileTypes("q4_0", "q4_0", flags.dense, "q6_k"))
    print(f"{file.stat().st_size / 1e9:.1f} GB written in {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    peer = Peer(flags.program, file, flags.layers, flags.threads)
    try:
        if flags.peer_only:
            return try_peer(peer)
        rows = list(measured(flags, peer, began))
    finally:
        file.unlink()
    if flags.out:
        flags.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def measured(flags: argparse.Namespace, peer: Peer, began: float) -> Iterator[dict[str, Any]]:
    from tandem.bench.rows import machine_name, stamp
    from tandem.engine.start.loader import use_one_torch_thread
    from tandem.machine.machine import Machine

    use_one_torch_thread()
    columns = stamp(machine_name(Machine.detect(), flags.own_threads))
    layers = None if flags.layers == QWEN3_30B.layers else flags.layers
    for share in flags.share or [0.0, 0.5, 1.0]:
        ours = Ours(share, flags.dense, layers, flags.own_threads)
        print(f"share {share}: loaded after {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        found = in_turns(ours, peer, share, flags.rounds, began + flags.seconds)
        del ours
        gc.collect()
        for row in rows_of(found, peer, share, flags.dense):
            print(json.dumps(row | columns), flush=True)
            yield row | columns


if __name__ == "__main__":
    sys.exit(main())
