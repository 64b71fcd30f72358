"""Questions to `kt plan` about machines with several GPUs."""

from __future__ import annotations

from tandem.bench.architectures import named_subject
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import TIERS, Core, Machine
from tandem.planner.choices.decision import Decision
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_machine, wished_speeds
from tandem.planner.forecast.prediction import Prediction
from tandem.planner.plan import Plan

HERE = Machine("Test CPU", tuple(Core(cpu, 0, 0) for cpu in range(64)), TIERS, 384 << 30, 370 << 30, None)
NEXT = "qwen3-next-80b-fp8"


def question(name: str, gpus: str, **flags: object) -> PlanQuestion:
    wish = MachineWish(gpus=gpus, bandwidth="250GB/s")
    machine = wished_machine(wish, HERE)
    return PlanQuestion(
        EngineConfig.from_keywords(name, **flags), *model_of(name, machine), speeds=wished_speeds(wish, machine, None)
    )


def model_of(name: str, machine: Machine) -> tuple:
    model, stored = named_subject(name)
    return model, machine, stored


def decision(plan: Plan, name: str) -> Decision:
    return next(each for each in plan.decisions if each.name == name)


def predicted(asked: PlanQuestion, plan: Plan | None = None) -> Prediction:
    return asked.predicted(plan or asked.plan(), (1, 8))
