"""Predictions of `kt plan` beside what the same model takes on this machine, for several plans.

    python benchmarks/plan_measured.py --out benchmarks/results

As `kt plan --verify` does, for each plan: the machine's speeds are read beside its samples, and their medians count. No
prediction sees a measured time of a model. Rows: `predicted_low`, `predicted_high` and
`measured` in tokens per second, of decoding one sequence and of a prompt; `speeds`, in GB/s, TFLOPS and us, and
`parts`, ms, say what the prediction stands on.

    python benchmarks/plan_measured.py --tight --out benchmarks/results

runs plans whole that fill a small GPU, of which another process holds the rest (`tandem.bench.tight`). Rows: memory
that was planned and used, that of steps apart, and speeds as above. `--only 0` to `--only 2`: one of them.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem.bench.architectures import named_subject
from tandem.bench.probes import MachineProbe
from tandem.bench.rows import Row, keep, machine_name, stamp
from tandem.bench.sample import verified
from tandem.bench.tight import CASES as CASES_TIGHT
from tandem.bench.tight import TightCase
from tandem.bench.tight import measured as tight_rows
from tandem.errors import TandemError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.this_machine import these_cpus, this_machine
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.prediction import Range
from tandem.planner.forecast.report import ForecastSizes
from tandem.planner.forecast.speeds import Speeds
from tandem.spec.model_config import STORED

CASES = (
    ("qwen3-30b-a3b", "INT4", 0.0), ("qwen3-30b-a3b", "INT4", 1.0), ("deepseek-v2-lite", "INT4", 0.0),
    ("glm-4.5-air", "INT4", 0.5), ("qwen3-30b-a3b", "INT4", 0.5), ("olmoe-1b-7b", "BF16", 1.0),
    ("gpt-oss-120b", STORED, 0.5), ("mixtral-8x7b", "INT4", 0.5), ("qwen3-30b-a3b", "INT8", 0.5),
    ("glm-4.5-air", "INT4", 0.0), ("deepseek-v2-lite", "INT8", 1.0), ("qwen3-30b-a3b", "BF16", 0.25),
    ("qwen3-next-80b", "INT4", 0.5), ("gpt-oss-20b", STORED, 0.0), ("deepseek-v4-flash", STORED, 0.33),
)  # fmt: skip
"""Names, --kt-method or what is stored, and shares of the experts on the GPU."""


Case = tuple[str, str, float]


def question(name: str, method: str, share: float, machine: Machine, speeds: Speeds) -> PlanQuestion:
    model, stored = named_subject(name)
    flags: dict[str, Any] = {} if method == STORED else {"kt_method": method}
    if machine.gpus:
        flags["kt_gpu_experts_ratio"] = share
    config = EngineConfig.from_keywords(name, max_total_tokens=8192, **flags)
    return PlanQuestion(config, model, machine, stored, speeds)


def rows(name: str, method: str, share: float, machine: Machine) -> Iterator[Row]:
    probe = MachineProbe(machine)
    asked = question(name, method, share, machine, wished_speeds(MachineWish(), machine, probe.speeds()))
    measured, asked, of = verified(asked, probe, ForecastSizes())
    predicted = asked.predicted(asked.plan(), (1,), of.context, of.prompt)
    speeds = _rounded(asked.speeds)
    for (what, rate), found in zip(measured.items(), (predicted.decode[1], predicted.prompt), strict=True):
        parts = {part: round(seconds * 1e3, 2) for part, seconds in found.parts.items()}
        row = _row(name, method, share, what, found)
        yield row | {"measured": round(rate, 1), "speeds": speeds, "parts": parts}


def _rounded(speeds: Speeds) -> dict[str, float]:
    return {
        "dram": round(speeds.dram_gbps, 1), "cpu": round(speeds.cpu_flops / 1e12, 2),
        "cpu_attention": round(speeds.cpu_attention_flops / 1e12, 3),
        "gpu_memory": round(speeds.gpu_gbps), "gpu": round(speeds.gpu_flops / 1e12),
        "bus": round(speeds.pcie_gbps, 1), "kernel": round(speeds.kernel_seconds * 1e6, 2),
        "launch": round(speeds.launch_seconds * 1e6, 2),
    }  # fmt: skip


def _row(name: str, method: str, share: float, what: str, found: Range) -> Row:
    return {
        "bench": "plan", "config": name, "method": method, "gpu_share": share, "what": what,
        "predicted_low": round(found.low, 1), "predicted_high": round(found.high, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="keep the rows here, plan after plan")
    parser.add_argument("--only", help="plans whose names have this in them; of --tight: a number")
    parser.add_argument("--tight", action="store_true", help="plans that fill a small GPU")
    parser.add_argument("--after", type=int, default=0, help="leave so many plans out")
    parser.add_argument("--until", type=int, help="only the first ones, so many")
    parser.add_argument("--log", action="store_true", help="show what the engine says of its start")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.log else logging.WARNING)
    if options.tight:
        _tight(options.only, options.out)
        return
    machine = this_machine()
    cases = [case for case in CASES[options.after : options.until] if options.only is None or options.only in case[0]]
    for each in cases:
        _measure(each, machine, options.out)


def _measure(case: Case, machine: Machine, out: Path | None) -> None:
    started = perf_counter()
    try:
        made = list(rows(*case, machine))
    except TandemError as error:
        print(*case, error, flush=True)
        return
    for row in made:
        holds = row["predicted_low"] <= row["measured"] <= row["predicted_high"]
        print({key: row[key] for key in list(row)[1:8]}, "holds" if holds else "OUTSIDE", row["parts"])
    print(f"{perf_counter() - started:.0f} s; {made[0]['speeds']}", flush=True)
    if out is not None:
        where = stamp(machine_name(Machine.detect()))
        keep([row | where for row in made], out)


def _tight(only: str | None, out: Path | None) -> None:
    """Each case in a process of its own: what CUDA keeps for one counts as what its plan takes."""
    if only is not None:
        _measure_tight(CASES_TIGHT[int(only)], out)
        return
    kept = [] if out is None else ["--out", str(out)]
    for number in range(len(CASES_TIGHT)):
        subprocess.run([sys.executable, __file__, "--tight", "--only", str(number), *kept], check=False)


def _measure_tight(case: TightCase, out: Path | None) -> None:
    started, where = perf_counter(), stamp(machine_name(Machine.detect()))
    try:
        made = tight_rows(case, these_cpus())
    except TandemError as error:
        sys.exit(f"{case.name} on {case.gpu_gib} GiB: {error}")
    for row in made:
        print({key: row[key] for key in list(row)[1:]}, "holds" if row["holds"] else "OUTSIDE", flush=True)
    print(f"{perf_counter() - started:.0f} s", flush=True)
    if out is not None:
        keep([row | where for row in made], out)


if __name__ == "__main__":
    main()
