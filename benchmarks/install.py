"""How long a newcomer waits: from a fresh clone and an empty HOME to the first answer of `make serve`.

    PYTHONPATH=src python benchmarks/install.py --commit HEAD --keep benchmarks/results

Clones the commit into a temporary directory, runs `make serve` there without ccache and without pip's cache, asks for
one answer over HTTP, and stops everything. `s` is seconds of the wall, `cpu_s` processor seconds of all its processes
(compiling, pip, building the demo model, the server), `compile_cpu_s` those of compilers alone. Nothing else
should run.
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
from pathlib import Path
from typing import Any

from tandem.bench.rows import keep, stamp
from tandem.config.machine import Machine

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


def until_first_answer(clone: Path, env: dict[str, str], port: int) -> float:
    """Seconds from `make serve` to its first answer. Raises RuntimeError when it ends before that."""
    command = ["make", "serve", f"ARGS=--port {port}"]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=clone, env=env, start_new_session=True) as served:
        try:
            while not answers(port):
                if served.poll() is not None:
                    raise RuntimeError(f"make serve ended with {served.returncode}")
                time.sleep(0.2)
            return time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(served.pid, signal.SIGTERM)
            served.wait()


def compile_seconds(file: Path) -> float | None:
    if not file.exists():
        return None
    return sum(float(word) for line in file.read_text().splitlines() for word in line.split() if word[0].isdigit())


def measured(commit: str, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        home, clone, tools = Path(name) / "home", Path(name) / "clone", Path(name) / "tools"
        home.mkdir()
        compilers(tools)
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "-q", commit], check=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = until_first_answer(clone, environment(home, tools), port)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found = {"s": round(seconds), "cpu_s": round(spent)}
        compiling = compile_seconds(home / "compile-times")
        return found if compiling is None else found | {"compile_cpu_s": round(compiling)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", action="append", help="measured in this order; default: HEAD")
    parser.add_argument("--port", type=int, default=30999)
    parser.add_argument("--keep", type=Path, help="directory of results to add the rows to")
    asked = parser.parse_args()
    here = Machine.detect()
    rows = []
    for commit in asked.commit or ["HEAD"]:
        ask = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", commit]
        short = subprocess.check_output(ask, text=True).strip()
        row = {"bench": "install", "how": "source", "cores": len(here.cores), **measured(commit, asked.port)}
        rows.append(row | stamp(here.cpu_model) | {"commit": short})
        print(json.dumps(rows[-1]), flush=True)
    if asked.keep:
        keep(rows, asked.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
