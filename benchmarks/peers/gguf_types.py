"""GGUF's types, each as a made-up Mixture-of-Experts file in llama.cpp and in Tandem, on the CPU, in turns.

    PYTHONPATH=src python benchmarks/peers/gguf_types.py --llama LLAMA.CPP BUILD --type q2_k --type iq2_xxs --threads 1

LLAMA.CPP is its source and BUILD a folder of static libraries of it (cmake -DBUILD_SHARED_LIBS=OFF). Both engines have
a process each, with the same file, and take turns: A B B A. Rows: {"bench": "peers", "format": …, "peer": "llama.cpp",
"ratio": …, "cpu_ratio": …}: its seconds divided by ours, medians of pairs, of a decoded token and of prompts; by the
clock, and by CPU time, which other users of the machine hardly change where a process has one thread. With more, what
llama.cpp's threads spend on waiting counts, too, so they need a quiet machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "src"))

from made_up_gguf import KINDS, QWEN3_30B, QWEN3_235B, FileTypes, write  # noqa: E402

from tandem.bench.rows import keep, machine_name, stamp  # noqa: E402
from tandem.machine.machine import Machine  # noqa: E402

HERE = Path(__file__).parent
SIZES = {  # layers and experts as memory allows
    "qwen3-235b-a22b": dataclasses.replace(QWEN3_235B, layers=2, experts=16, vocab=4096),
    "qwen3-30b-a3b": dataclasses.replace(QWEN3_30B, layers=6, experts=48, vocab=4096),
}
LIBRARIES = "src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a"


class Engine:
    """A process that is told what to do, line by line, and answers with seconds."""

    def __init__(self, command: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        self._run = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip

    def seconds(self, what: str) -> tuple[float, float]:
        """By the clock, and of CPU time."""
        assert self._run.stdin and self._run.stdout
        self._run.stdin.write(what + "\n")
        self._run.stdin.flush()
        clock, used = self._run.stdout.readline().split()
        return float(clock), float(used)

    def end(self) -> None:
        self._run.kill()
        self._run.wait()


@contextmanager
def engines(commands: list[list[str]]) -> Iterator[list[Engine]]:
    each = [Engine(command) for command in commands]
    try:
        yield each
    finally:
        for engine in each:
            engine.end()


def peer_program(source: Path, build: Path, folder: Path) -> Path:
    include = [f"-I{source / name}" for name in ("include", "ggml/include")]
    libraries = [str(build / name) for name in LIBRARIES]
    words = ["g++", "-O2", "-std=c++17", *include, str(HERE / "llama_turns.cc"), "-o", str(folder / "llama_turns")]
    subprocess.run([*words, *libraries, "-fopenmp", "-lpthread", "-ldl"], check=True)
    return folder / "llama_turns"


def peer_version(build: Path) -> str:
    """As llama-bench, which is built beside the libraries, says it."""
    done = subprocess.run([build / "bin" / "llama-bench", "--version"], capture_output=True, text=True)
    found = re.search(r"version: (.*)", done.stdout + done.stderr)
    return found[1] if found else "unknown"


def measured(ours: Engine, peer: Engine, what: str, rounds: int) -> dict[str, Any]:
    """Ratios above 1: ours is faster."""
    for engine in (ours, peer):
        engine.seconds(what)
    pairs = []
    for number in range(rounds):
        first, second = (ours, peer) if number % 2 == 0 else (peer, ours)
        times = {id(engine): engine.seconds(what) for engine in (first, second)}
        pairs.append((times[id(ours)], times[id(peer)]))
    name, tokens = what.split()[0], int(what.split()[1])
    ratios = [[theirs[i] / own[i] for own, theirs in pairs] for i in (0, 1)]
    return {
        f"{name}_ratio": round(statistics.median(ratios[0]), 3),
        f"{name}_cpu_ratio": round(statistics.median(ratios[1]), 3),
        f"{name}_tok_s": round(tokens / statistics.median(own[0] for own, _ in pairs), 1),
        f"{name}_tok_s_peer": round(tokens / statistics.median(theirs[0] for _, theirs in pairs), 1),
        f"{name}_cpu_ms": round(1e3 / tokens * statistics.median(own[1] for own, _ in pairs), 3),
        f"{name}_cpu_ms_peer": round(1e3 / tokens * statistics.median(theirs[1] for _, theirs in pairs), 3),
    }


def row_of(kind: str, flags: argparse.Namespace, program: Path, folder: Path) -> dict[str, Any]:
    down = flags.down or kind
    file = write(folder / f"{kind}.gguf", SIZES[flags.config], FileTypes(kind, down, flags.dense, "q6_k"))
    rounded = ["int8"] if flags.int8_activations else []
    commands = [
        [sys.executable, str(HERE / "kt_turns.py"), str(file), str(flags.threads), *rounded],
        [str(program), str(file), str(flags.threads)],
    ]
    row = {"bench": "peers", "config": flags.config, "format": kind, "peer": "llama.cpp", "threads": flags.threads}
    row["activations"] = "int8 in both" if flags.int8_activations else "exact here, int8 there"
    try:
        with engines(commands) as (ours, peer):
            row |= measured(ours, peer, f"decode {flags.decode}", flags.rounds)
            for tokens in flags.prompt or ():
                found = measured(ours, peer, f"prompt {tokens}", max(2, flags.rounds // 4))
                row |= {name.replace("prompt", f"prompt_{tokens}"): value for name, value in found.items()}
    finally:
        file.unlink()
    return row | {"ratio": row["decode_ratio"], "load": round(os.getloadavg()[0], 1), "rounds": flags.rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", nargs=2, type=Path, required=True, metavar=("SOURCE", "BUILD"))
    parser.add_argument("--type", action="append", choices=[kind for kind in KINDS if kind not in ("f32", "bf16")])
    parser.add_argument("--down", help="type of the experts' downs; default: the same")
    parser.add_argument("--dense", default="q4_k", help="type of attention's projections")
    parser.add_argument("--config", default="qwen3-235b-a22b", choices=list(SIZES))
    parser.add_argument("--threads", type=int, default=len(Machine.detect().cores))
    parser.add_argument("--decode", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--prompt", type=int, action="append", metavar="TOKENS")
    parser.add_argument("--int8-activations", action="store_true", help="here, too, which is lossy")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="of results, to add the rows to")
    flags = parser.parse_args()
    rows, columns = list[dict[str, Any]](), stamp(machine_name(Machine.detect(), flags.threads))
    columns["version"] = peer_version(flags.llama[1])
    for path, name in zip(flags.llama, ("LLAMA.CPP", "BUILD"), strict=True):
        columns["command"] = columns["command"].replace(str(path), name)
    with tempfile.TemporaryDirectory(prefix="tandem-peers-") as scratch:
        program = peer_program(*flags.llama, Path(scratch))
        for kind in flags.type or [kind for kind in KINDS if kind not in ("f32", "bf16")]:
            rows.append(row_of(kind, flags, program, Path(scratch)) | columns)
            print(json.dumps(rows[-1]), flush=True)
    if flags.keep:
        keep(rows, flags.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
