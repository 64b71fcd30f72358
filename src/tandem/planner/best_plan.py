"""`best_plan`: on the GPU if there is one, with as little given up as the model needs to fit and to be fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tandem.errors import ConfigError, DoesNotFit, GpuTooSmall
from tandem.planner.choices.decision import Decision
from tandem.planner.expert_format import dtype_of
from tandem.planner.forecast.prediction import WIDTH, WORTH
from tandem.planner.gpu_plan import GPU_FIELDS, SHARE_FIELDS, needs_gpu, usable_gpu
from tandem.planner.one_plan import Device, PlanRequest, one_plan, running_sequences
from tandem.planner.plan import Plan
from tandem.planner.sizing import RamTooSmall, explained
from tandem.planner.tight import (
    USUAL,
    Concessions,
    Tight,
    first_worth,
    room_of,
    token_seconds,
    wanted_tokens,
)

Chooser = Callable[[PlanRequest, Device], Plan]
"""Chooses among the plans for a device. Raises DoesNotFit where there is none."""


def best_plan(wish: PlanRequest) -> Plan:
    """Raises ConfigError with the reasons."""
    return _on_best_device(wish, _least_tight)


def any_plan(wish: PlanRequest) -> Plan:
    """The same where it does not matter which."""
    return _on_best_device(wish, _first_that_fits)


def _on_best_device(wish: PlanRequest, chosen: Chooser) -> Plan:
    gpu, why = usable_gpu(wish.config, wish.model, wish.machine)
    try:
        plan = chosen(wish, (gpu, why))
    except GpuTooSmall as error:
        if flag := needs_gpu(wish.config):
            raise DoesNotFit(
                f"{flag}: {error}; ask for less, or take --device cpu", fields=GPU_FIELDS
            ) from error
        why = str(error)
    else:
        return _unless_better(wish, plan) if chosen is _least_tight else plan
    try:
        return chosen(wish, (None, why))
    except ConfigError as error:
        raise type(error)(f"{why}. Without the GPU: {error}", fields=error.fields) from error


def _unless_better(wish: PlanRequest, plan: Plan) -> Plan:
    """The plan, or one without the GPU where nobody asked for the GPU, and that is clearly faster or has the context
    that the GPU has no room for."""
    gpu, config = plan.gpu, wish.config
    gpu_requested = needs_gpu(config) or config.given_flags(SHARE_FIELDS)
    short = plan.context_length < _context_goal(wish)
    if gpu is None or gpu_requested or (gpu.sizes.experts >= wish.model.routed_experts and not short):
        return plan
    less = f"on {gpu.name} a context of {plan.context_length} tokens would be what fits"
    try:
        on_cpu = _least_tight(wish, (None, less if short else f"without {gpu.name} it is faster"))
    except ConfigError:  # it does not fit, or a flag is for GPUs, such as --kv-cache-dtype fp8_e4m3
        return plan
    if on_cpu.context_length < min(plan.context_length, _context_goal(wish)):
        return plan
    options = [(each, each.context_length, _seconds(wish, each)) for each in (plan, on_cpu)]
    return first_worth(options, _context_goal(wish), WIDTH)


def _least_tight(wish: PlanRequest, device: Device) -> Plan:
    """As usual, if that is long and fast enough. Chosen as if experts stayed where they are: buffers that nobody asked
    for give up nothing. Raises DoesNotFit, as of the usual one, where nothing fits."""
    still = _still(wish, device)
    plan, tight, otherwise = _least_tight_of(still, device)
    return _explained(plan if still is wish else one_plan(wish, device, tight), tight, otherwise)


def _still(wish: PlanRequest, device: Device) -> PlanRequest:
    """The same with experts that stay, where nobody has said whether they move."""
    config = wish.config
    if device[0] is None or config.kt_enable_dynamic_expert_update or config.disable_dynamic_expert_update:
        return wish
    return replace(wish, config=replace(config, disable_dynamic_expert_update=True))


def _least_tight_of(wish: PlanRequest, device: Device) -> tuple[Plan, Tight, str]:
    """The plan, what it gives up, and why."""
    usual, room = _attempt(wish, device, USUAL), _room(wish, device)
    if isinstance(usual, Plan) and not (why := _cramped(wish, usual)):
        return _with_easy(wish, device, usual, room)
    tight_plans = _in_steps(wish, device, room)
    if not tight_plans:
        return _plan_or_raise(_nearest(wish, device, room, usual)), USUAL, ""
    plans = {} if isinstance(usual, DoesNotFit) else {USUAL: usual}
    step = _first(wish, plans | tight_plans, WORTH)
    easy = (replace(each, running=step.running, chunk=step.chunk) for each in room.easy())
    plans |= dict(_attempts(wish, device, easy))
    best = _first(wish, plans, WORTH)
    return plans[best], best, str(usual) if isinstance(usual, DoesNotFit) else why


def _with_easy(wish: PlanRequest, device: Device, usual: Plan, room: Concessions) -> tuple[Plan, Tight, str]:
    """Or what is clearly faster and costs neither answers at once nor context: experts gain the room."""
    if usual.gpu is None or usual.gpu.sizes.experts >= wish.model.routed_experts:
        return usual, USUAL, ""
    plans = {USUAL: usual} | dict(_attempts(wish, device, room.easy()[1:]))
    step = _first(wish, plans, WIDTH)
    return plans[step], step, "it is clearly faster"


def _in_steps(wish: PlanRequest, device: Device, room: Concessions) -> dict[Tight, Plan]:
    """Plans that give up all that is easy and more and more of the rest; nothing where not even the last one fits."""
    for last in room.tightest():
        if isinstance(_attempt(wish, device, last), Plan):
            steps = (replace(each, embedding_in_ram=last.embedding_in_ram) for each in room.steps())
            return dict(_attempts(wish, device, steps))
    return {}


def _first_that_fits(wish: PlanRequest, device: Device) -> Plan:
    usual = _attempt(wish, device, USUAL)
    if isinstance(usual, Plan):
        return usual
    plans = dict(_attempts(wish, device, _room(wish, device).tightest()))
    if not plans:
        raise usual
    return next(iter(plans.values()))


def _attempts(wish: PlanRequest, device: Device, tights: Iterable[Tight]) -> Iterator[tuple[Tight, Plan]]:
    """Those that fit."""
    for tight in tights:
        plan = _attempt(wish, device, tight)
        if isinstance(plan, Plan):
            yield tight, plan


def _attempt(wish: PlanRequest, device: Device, tight: Tight) -> Plan | DoesNotFit:
    try:
        return one_plan(wish, device, tight)
    except DoesNotFit as error:
        return error


def _nearest(wish: PlanRequest, device: Device, room: Concessions, usual: Plan | DoesNotFit) -> Plan | DoesNotFit:
    """Or why it fails, of a tighter one that the GPU has room for: then CPU memory is what is missing."""
    if isinstance(usual, Plan | RamTooSmall):
        return usual
    tighter = (_attempt(wish, device, each) for each in room.tightest())
    return next((error for error in tighter if isinstance(error, RamTooSmall)), usual)


def _plan_or_raise(usual: Plan | DoesNotFit) -> Plan:
    if isinstance(usual, DoesNotFit):
        raise explained(usual)
    return usual


def _cramped(wish: PlanRequest, plan: Plan) -> str:
    """The plan's lack for want of memory; "": none."""
    if plan.context_length < _context_goal(wish):
        return f"a context of {plan.context_length} tokens would be what fits"
    return plan.gpu.sizes.cramped if plan.gpu is not None else ""


def _first(wish: PlanRequest, plans: dict[Tight, Plan], worth: float) -> Tight:
    options = [(tight, plan.context_length, _seconds(wish, plan)) for tight, plan in plans.items()]
    return first_worth(options, _context_goal(wish), worth)


def _seconds(wish: PlanRequest, plan: Plan) -> float:
    return token_seconds(plan, wish.model, wish.stored, wish.machine)


def _context_goal(wish: PlanRequest) -> int:
    return wanted_tokens(wish.config, wish.model)


def _room(wish: PlanRequest, device: Device) -> Concessions:
    running, _ = running_sequences(wish.config, wish.model, dtype_of(wish.config))
    return room_of(wish.config, wish.model, running, device[0] is not None)


def _explained(plan: Plan, tight: Tight, otherwise: str) -> Plan:
    """With what was given up, and why."""
    if tight == USUAL:
        return plan
    done, costs = zip(*tight.texts(), strict=True)
    decision = Decision("made to fit", ", ".join(done), f"{'; '.join(costs)}; else: {otherwise}")
    at = next(i for i, each in enumerate(plan.decisions) if each.name == "device") + 1
    return replace(plan, decisions=(*plan.decisions[:at], decision, *plan.decisions[at:]))
