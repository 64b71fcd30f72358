"""How long a newcomer waits for the first answer, with an empty HOME and no caches.

    PYTHONPATH=src python benchmarks/install.py --commit HEAD --keep benchmarks/results
    PYTHONPATH=src python benchmarks/install.py --wheel dist/tandem_moe-0.1.0-cp311-*.whl --keep benchmarks/results
    PYTHONPATH=src python benchmarks/install.py --warm .venv/bin/kt --keep benchmarks/results

From source: clones the commit into a temporary directory and runs `make serve` there. From a wheel: makes an empty
environment, installs torch into it (`torch_s`, not part of `s`), then the wheel, and runs `kt serve demo`. Both ask for
one answer over HTTP and stop everything. `s` is seconds of the wall, `cpu_s` processor seconds of all processes,
`compile_cpu_s` those of compilers alone, `mb` the wheel's size. With `--warm` it is installed and has run before: `kt
plan demo`, then `kt serve demo` and an answer, the fastest of three; `plan_s` and `help_s` are those of `kt plan demo`
and `kt --help`. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.bench.rows import keep, stamp
from tandem.machine.machine import Machine

WARM_RUNS = 3
REPOSITORY = Path(__file__).parent.parent
COMPILER = """#!/bin/sh
exec /usr/bin/time -a -o "$COMPILE_TIMES" -f "%U %S" {program} "$@"
"""


def compilers(folder: Path) -> None:
    """Compilers in `folder` that add their processor time to $COMPILE_TIMES; nothing when `time` is not installed."""
    folder.mkdir()
    if shutil.which("/usr/bin/time") is None:
        return
    for name in ("c++", "g++", "cc", "gcc"):
        program = shutil.which(name)
        if program:
            script = folder / name
            script.write_text(COMPILER.format(program=program))
            script.chmod(0o755)


def environment(home: Path, tools: Path) -> dict[str, str]:
    """Ours (pip's mirrors are in it), with an empty HOME, no caches and no environment that is active."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {
        **ours, "HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "CCACHE_DISABLE": "1",
        "COMPILE_TIMES": str(home / "compile-times"), "PIP_NO_CACHE_DIR": "1",
    }  # fmt: skip


def answers(port: int) -> bool:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return bool(json.load(answer)["choices"][0]["message"]["content"])
    except OSError:
        return False


def until_first_answer(command: list[str], where: Path, env: dict[str, str], port: int) -> float:
    """Seconds until the server that `command` starts answers. Raises RuntimeError when it ends before that."""
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=where, env=env, start_new_session=True) as served:
        try:
            while not answers(port):
                if served.poll() is not None:
                    raise RuntimeError(f"{command[0]} ended with {served.returncode}")
                time.sleep(0.2)
            return time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(served.pid, signal.SIGTERM)
            served.wait()


def compile_seconds(file: Path) -> float | None:
    if not file.exists():
        return None
    return sum(
        float(word) for line in file.read_text().splitlines() for word in line.split() if word[0].isdigit()
    )


class Spent:
    """Processor seconds of the processes that ended since it was made."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def seconds(self) -> int:
        return round(self._now() - self._before)


def from_source(commit: str, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        home, clone, tools = Path(name) / "home", Path(name) / "clone", Path(name) / "tools"
        home.mkdir()
        compilers(tools)
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "-q", commit], check=True)
        spent = Spent()
        command = ["make", "serve", f"ARGS=--port {port}"]
        seconds = until_first_answer(command, clone, environment(home, tools), port)
        found = {"how": "source", "s": round(seconds), "cpu_s": spent.seconds()}
        compiling = compile_seconds(home / "compile-times")
        return found if compiling is None else found | {"compile_cpu_s": round(compiling)}


def from_wheel(wheel: Path, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        home, venv, tools = Path(name) / "home", Path(name) / "venv", Path(name) / "tools"
        home.mkdir()
        tools.mkdir()  # no compilers of ours: none must be needed
        env = environment(home, tools) | {"CC": "/bin/false", "CXX": "/bin/false"}
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        python = str(venv / "bin" / "python")
        began = time.perf_counter()
        subprocess.run([python, str(REPOSITORY / "scripts" / "install_torch.py")], env=env, check=True)
        torch_seconds, spent, began = time.perf_counter() - began, Spent(), time.perf_counter()
        subprocess.run([python, "-m", "pip", "install", "-qq", str(wheel)], env=env, check=True)
        installing = time.perf_counter() - began
        command = [str(venv / "bin" / "kt"), "serve", "demo", "--port", str(port)]
        seconds = installing + until_first_answer(command, home, env, port)
        return {
            "how": "wheel", "s": round(seconds), "cpu_s": spent.seconds(), "torch_s": round(torch_seconds),
            "mb": round(wheel.stat().st_size / 1e6, 1),
        }  # fmt: skip


def warm(kt: Path, port: int) -> dict[str, Any]:
    """An install from caches; the first of the runs fills them."""
    program, tries = str(kt.absolute()), []
    for _ in range(1 + WARM_RUNS):
        spent = Spent()
        helped, planned = (timed([program, *words]) for words in (["--help"], ["plan", "demo"]))
        served = until_first_answer([program, "serve", "demo", "--port", str(port)], REPOSITORY, dict(os.environ), port)
        tries.append({
            "how": "warm", "s": round(planned + served, 1), "cpu_s": spent.seconds(), "plan_s": round(planned, 1),
            "help_s": round(helped, 2),
        })  # fmt: skip
    return min(tries[1:], key=lambda each: float(each["s"]))


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    here = Machine.detect()
    common = {"bench": "install", "cores": len(here.cores)}
    for commit in asked.commit or ([] if asked.wheel or asked.warm else ["HEAD"]):
        ask = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", commit]
        short = subprocess.check_output(ask, text=True).strip()
        yield common | from_source(commit, asked.port) | stamp(here.cpu_model) | {"commit": short}
    if asked.warm:
        yield common | warm(asked.warm, asked.port) | stamp(here.cpu_model)
    if asked.wheel:
        yield common | from_wheel(asked.wheel.resolve(), asked.port) | stamp(here.cpu_model)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", action="append", help="from source, in this order; default: HEAD")
    parser.add_argument("--wheel", type=Path, help="from this wheel")
    parser.add_argument("--warm", type=Path, metavar="KT", help="from this installed program")
    parser.add_argument("--port", type=int, default=30999)
    parser.add_argument("--keep", type=Path, help="directory of results to add the rows to")
    asked, found = parser.parse_args(), []
    for row in rows(asked):
        found.append(row)
        print(json.dumps(row), flush=True)
    if asked.keep:
        keep(found, asked.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
