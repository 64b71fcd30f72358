"""Two versions of the package in turn: how long a decode step on a GPU takes with each, at one time, on one machine.

    python benchmarks/decode_turns.py /tmp/old src --config qwen3-30b-a3b --layers 24

Each version (a folder with `tandem` and its extension) gets two processes with a model of made-up weights each. They
are loaded as first, second, second, first: who is loaded early decodes some per cent faster, and so this cancels out.
In a round each process is timed once; every second round goes backwards. `--once` loads each version only once.

`--prompt TOKENS` times prompts of so many tokens, in chunks as the server has them, while nobody decodes. `--batch N`
decodes N sequences at once.

Prints the median ratio of speeds over the rounds (second version to first; above 1: the second is faster), seconds of
loading, and for each process the medians of a step: milliseconds, microseconds of a layer until the CPU was asked and
until it answered, and experts that the CPU computed for a layer. Versions may choose other experts, so compare these.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

PROMPTS = 5  # of a turn


class Version:
    """A process that uses one version of the package."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self.folder = folder
        command = [sys.executable, __file__, "--serve", str(folder), "--config", asked.config]
        command += ["--format", asked.format, "--steps", str(asked.steps)]
        command += ["--layers", str(asked.layers)] if asked.layers else []
        command += [f"--batch={batch}" for batch in asked.batch or ()]
        command += [f"--prompt={tokens}" for tokens in asked.prompt or ()]
        path = os.pathsep.join(filter(None, (str(folder.resolve()), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )

    def ask(self, what: str, value: float = 0.0) -> list[float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what} {value}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("answer "):
                return [float(each) for each in line.split()[1:]]
        raise SystemExit(f"the process of {self.folder} ended")


def bench_module() -> Any:
    """It has moved since November 23."""
    try:
        return importlib.import_module("tandem.bench.hybrid")
    except ModuleNotFoundError:
        return importlib.import_module("tandem.cli.bench_hybrid")


def flags_class(module: Any, name: str) -> Any:
    """It was named Request until November 29."""
    return getattr(module, name, None) or module.Request


def request_of(bench: Any, asked: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """A request that a model is built by, and more flags."""
    if not asked.prompt:
        batches = tuple(asked.batch or [1])
        return flags_class(bench, "HybridFlags")(
            asked.config, (asked.format,), (0.0,), batches, asked.layers, 1024, asked.steps, 1, None
        ), {}
    prefill = importlib.import_module("tandem.bench.prefill")
    flags = flags_class(prefill, "PrefillFlags")
    request = flags(asked.config, (asked.format,), (0.0,), tuple(asked.prompt), asked.layers)
    return request.model(), {"chunked_prefill_size": request.chunk, "kt_gpu_prefill_token_threshold": None}


def seconds_of(bench: Any, built: Any, request: Any, what: str, value: int) -> float:
    """Seconds of a mean step of `value` sequences, or of the median prompt of as many tokens."""
    if what == "decode":
        return float(next(iter(bench.step_times(built, value, request))))
    prefill = importlib.import_module("tandem.bench.prefill")
    return statistics.median(map(float, prefill.prompt_seconds(built, value, PROMPTS)))


def serve(asked: argparse.Namespace) -> None:
    """Requests by line: load SHARE, decode SEQUENCES, prompt TOKENS. Answers: seconds; of the last two also those of a
    post until the CPU was asked and until it answered, and experts of a post."""
    import torch

    bench = bench_module()
    bench.use_one_torch_thread()
    request, flags = request_of(bench, asked)
    built: Any = None
    for line in sys.stdin:
        what, value = line.split()
        started = perf_counter()
        if what == "load":
            built = None
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            built = bench.build(request, asked.format, float(value), **flags)
            torch.cuda.synchronize()
            print("answer", perf_counter() - started, flush=True)
        else:
            before, cpus = built.counts(), os.sched_getaffinity(0)
            os.sched_setaffinity(0, {built.plan.cpus[0]} if built.plan.cpus[0] >= 0 else cpus)  # as in the server
            step = seconds_of(bench, built, request, what, int(float(value)))
            os.sched_setaffinity(0, cpus)  # the next load asks which CPUs there are
            counts = built.counts().since(before)
            of_post = (counts.wait_seconds, counts.serve_seconds, counts.cpu_experts)
            print("answer", step, *(each / max(1, counts.posts) for each in of_post), flush=True)


def loaded(versions: list[Version], share: float) -> dict[str, Any]:
    """A row's columns of loading, in its order."""
    seconds = [each.ask("load", share)[0] for each in versions]
    return {
        "gpu_share": share, "loaded": [str(each.folder) for each in versions], "load_s": [round(s, 2) for s in seconds]
    }  # fmt: skip


def compare(versions: list[Version], what: str, value: int, rounds: int) -> dict[str, Any]:
    """Rows give figures in the order of loading."""
    found: list[list[list[float]]] = [[] for _ in versions]
    for i in range(rounds + 1):
        for v in range(len(versions))[:: 1 if i % 2 == 0 else -1]:
            figures = versions[v].ask(what, value)
            if i:  # the first round warms up
                found[v].append(figures)
    ratios = [_ratio(versions, [each[i][0] for each in found]) for i in range(rounds)]
    middle = [[statistics.median(column) for column in zip(*each, strict=True)] for each in found]
    return {
        "batch" if what == "decode" else "tokens": value, "ratio": round(statistics.median(ratios), 4),
        "step_ms": [round(each[0] * 1e3, 3) for each in middle],
        "wait_us": [round(each[1] * 1e6, 1) for each in middle],
        "cpu_us": [round(each[2] * 1e6, 1) for each in middle],
        "cpu_experts": [round(each[3], 2) for each in middle], "ratios": [round(r, 4) for r in ratios],
    }  # fmt: skip


def _ratio(versions: list[Version], seconds: list[float]) -> float:
    """Speed of the second version to that of the first, in one round."""
    first = versions[0].folder
    of_first = [s for each, s in zip(versions, seconds, strict=True) if each.folder == first]
    of_second = [s for each, s in zip(versions, seconds, strict=True) if each.folder != first]
    return statistics.mean(of_first) / statistics.mean(of_second)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", type=Path, nargs="*", help="two folders: the older one first")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="INT4")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpu-share", type=float, action="append", help="default: 0, 0.5, 1")
    parser.add_argument("--batch", type=int, action="append", help="sequences of a step; default: 1")
    parser.add_argument("--prompt", type=int, action="append", help="tokens of a prompt, instead of decode steps")
    parser.add_argument("--steps", type=int, default=32, help="of each turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--once", action="store_true", help="a process of each, where four models find no room"
    )
    parser.add_argument("--json", type=Path, help="where the rows are written")
    asked = parser.parse_args()
    if asked.serve:
        return serve(asked)
    first, second = asked.versions
    folders = [first, second] if asked.once else [first, second, second, first]
    versions = [Version(folder, asked) for folder in folders]
    about = {"bench": "decode_turns", "config": asked.config, "format": asked.format, "layers": asked.layers}
    rows = []
    for share in asked.gpu_share or [0.0, 0.5, 1.0]:
        start = loaded(versions, share)
        for value in asked.prompt or asked.batch or [1]:
            figures = compare(versions, "prompt" if asked.prompt else "decode", value, asked.rounds)
            rows.append(about | start | figures)
            print(json.dumps(rows[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    for each in versions:
        each.process.communicate()


if __name__ == "__main__":
    main()
