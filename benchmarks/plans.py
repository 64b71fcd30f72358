"""`kt plan` for every named model on machines that people have: does it fit, and how fast would it be.

Nothing is measured: each machine is as its line says, so the table is the same everywhere.

    python benchmarks/plans.py --json benchmarks/results/plans.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tandem.bench.architectures import CONFIGS, named_subject
from tandem.bench.rows import commit
from tandem.config import EngineConfig, Machine
from tandem.config.forecast.advice import Question
from tandem.config.forecast.machine_spec import MachineWish, wished_machine, wished_speeds
from tandem.config.forecast.prediction import Range
from tandem.config.forecast.report import Report, report
from tandem.config.machine import Core

MACHINES = {
    "laptop, 32 GB": MachineWish("none", "32GB", "60GB/s", 8, "avx2"),
    "desktop, 4090, 64 GB": MachineWish("4090", "64GB", "75GB/s", 16, "avx512_bf16", "25GB/s"),
    "desktop, 5090, 192 GB": MachineWish("5090", "192GB", "85GB/s", 16, "avx512_bf16", "50GB/s"),
    "workstation, 4090, 256 GB": MachineWish("4090", "256GB", "250GB/s", 32, "avx512_bf16", "25GB/s"),
    "server, no GPU, 768 GB": MachineWish("none", "768GB", "350GB/s", 64, "amx"),
    "server, H100, 1 TB": MachineWish("h100", "1TB", "350GB/s", 56, "amx", "55GB/s"),
}
METHODS = (None, "INT4")  # what is lossless first
ANYTHING = Machine("none", (Core(0, 0, 0),), ("scalar",), 1 << 30, 1 << 30)  # every part of it is replaced


def planned(name: str, wish: MachineWish, method: str | None) -> Report:
    model, stored = named_subject(name)
    machine = wished_machine(wish, ANYTHING)
    flags = {} if method is None else {"kt_method": method}
    tokens = min(8192, model.max_positions)
    config = EngineConfig.from_keywords(name, mem_fraction_static=0.9, max_total_tokens=tokens, **flags)
    return report(name, Question(config, model, machine, stored, wished_speeds(wish, machine, None)))


def row(name: str, place: str) -> dict[str, Any]:
    """The first method that fits, and what it gives."""
    for method in METHODS:
        found = planned(name, MACHINES[place], method)
        if found.predicted is not None:
            decode, prompt = found.predicted.decode[1], found.predicted.prompt
            ranges = {"decode": _rounded(decode, 1), "prompt": _rounded(prompt, 0)}
            return {
                "bench": "plans",
                "config": name,
                "machine": place,
                "method": method or "as stored",
                **ranges,
            }
    ways = [way.change for way in found.to_fit][-1:]
    return {
        "bench": "plans",
        "config": name,
        "machine": place,
        "method": None,
        "needs": ways or [found.reasons[0]],
    }


def _rounded(found: Range, digits: int) -> list[float]:
    return [round(found.low, digits), round(found.high, digits)]


def cell(found: dict[str, Any]) -> str:
    if found["method"] is None:
        return f"no: {found['needs'][0]}"[:30]
    low, high = found["decode"]
    return f"{low:g}–{high:g}" + ("" if found["method"] == "as stored" else " (INT4)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    out = parser.parse_args().json
    names = [name for name in CONFIGS if name != "qwen3-512e"]
    rows = [row(name, place) for name in names for place in MACHINES]
    print("| tokens/s of one sequence | " + " | ".join(MACHINES) + " |")
    print("| --- " * (len(MACHINES) + 1) + "|")
    for name in names:
        cells = (cell(found) for found in rows if found["config"] == name)
        print(f"| {name} | " + " | ".join(cells) + " |")
    if out is not None:
        out.write_text(json.dumps([found | {"commit": commit()} for found in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
