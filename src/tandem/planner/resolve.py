"""`resolve`: from wishes, model and machine to a `Plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tandem.errors import ConfigError, DoesNotFit
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.best_plan import any_plan, best_plan
from tandem.planner.choices.images import with_images
from tandem.planner.choices.requested import as_asked
from tandem.planner.choices.threads import plan_threads
from tandem.planner.expert_format import expert_format_of
from tandem.planner.in_place import against_in_place
from tandem.planner.one_plan import PlanRequest, kernel_tier
from tandem.planner.plan import Plan
from tandem.planner.ranks.notices import with_rank_notices
from tandem.planner.ranks.ranked import ranked
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import UNQUANTISED, StoredFormats


def resolve(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats = UNQUANTISED
) -> Plan:
    """Flags, checkpoint and machine → the plan.

    Raises ConfigError with every reason: each names its flag, and a model that does not fit its numbers.
    """
    refused, model = list[ConfigError](), as_asked(config, model)
    while True:
        try:
            plan = _resolve(PlanRequest(config, model, machine, stored), best_plan)
            break
        except ConfigError as error:
            refused.append(error)
            left = config.without(error.fields)
            if left == config:
                break
            config = left
    if refused:
        kind = DoesNotFit if isinstance(refused[-1], DoesNotFit) else ConfigError
        raise kind(*(reason for error in refused for reason in error.reasons))
    return with_images(with_rank_notices(plan, model, machine), config, model, machine)


def fits(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats = UNQUANTISED
) -> bool:
    """Whether `resolve` makes a plan; quicker, since any will do."""
    try:
        _resolve(PlanRequest(config, as_asked(config, model), machine, stored), any_plan)
    except ConfigError:
        return False
    return True


def machine_refusals(config: EngineConfig, machine: Machine) -> tuple[str, ...]:
    """Refusals on this machine, whatever the model."""
    reasons: list[str] = []
    for check in (lambda: plan_threads(config, machine), lambda: kernel_tier(config, machine)):
        try:
            check()
        except ConfigError as error:
            reasons += error.reasons
    return tuple(reasons)


Planner = Callable[[PlanRequest], Plan]


def _resolve(wish: PlanRequest, planner: Planner) -> Plan:
    """With experts packed or where they lie. Raises ConfigError with one reason or a few."""
    stored = wish.stored
    config, model, machine = ranked(wish.config, wish.model, wish.machine, stored)
    mode = config.map_experts
    against = against_in_place(config, model, expert_format_of(config, stored), stored)
    if mode == "always" and against:
        raise ConfigError(f"--map-experts always: {against}", fields=("map_experts",))
    wish = PlanRequest(config, model, machine, stored, mode == "always")
    if mode == "always" or not stored.in_memory:
        return planner(wish)
    if mode == "never":
        against = "--map-experts never was given"
    try:
        packed = planner(wish)
    except DoesNotFit as error:
        if against:
            raise DoesNotFit(
                f"{error}. Its experts lie in memory and could be used there, but {against}",
                fields=error.fields,
            ) from error
        return planner(replace(wish, in_place=True))
    if against or config.context_length is not None or packed.context_length >= model.max_positions:
        return packed
    in_place_plan = planner(replace(wish, in_place=True))
    return in_place_plan if in_place_plan.context_length > packed.context_length else packed
