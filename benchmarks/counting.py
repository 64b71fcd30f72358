"""Cost of counting the chosen experts in a decode step: the same model with and without, in turn, in one process.

    PYTHONPATH=src python benchmarks/counting.py demo --batch 1 --batch 8
    PYTHONPATH=src python benchmarks/counting.py --config qwen3-30b-a3b --layers 48 --json counting.json

A model directory is measured on the CPU; a named architecture (made-up weights, no routed experts, CUDA graphs) on a
GPU. Windows of ten steps alternate (plain, counted, counted, plain, ...); medians of their means are compared. Two
copies of a model in memory differ by chance, too: --counted-first loads them the other way round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.bench.rows import commit
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine

STEPS = 10
TOKENS = 2560  # of each sequence
Step = Callable[[], object]


def cpu_steps(model: str, batch: int, threads: int | None, counted_first: bool) -> tuple[Step, Step]:
    """One decode step of an engine that counts nothing, and of one that does."""
    from tandem.engine.start import loader

    config = EngineConfig.from_keywords(
        model, device="cpu", kt_cpuinfer=threads, max_total_tokens=TOKENS * batch
    )
    counting, steps = loader.expert_usage, {}
    for counted in (counted_first, not counted_first):
        loader.expert_usage = counting if counted else lambda *_arguments: None
        steps[counted] = decoding(loader.load_parts(config), batch)
    return steps[False], steps[True]


def decoding(parts: Any, batch: int) -> Step:
    from tandem.engine.engine import Engine
    from tandem.engine.protocol import GenerateRequest, SamplingSettings

    engine, params = Engine.from_parts(parts), SamplingSettings(temperature=0.0, ignore_eos=True)
    for i in range(batch):
        prompt = [(7919 * (i * 32 + j) + 13) % parts.model_config.vocab for j in range(32)]
        engine.add(GenerateRequest(id=str(i), prompt_ids=prompt, sampling=params))
    while len(engine.step()) < batch:  # prompts
        pass

    def step() -> None:
        if not engine.step():
            sys.exit(f"the KV cache of {TOKENS} tokens is full: give fewer --seconds")

    return step


def gpu_steps(config: str, layers: int | None, batch: int) -> tuple[Step, Step]:
    from tandem.bench import hybrid as bench_hybrid

    asked = bench_hybrid.HybridFlags(config, ("INT4",), (1.0,), (batch,), layers, 1024, STEPS, 1, None)
    built = [bench_hybrid.build(asked, "INT4", 1.0, empty=True, counted=counted) for counted in (False, True)]
    plain, counted = (bench_hybrid.decoder(each, batch, 1024) for each in built)
    return plain, counted


def compare(plain: Step, counted: Step, seconds: float) -> dict[str, float]:
    """Medians in milliseconds."""
    times: dict[Step, list[float]] = {plain: [], counted: []}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for step in (plain, counted, counted, plain):
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[step].append((time.perf_counter() - started) / STEPS * 1e3)
    return {
        "plain_ms": round(statistics.median(times[plain]), 4), "windows": len(times[plain]),
        "counted_ms": round(statistics.median(times[counted]), 4),
        "plain_p10_ms": round(statistics.quantiles(times[plain], n=10)[0], 4),
        "counted_p10_ms": round(statistics.quantiles(times[counted], n=10)[0], 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo", help="directory, measured on the CPU")
    parser.add_argument("--config", help="a named architecture, measured on a GPU without routed experts")
    parser.add_argument("--layers", type=int, help="of --config")
    parser.add_argument("--batch", type=int, action="append", help="default: 1")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each batch size")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--counted-first", action="store_true")
    parser.add_argument("--json", type=Path, help="where the result is written")
    options = parser.parse_args()
    rows, machine = [], Machine.detect()
    for batch in options.batch or [1]:
        if options.config:
            steps = gpu_steps(options.config, options.layers, batch)
        else:
            steps = cpu_steps(options.model, batch, options.threads, options.counted_first)
        row = {
            "bench": "counting",
            "config": options.config or options.model,
            "batch": batch,
            "counted_first": options.counted_first,
        }
        rows.append(row | compare(*steps, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "machine": machine.gpus[0].name if options.config else machine.cpu_model, "commit": commit(),
        "command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([row | about for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
