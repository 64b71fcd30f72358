"""`kt bench report`: one JSON that a user can send: the machine, a plan, what was predicted and what was measured.

It names no user, host or path: of the model, the last part of its name.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.bench.compare import FORMAT
from tandem.bench.probes import MachineProbe
from tandem.bench.rows import commit
from tandem.bench.sample import verified
from tandem.checkpoint import with_draft_config
from tandem.engine.start.model_files import inspect
from tandem.engine.start.planning import model_at, stored_at
from tandem.flags.engine_config import EngineConfig
from tandem.hub.names import shown_name
from tandem.kernels.this_machine import this_machine
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.report import ForecastSizes, report
from tandem.spec.small_files import write_output

PRIVATE = frozenset((
    "model", "kt_weight_path", "api_key", "api_key_file", "host", "init_expert_location", "packed_cache",
    "expert_distribution_recorder_dir", "served_model_name", "dist_init_addr",
))  # fmt: skip


def build(config: EngineConfig, load: ForecastSizes = ForecastSizes()) -> dict[str, Any]:
    """Measures for some seconds. Raises ConfigError where the model does not fit this machine."""
    machine = this_machine()
    probe = MachineProbe(machine)
    model, stored = inspect(config.model, lambda path: _subject(path, config))
    question = PlanQuestion(config, model, machine, stored, wished_speeds(MachineWish(), machine, probe.speeds()))
    question.plan()  # before it takes time
    measured, question, load = verified(question, probe, load)
    planned = report(shown_name(config.model), question, (), load)
    return {
        "bench": "report", "format": FORMAT, "machine": machine_dict(machine), "software": software(),
        "flags": _flags(config),
        "plan": planned.as_dict(), "measured": measured,
        "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _flags(config: EngineConfig) -> dict[str, Any]:
    """Those that were given and say nothing of where things are or who may use them."""
    return {name: getattr(config, name) for name in sorted(config.explicit - PRIVATE)}


def _subject(path: Path, config: EngineConfig) -> Any:
    model = with_draft_config(model_at(path), config)
    return model, stored_at(path, model, config.kt_weight_path)


def machine_dict(machine: Machine) -> dict[str, Any]:
    """Without what tells one machine from another of its kind."""
    facts = dataclasses.asdict(machine) | {"cores": len(machine.cores), "nodes": len(machine.nodes)}
    facts["gpus"] = [{k: v for k, v in gpu.items() if k != "uuid"} for gpu in facts["gpus"]]
    return facts


def software() -> dict[str, str]:
    import torch

    return {
        "tandem": __version__, "python": platform.python_version(), "system": platform.platform(terse=True),
        "torch": torch.__version__, "cuda": str(torch.version.cuda or ""),
    }  # fmt: skip


def write(config: EngineConfig, out: Path) -> dict[str, Any]:
    from rich.console import Console

    with Console(stderr=True).status("measuring this machine, and some layers of the model …"):
        content = build(config)
    write_output(out, (json.dumps(content, indent=1, default=str) + "\n").encode())
    print(f"written to {out}", file=sys.stderr)
    return content


def lines(content: dict[str, Any]) -> list[str]:
    """Lines of rates as measured, each beside what was predicted of it."""
    predicted = content["plan"]["predicted"]
    ranges = (predicted["decode"]["1"], predicted["prompt"])
    return [
        f"{name}: {rate:.1f} tokens/s measured, {each['low']:.1f} to {each['high']:.1f} predicted"
        for (name, rate), each in zip(content["measured"].items(), ranges, strict=True)
    ]
