"""Two or more GPUs beside one, in turns: decode steps and prompts of a named architecture with made-up weights.

    python benchmarks/ranks_speed.py --config qwen3-30b-a3b --share 1 --batch 1 --batch 32 --prompt 8192

Every rank is a process with a GPU and a part of the cores; the first one also has the whole model on one GPU, with all
cores. They run in turns, so both see the same machine. Rows: {"bench": "decode" | "prefill", "tp": …, "tok_s": …,
"tok_s_one": …, "ratio": …}, medians; `spread`: the least and the largest ratio of a turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem.bench import hybrid
from tandem.bench.prefill import prompt_seconds
from tandem.bench.rows import keep, machine_name, stamp
from tandem.engine.start.loader import use_one_torch_thread
from tandem.kernels.ranks.meeting import Meeting
from tandem.kernels.this_machine import this_machine
from tandem.machine.machine import Machine

CONTEXT, STEPS = 1024, 20


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="INT4", help="of experts, as --kt-method")
    parser.add_argument("--dense", default="bf16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--share", type=float, default=1.0, help="of experts on the GPUs")
    parser.add_argument("--share-one", type=float, help="the same of the one GPU")
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--prompt", type=int, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    asked = arguments().parse_args()
    if asked.rank is not None:
        rank(asked)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        others = [subprocess.Popen([*command, str(each)]) for each in range(1, asked.tp)]
        first = subprocess.Popen([*command, "0"])
        try:
            while first.poll() is None and all(each.poll() is None or each.returncode == 0 for each in others):
                try:
                    first.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            for each in (first, *others):
                each.kill()
    sys.exit(first.returncode or 0)


def rank(asked: argparse.Namespace) -> None:
    use_one_torch_thread()
    rows = []
    if asked.batch:
        rows += list(measured(asked, "decode"))
    if asked.prompt:
        rows += list(measured(asked, "prefill"))
    if asked.rank == 0 and asked.out:
        keep([row | stamp(machine_name(Machine.detect())) for row in rows], asked.out)


def request_of(asked: argparse.Namespace, what: str) -> hybrid.HybridFlags:
    context = CONTEXT if what == "decode" else asked.prompt
    batches = tuple(asked.batch) if what == "decode" else (1,)
    return hybrid.HybridFlags(
        asked.config, (asked.format,), (asked.share,), batches, asked.layers, context, STEPS, asked.repeats, None,
        "auto", asked.dense, prompts=what == "prefill",
    )  # fmt: skip


def placed(request: hybrid.HybridFlags, machine: Machine | None, meeting: Meeting | None) -> hybrid.HybridFlags:
    return dataclasses.replace(request, place=hybrid.BenchPlace(machine, meeting))


def measured(asked: argparse.Namespace, what: str) -> Iterator[dict[str, Any]]:
    """Rows of the first rank; the others compute their part."""
    meeting = Meeting(asked.rank, asked.tp, f"{asked.folder}/{what}", 600.0)
    request = request_of(asked, what)
    flags = {} if what == "decode" else {"chunked_prefill_size": 8192, "kt_gpu_prefill_token_threshold": None}
    started = perf_counter()
    many = hybrid.build(placed(request, None, meeting), asked.format, asked.share, **flags)
    meeting.share("built", b"-")
    one = None
    if asked.rank == 0:
        one_share = asked.share if asked.share_one is None else asked.share_one
        machine = this_machine()
        first = min(machine.gpus, key=lambda gpu: gpu.number)
        machine = dataclasses.replace(machine, gpus=(first,))
        one = hybrid.build(placed(request, machine, None), asked.format, one_share, **flags)
        print(f"{what}: built in {perf_counter() - started:.0f} s; sums: {many.side.ops.group.text()}", flush=True)
    for batch in asked.batch if what == "decode" else (1,):
        of = seconds_of(asked, what, batch, request)
        both = in_turns(meeting, f"{what}-{batch}", of(many), None if one is None else of(one), asked.repeats)
        if asked.rank == 0:
            row = row_of(asked, what, batch, *both)
            print(json.dumps(row), flush=True)
            yield row
        many.side.ops.group.check()


def seconds_of(
    asked: argparse.Namespace, what: str, batch: int, request: hybrid.HybridFlags
) -> Callable[[hybrid.Built], Iterator[float]]:
    """Seconds of a step, or of a prompt, turn after turn."""
    if what == "decode":
        return lambda built: hybrid.step_times(built, batch, request)
    return lambda built: prompt_seconds(built, asked.prompt, asked.repeats)


def in_turns(
    meeting: Meeting, name: str, many: Iterator[float], one: Iterator[float] | None, repeats: int
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = [], []
    for turn in range(repeats):
        meeting.share(f"{name}-{turn}", b"-")
        times[0].append(next(many))
        if one is not None:
            times[1].append(next(one))
    return times


def row_of(
    asked: argparse.Namespace, what: str, batch: int, many: list[float], one: list[float]
) -> dict[str, Any]:
    tokens = batch if what == "decode" else asked.prompt
    ratios = sorted(alone / together for together, alone in zip(many, one, strict=True))
    return {
        "bench": what, "tp": asked.tp, "config": asked.config, "layers": asked.layers, "format": asked.format,
        "dense": asked.dense, "gpu_share": asked.share,
        "gpu_share_one": asked.share if asked.share_one is None else asked.share_one, "batch": batch,
        "tokens": tokens, "tok_s": round(tokens / statistics.median(many), 1),
        "tok_s_one": round(tokens / statistics.median(one), 1), "ratio": round(statistics.median(ratios), 3),
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
    }  # fmt: skip


if __name__ == "__main__":
    main()
