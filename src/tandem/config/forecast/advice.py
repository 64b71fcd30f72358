"""What to change so that a model fits, or is faster: found by planning anew. What loses nothing comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tandem.config.choices.cached import cached_as
from tandem.config.engine_config import EngineConfig
from tandem.config.expert_format import EXPERT_FORMATS
from tandem.config.forecast.machine_spec import system_bytes
from tandem.config.forecast.prediction import CONTEXT, PROMPT, Case, Prediction, predict
from tandem.config.forecast.speeds import GIB, Speeds
from tandem.config.machine import Machine
from tandem.config.memory import DEFAULT_PREFILL_TOKENS, LARGEST_FRACTION, gib
from tandem.config.model_config import FORMAT_BYTES, ModelConfig
from tandem.config.plan import Plan, resolve
from tandem.config.stored import StoredFormats
from tandem.errors import ConfigError

WORTH = 1.15  # times as fast: less is not advised
SHORT_CONTEXT = 8192
LARGEST_RAM = 16 << 40
_SPELLED = {
    "mem_fraction_static": "--mem-fraction-static", "kt_method": "--kt-method", "context_length": "--context-length",
    "chunked_prefill_size": "--chunked-prefill-size", "kt_gpu_experts_ratio": "--kt-gpu-experts-ratio",
    "device": "--device",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned: a model, the flags, the machine and how fast it is."""

    config: EngineConfig
    model: ModelConfig
    machine: Machine
    stored: StoredFormats
    speeds: Speeds

    def plan(self, **changes: Any) -> Plan:
        """With these flags instead. Raises ConfigError."""
        given = self.config.given | set(changes)
        config = dataclasses.replace(self.config, **changes, given=given)
        return resolve(config, self.model, self.machine, self.stored)

    def predicted(
        self, plan: Plan, batches: tuple[int, ...] = (1,), context: int = CONTEXT, prompt: int = PROMPT
    ) -> Prediction:
        model = cached_as(self.config, self.model)
        return predict(Case(model, self.stored, plan, self.speeds), batches, context, prompt)


@dataclass(frozen=True, slots=True)
class Way:
    """A change: flags as typed, or another machine; what it brings; whether answers become less exact."""

    change: str
    brings: str
    lossy: bool = False


def ways_to_fit(question: Question) -> list[Way]:
    """Empty where the model fits as it is. Flags come before memory that has to be bought."""
    if _fits(question, {}):
        return []
    found: list[Way] = []
    for changes, lossy in _fitting_changes(question):
        way = _tried(question, changes, lossy)
        if way is not None and not any(other.change in way.change for other in found):
            found.append(way)
    more = [] if any(not way.lossy for way in found) else [*_more_memory(question, False)]
    more += [] if found else [*_more_memory(question, True)]
    return sorted([*found, *more], key=lambda way: way.lossy)


def _more_memory(question: Question, lossy: bool) -> Iterator[Way]:
    """How much RAM would do, as the model is stored or with smaller experts."""
    more: dict[str, Any] = {"mem_fraction_static": LARGEST_FRACTION}
    methods = _smaller_methods(question)[-1:] if lossy else [None]
    for method in methods:
        changes = more if method is None else {"kt_method": method} | more
        if needed := least_ram(question, changes):
            brings = f"fits with {_typed(changes)}; the machine has {gib(question.machine.total_memory)}"
            yield Way(f"{gib(needed)} of RAM", brings, lossy)


def _fitting_changes(question: Question) -> Iterator[tuple[dict[str, Any], bool]]:
    config = question.config
    more: dict[str, Any] = {"mem_fraction_static": LARGEST_FRACTION}
    yield more, False
    if (config.chunked_prefill_size or 0) > DEFAULT_PREFILL_TOKENS:
        yield {"chunked_prefill_size": DEFAULT_PREFILL_TOKENS}, False
    if (config.context_length or 0) > SHORT_CONTEXT:
        yield {"context_length": SHORT_CONTEXT}, False
    if question.machine.gpus:
        yield {"kt_gpu_experts_ratio": None, "kt_num_gpu_experts": None}, False
        yield {"device": "cpu"}, False
    for method in _smaller_methods(question):
        yield {"kt_method": method}, True
        yield {"kt_method": method} | more, True


def _smaller_methods(question: Question) -> list[str]:
    """Roundings that were not asked for already."""
    now = EXPERT_FORMATS.get(question.config.kt_method or "")
    return [method for method in roundings(question.stored) if now not in (method.lower(), "int4")]


def _tried(question: Question, changes: dict[str, Any], lossy: bool) -> Way | None:
    try:
        plan = question.plan(**changes)
    except ConfigError:
        return None
    rate = question.predicted(plan).decode[1]
    return Way(_typed(changes), f"fits; {rate.low:.1f} to {rate.high:.1f} tokens/s", lossy)


def _typed(changes: Mapping[str, Any]) -> str:
    """As on a command line."""
    if set(changes) == {"kt_gpu_experts_ratio", "kt_num_gpu_experts"}:
        return "without --kt-num-gpu-experts and --kt-gpu-experts-ratio"
    return " ".join(f"{_SPELLED[name]} {value:g}" if isinstance(value, float) else f"{_SPELLED[name]} {value}"
                    for name, value in changes.items())  # fmt: skip


def _fits(question: Question, changes: Mapping[str, Any]) -> bool:
    try:
        question.plan(**changes)
    except ConfigError:
        return False
    return True


def least_ram(question: Question, changes: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Bytes of RAM, in steps of a GiB, that the plan needs with these changes; 0: memory is not what is missing."""

    def enough(total: int) -> bool:
        machine = question.machine
        used = max(machine.total_memory - machine.available_memory, system_bytes(total))  # `kt plan --ram` agrees
        other = dataclasses.replace(machine, total_memory=total, available_memory=max(0, total - used))
        return _fits(dataclasses.replace(question, machine=other), changes)

    if not enough(LARGEST_RAM):
        return 0
    low, high = 0, LARGEST_RAM // GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle * GIB) else (middle, high)
    return high * GIB


def ways_to_go_faster(question: Question, plan: Plan) -> list[Way]:
    """Beside what the plan does: at least WORTH times as many tokens per second."""
    now, found = question.predicted(plan), list[tuple[float, Way]]()
    for changes, lossy in _faster_changes(question, plan):
        try:
            other = question.predicted(question.plan(**changes))
        except ConfigError:
            continue
        decode, prompt = (
            other.decode[1].middle / now.decode[1].middle,
            other.prompt.middle / now.prompt.middle,
        )
        if max(decode, prompt) >= WORTH:
            found.append((decode, Way(_typed(changes), _brings(decode, prompt), lossy)))
    found.sort(key=lambda way: (way[1].lossy, -way[0]))
    return [way for _, way in found]


def _brings(decode: float, prompt: float) -> str:
    """What stays as fast is not mentioned."""
    changed = {"decoding": decode, "prompts": prompt}
    return ", ".join(f"{what} {times:.2f} times as fast" for what, times in changed.items() if abs(times - 1) > 0.02)


def _faster_changes(question: Question, plan: Plan) -> Iterator[tuple[dict[str, Any], bool]]:
    config = question.config
    if question.machine.gpus:
        if config.kt_gpu_experts_ratio is not None or config.kt_num_gpu_experts is not None:
            yield {"kt_gpu_experts_ratio": None, "kt_num_gpu_experts": None}, False
        if config.device == "cpu":
            yield {"device": "auto"}, False
        if plan.context_length > SHORT_CONTEXT:
            yield {"context_length": SHORT_CONTEXT}, False
    if plan.max_step_tokens <= DEFAULT_PREFILL_TOKENS:
        yield {"chunked_prefill_size": 4 * DEFAULT_PREFILL_TOKENS}, False
    for method in roundings(question.stored):
        if plan.expert_format != method.lower():
            yield {"kt_method": method}, True


def roundings(stored: StoredFormats) -> list[str]:
    """Values of --kt-method that make the experts smaller than they are stored."""
    experts = stored.experts
    return [m for m in ("INT8", "INT4") if FORMAT_BYTES[m.lower()] < 0.95 * experts.bytes_per_weight]
