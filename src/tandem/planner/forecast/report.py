"""`Report`: everything that `kt plan` says of a model on a machine, as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import ConfigError
from tandem.machine.machine import Machine
from tandem.planner.forecast.advice import (
    LARGEST_RAM,
    PlanChange,
    PlanQuestion,
    ways_to_fit,
    ways_to_go_faster,
    ways_to_use_gpu,
)
from tandem.planner.forecast.compare import ComparedPlan
from tandem.planner.forecast.ledger import RAM, Ledger
from tandem.planner.forecast.prediction import CONTEXT, PROMPT, Prediction
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.memory import gib
from tandem.planner.plan import Plan
from tandem.planner.ways import with_way

ENOUGH_TOKENS = 4096  # of KV cache, where a model does not fit and nothing was asked


@dataclass(frozen=True, slots=True)
class ForecastSizes:
    """Sizes to predict for: tokens that a decoding sequence has, tokens of a prompt, sequences decoded together."""

    context: int = CONTEXT
    prompt: int = PROMPT
    batches: tuple[int, ...] = (1, 8)


@dataclass(frozen=True, slots=True)
class Report:
    """plan None: it is refused, for `reasons`; then `ledgers` say what it would take, beside what may be used."""

    model: str
    machine: str
    reasons: tuple[str, ...]
    plan: Plan | None
    ledgers: tuple[Ledger, ...]
    predicted: Prediction | None
    speeds: Speeds
    to_fit: list[PlanChange]
    to_go_faster: list[PlanChange]
    notices: tuple[str, ...] = ()
    to_use_gpu: list[PlanChange] = field(default_factory=list)
    assumed: str = ""  # what of the machine was not said; "": all of it was, or it is this one
    compared: list[ComparedPlan] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.plan is not None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = self.plan
        return {
            "model": self.model, "machine": self.machine, "fits": self.fits, "reasons": list(self.reasons),
            "ledgers": [_ledger_dict(ledger) for ledger in self.ledgers],
            "choices": [] if plan is None else [dataclasses.asdict(decision) for decision in plan.decisions],
            "notices": list(self.notices),
            "predicted": None if self.predicted is None else _prediction_dict(self.predicted),
            "speeds": dataclasses.asdict(self.speeds),
            "to_fit": [dataclasses.asdict(way) for way in self.to_fit],
            "to_go_faster": [dataclasses.asdict(way) for way in self.to_go_faster],
            "idle_gpus": "" if plan is None else plan.idle,
            "to_use_gpu": [dataclasses.asdict(way) for way in self.to_use_gpu], "assumed": self.assumed,
            "compared": [dataclasses.asdict(row) for row in self.compared],
        }  # fmt: skip


def report(
    name: str, question: PlanQuestion, refused: tuple[str, ...] = (), load: ForecastSizes = ForecastSizes()
) -> Report:
    """refused: what of the command line cannot be met anywhere. Planned for as many GPUs as a server would take."""
    about, speeds = (name, machine_text(question.machine)), question.speeds
    question, choice = with_way(question)
    try:
        plan = choice.told(question.plan())
    except ConfigError as error:
        ledgers, notices = _needs(question)
        reasons, ways = (*refused, *error.reasons), ways_to_fit(question)
        return Report(*about, reasons, None, ledgers, None, speeds, ways, [], notices)
    predicted = question.predicted(plan, load.batches, load.context, load.prompt)
    if refused:
        return Report(*about, refused, None, plan.ledgers, predicted, speeds, [], [], plan.notices)
    used = ways_to_use_gpu(question, plan)
    faster = [way for way in ways_to_go_faster(question, plan) if way.changes not in [each.changes for each in used]]
    return Report(*about, (), plan, plan.ledgers, predicted, speeds, [], faster, plan.notices, used)


def _needs(question: PlanQuestion) -> tuple[tuple[Ledger, ...], tuple[str, ...]]:
    """Ledgers with as much RAM as the model needs, next to the RAM that may be used, and notices; empty where more RAM
    does not help."""
    machine, config = question.machine, question.config
    enough = config.max_total_tokens or min(
        config.context_length or ENOUGH_TOKENS, question.model.max_positions
    )
    roomy = dataclasses.replace(machine, total_memory=LARGEST_RAM, available_memory=LARGEST_RAM)
    try:
        where = {"tables": "map"} if question.model.tables and config.tables == "auto" else {}  # memory is no need
        plan = dataclasses.replace(question, machine=roomy).plan(max_total_tokens=enough, **where)
    except ConfigError:
        return (), ()
    ledgers = tuple(_on_machine(ledger, machine) if ledger.place == RAM else ledger for ledger in plan.ledgers)
    return ledgers, (*plan.notices, *filter(None, [plan.idle]))


def _on_machine(roomy: Ledger, machine: Machine) -> Ledger:
    """The same, beside what this machine has."""
    share = machine.available_memory / LARGEST_RAM
    return dataclasses.replace(
        roomy, budget_bytes=int(roomy.budget_bytes * share), free_bytes=machine.available_memory
    )


def machine_text(machine: Machine) -> str:
    names = [gpu.name if "GiB" in gpu.name else f"{gpu.name}, {gib(gpu.memory_bytes)}" for gpu in machine.gpus]
    counted = {name: names.count(name) for name in names}
    gpus = " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counted.items())
    cpu = f"{machine.max_threads} cores, {machine.tiers[-1]}"
    shown = cpu if machine.cpu_model == cpu else f"{machine.cpu_model}, {cpu}"
    return (
        f"{gpus or 'no GPU'}; {shown}; {gib(machine.total_memory)} RAM, {gib(machine.available_memory)} free"
    )


def _ledger_dict(ledger: Ledger) -> dict[str, Any]:
    return dataclasses.asdict(ledger) | {"total_bytes": ledger.total_bytes, "left_bytes": ledger.left_bytes}


def _prediction_dict(predicted: Prediction) -> dict[str, Any]:
    return {
        "decode": {str(batch): dataclasses.asdict(estimate) for batch, estimate in predicted.decode.items()},
        "prompt": dataclasses.asdict(predicted.prompt),
        "context": predicted.context, "prompt_tokens": predicted.prompt_tokens,
    }  # fmt: skip
