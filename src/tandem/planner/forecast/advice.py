"""Changes by which a model fits, is faster, or uses a GPU: found by planning anew. One that loses nothing comes
first, and of that the fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tandem.errors import ConfigError
from tandem.flags.engine_config import FLAGS, EngineConfig
from tandem.machine.gpus import most_equal
from tandem.machine.machine import Machine
from tandem.planner.choices.cached import cached_as
from tandem.planner.expert_format import EXPERT_FORMATS
from tandem.planner.forecast.machine_spec import system_bytes
from tandem.planner.forecast.prediction import CONTEXT, PROMPT, WORTH, Case, Prediction, predict
from tandem.planner.forecast.speeds import GIB, Speeds, of_other_gpu
from tandem.planner.memory import DEFAULT_PREFILL_TOKENS, LARGEST_FRACTION, WANTED_CONTEXT, gib
from tandem.planner.plan import Plan
from tandem.planner.resolve import fits, resolve
from tandem.spec.model_config import FORMAT_BYTES, ModelConfig
from tandem.spec.stored import StoredFormats

SHORT_CONTEXT = 8192
LARGEST_RAM = 16 << 40
MOST_WAYS = 4  # of one kind that are shown
LEAST_KEPT = 0.95  # of a speed that advice about the other may cost
GPU_SIZES = (8, 12, 16, 24, 32, 48, 80, 96, 141)  # GB that are sold
# Flags whose absence may fit or be faster: the planner then chooses by itself.
LEFT_OUT = (
    "tensor_parallel_size", "pipeline_parallel_size", "mem_fraction_static", "max_total_tokens",
    "context_length", "max_running_requests",
    "chunked_prefill_size", "max_prefill_tokens", "kt_gpu_experts_ratio", "kt_num_gpu_experts",
    "kt_gpu_prefill_token_threshold", "kt_method", "kv_cache_dtype", "device", "disable_cuda_graph",
    "cuda_graph_bs", "kernel_tier", "kt_cpuinfer", "enable_deterministic_inference",
)  # fmt: skip
RANKS = 2, 4, 8  # that are advised
SHARES = ("kt_gpu_experts_ratio", "kt_num_gpu_experts")
WISHES = ("max_total_tokens", "context_length", "enable_deterministic_inference", "max_running_requests", "kt_method")
"""Flags of what answers are: to leave them out makes nothing faster that was asked for."""
_SPELLED = {f.name: f.spellings[0] for f in FLAGS}
_DEFAULTS = {f.name: f.default for f in FLAGS}

Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """Input of a plan: a model, the flags, the machine and its speeds."""

    config: EngineConfig
    model: ModelConfig
    machine: Machine
    stored: StoredFormats
    speeds: Speeds

    def plan(self, **changes: Any) -> Plan:
        """With these flags instead. Raises ConfigError."""
        return resolve(self.changed(changes), self.model, self.machine, self.stored)

    def fits(self, **changes: Any) -> bool:
        """Whether there is a plan with these flags instead."""
        try:
            return fits(self.changed(changes), self.model, self.machine, self.stored)
        except ConfigError:
            return False

    def changed(self, changes: Changes) -> EngineConfig:
        """A flag with its default value counts as one that was not given."""
        left_out = {name for name, value in changes.items() if value == _DEFAULTS[name]}
        field_names = (self.config.explicit | set(changes)) - left_out
        return dataclasses.replace(self.config, **changes, explicit=field_names)

    def predicted(
        self, plan: Plan, batches: tuple[int, ...] = (1,), context: int = CONTEXT, prompt: int = PROMPT
    ) -> Prediction:
        model = cached_as(self.config, self.model)
        speeds = self.speeds
        if plan.ranks > 1 and plan.gpu is not None:
            speeds = of_other_gpu(speeds, self.machine.gpus[0].name, plan.gpu.name)
        return predict(Case.of_plan(model, self.stored, plan, speeds), batches, context, prompt)


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change: flags as typed, or another machine; what it brings; whether answers become less exact. changes: the
    same as fields of `EngineConfig`; empty where another machine is meant."""

    change: str
    brings: str
    lossy: bool = False
    changes: Changes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Tried:
    way: PlanChange
    plan: Plan
    predicted: Prediction

    @property
    def speed(self) -> float:
        """Tokens per second, of an answer and of a prompt alike."""
        return both(self.predicted)


def both(predicted: Prediction) -> float:
    """The geometric mean of tokens per second of an answer and of a prompt."""
    return float((predicted.decode[1].middle * predicted.prompt.middle) ** 0.5)


def ways_to_fit(question: PlanQuestion) -> list[PlanChange]:
    """Empty where the model fits as it is. Flags come before memory that has to be bought. No way is slower than to
    leave out what stands in the way."""
    if question.fits():
        return []
    tried = _best(_not_slower(_tried(question, _fitting_changes(question))))
    more = [] if any(not each.way.lossy for each in tried) else [*_more_memory(question, False)]
    more += [] if tried else [*_more_memory(question, True)]
    ways = [dataclasses.replace(each.way, brings=f"fits; {_rate(each.predicted)}") for each in tried]
    return sorted([*ways, *more], key=lambda way: way.lossy)


def _rate(predicted: Prediction) -> str:
    rate = predicted.decode[1]
    return f"{rate.low:.1f} to {rate.high:.1f} tokens/s"


def _not_slower(tried: Iterable[_Tried]) -> list[_Tried]:
    """Without those that are slower than a flag that is merely left out."""
    options = list(tried)
    left = [each.speed for each in options if _leaves_out(each.way.changes)]
    return [each for each in options if _leaves_out(each.way.changes) or each.speed >= max(left, default=0.0)]


def _leaves_out(changes: Changes) -> bool:
    return all(value == _DEFAULTS[name] for name, value in changes.items())


def _best(tried: Iterable[_Tried]) -> list[_Tried]:
    """Lossless ways first, and of those the fastest; no more than MOST_WAYS. One that changes more than another is
    there only if it is WORTH times as fast."""
    best: list[_Tried] = []
    for each in sorted(tried, key=lambda each: (each.way.lossy, len(each.way.changes))):
        less = (other for other in best if other.way.changes.items() <= each.way.changes.items())
        if all(each.speed >= WORTH * other.speed for other in less):
            best.append(each)
    return sorted(best, key=lambda each: (each.way.lossy, -each.speed))[:MOST_WAYS]


def _tried(question: PlanQuestion, options: Iterable[tuple[dict[str, Any], bool]]) -> Iterator[_Tried]:
    """Those that can be planned, each once."""
    attempts: list[Changes] = []
    for changes, lossy in options:
        if changes in attempts:
            continue
        attempts.append(changes)
        try:
            plan = question.plan(**changes)
        except ConfigError:
            continue
        yield _Tried(PlanChange(_typed(changes), "", lossy, changes), plan, question.predicted(plan))


def _more_memory(question: PlanQuestion, lossy: bool) -> Iterator[PlanChange]:
    """How much RAM would do, as the model is stored or with smaller experts."""
    more: dict[str, Any] = {"mem_fraction_static": LARGEST_FRACTION}
    methods = _smaller_methods(question)[-1:] if lossy else [None]
    for method in methods:
        changes = more if method is None else {"kt_method": method} | more
        if needed := least_ram(question, changes):
            brings = f"fits with {_typed(changes)}; the machine has {gib(question.machine.total_memory)}"
            yield PlanChange(f"{gib(needed)} of RAM", brings, lossy)


def _fitting_changes(question: PlanQuestion) -> Iterator[tuple[dict[str, Any], bool]]:
    config, removals = question.config, _flag_removals(question)
    more: dict[str, Any] = {"mem_fraction_static": LARGEST_FRACTION}
    yield from ((changes, False) for changes in removals)
    yield more, False
    yield from ((changes | more, False) for changes in removals if "mem_fraction_static" not in changes)
    if (config.chunked_prefill_size or 0) > DEFAULT_PREFILL_TOKENS:
        yield {"chunked_prefill_size": DEFAULT_PREFILL_TOKENS}, False
    if (config.context_length or 0) > SHORT_CONTEXT:
        yield {"context_length": SHORT_CONTEXT}, False
    if question.machine.gpus:
        yield {"device": "cpu"}, False
    yield from ((changes, False) for changes in _other_ranks(question))
    for method in _smaller_methods(question):
        yield {"kt_method": method}, True
        yield {"kt_method": method} | more, True


def _other_ranks(question: PlanQuestion) -> Iterator[dict[str, Any]]:
    """Among GPUs that are equal. Where not all are equal, or the model cannot be divided among all of
    them, layers over all."""
    gpus, now = question.machine.gpus, question.config.tensor_parallel_size
    if question.config.pipeline_parallel_size > 1 or question.config.device == "cpu":
        return
    equal = len(most_equal(gpus))
    ranks = [{"tensor_parallel_size": count} for count in RANKS if now != count <= equal]
    ranks = [changes for changes in ranks if question.fits(**changes)]
    if now == 1 < len(gpus) and {"tensor_parallel_size": len(gpus)} not in ranks:
        yield {"pipeline_parallel_size": len(gpus)}
    yield from ranks


def _flag_removals(question: PlanQuestion) -> list[dict[str, Any]]:
    """Each flag that was given left out, and those that share experts out together."""
    config = question.config
    names = [name for name in LEFT_OUT if getattr(config, name) != _DEFAULTS[name]]
    removals: list[dict[str, Any]] = [{name: _DEFAULTS[name]} for name in names if name not in SHARES]
    shares = [name for name in SHARES if name in names]
    return [*removals, dict.fromkeys(shares)] if shares else removals


def _smaller_methods(question: PlanQuestion) -> list[str]:
    """Roundings that were not asked for already."""
    now = EXPERT_FORMATS.get(question.config.kt_method or "")
    return [method for method in roundings(question.stored) if now not in (method.lower(), "int4")]


def _typed(changes: Changes) -> str:
    """As on a command line."""
    left = [_SPELLED[name] for name, value in changes.items() if value == _DEFAULTS[name]]
    words = [f"{_SPELLED[name]} {value:g}" if isinstance(value, float) else f"{_SPELLED[name]} {value}"
             for name, value in changes.items() if value != _DEFAULTS[name]]  # fmt: skip
    return " ".join([*words, *([f"without {' and '.join(sorted(left))}"] if left else [])])


def least_ram(question: PlanQuestion, changes: Changes = MappingProxyType({})) -> int:
    """Bytes of RAM, in steps of a GiB, that the plan needs with these changes; 0: memory is not what is missing."""

    def enough(total: int) -> bool:
        machine = question.machine
        used = max(machine.total_memory - machine.available_memory, system_bytes(total))  # `kt plan --ram` agrees
        other = dataclasses.replace(machine, total_memory=total, available_memory=max(0, total - used))
        return dataclasses.replace(question, machine=other).fits(**changes)

    if not enough(LARGEST_RAM):
        return 0
    low, high = 0, LARGEST_RAM // GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle * GIB) else (middle, high)
    return high * GIB


def ways_to_go_faster(question: PlanQuestion, plan: Plan) -> list[PlanChange]:
    """Beside what the plan does: at least WORTH times as many tokens per second, of answers or of prompts, and not
    clearly fewer of the other."""
    now, faster = question.predicted(plan), list[_Tried]()
    for each in _tried(question, _faster_changes(question, plan)):
        decode, prompt = _gains(each.predicted, now)
        if max(decode, prompt) >= WORTH and min(decode, prompt) >= LEAST_KEPT:
            faster.append(dataclasses.replace(each, way=dataclasses.replace(each.way, brings=_brings(decode, prompt))))
    return [each.way for each in _best(faster)]


def _gains(new: Prediction, now: Prediction) -> tuple[float, float]:
    return new.decode[1].middle / now.decode[1].middle, new.prompt.middle / now.prompt.middle


def _brings(decode: float, prompt: float) -> str:
    """Gains of a change as text; a speed that stays within 2 % is not mentioned. decode, prompt: ratios of speed."""
    changed = {"decoding": decode, "prompts": prompt}
    return ", ".join(f"{what} {times:.2f} times as fast" for what, times in changed.items() if abs(times - 1) > 0.02)


def _faster_changes(question: PlanQuestion, plan: Plan) -> Iterator[tuple[dict[str, Any], bool]]:
    yield from ((changes, False) for changes in _flag_removals(question) if not set(changes) & set(WISHES))
    yield from ((changes, False) for changes in _other_ranks(question))
    if question.machine.gpus and plan.context_length > SHORT_CONTEXT:
        yield {"context_length": SHORT_CONTEXT}, False
    if plan.max_step_tokens <= DEFAULT_PREFILL_TOKENS:
        yield {"chunked_prefill_size": 4 * DEFAULT_PREFILL_TOKENS}, False
    for method in roundings(question.stored):
        if plan.expert_format != method.lower():
            yield {"kt_method": method}, True


def ways_to_use_gpu(question: PlanQuestion, plan: Plan) -> list[PlanChange]:
    """Ways to use a GPU that this plan leaves idle, none of them slower. Those that cost context come last,
    and say so."""
    if plan.gpu is not None or not question.machine.gpus:
        return []
    now, options = question.predicted(plan), list[_Tried]()
    for each in _tried(question, _gpu_changes(question)):
        gains = _gains(each.predicted, now)
        if each.plan.gpu is not None and gains[0] * gains[1] >= 1.0:
            brings = ", ".join(filter(None, [_brings(*gains), _shorter(each.plan, plan)]))
            options.append(dataclasses.replace(each, way=dataclasses.replace(each.way, brings=brings)))
    short = [each for each in options if _shorter(each.plan, plan)]
    ways = [each.way for each in _best(each for each in options if each not in short)]
    larger = [] if any(not way.lossy for way in ways) else [*_larger_gpu(question)]
    return [*ways, *larger, *(each.way for each in _best(short))]


def _gpu_changes(question: PlanQuestion) -> Iterator[tuple[dict[str, Any], bool]]:
    yield from _fitting_changes(question)
    if question.config.device == "auto":  # where the planner gave it up for the context or for speed
        yield {"device": "cuda"}, False


def _shorter(plan: Plan, now: Plan) -> str:
    """The cost in context, below what most wish for; "": none."""
    length = plan.context_length
    return f"a context of {length} tokens" if length < min(now.context_length, WANTED_CONTEXT) else ""


def _larger_gpu(question: PlanQuestion) -> Iterator[PlanChange]:
    """The smallest that would be used, of sizes that are sold."""
    gpu = question.machine.gpus[0]
    for size in GPU_SIZES:
        nbytes = size * GIB
        if nbytes <= gpu.memory_bytes:
            continue
        free = nbytes - (gpu.memory_bytes - gpu.free_bytes)
        larger = dataclasses.replace(gpu, memory_bytes=nbytes, free_bytes=free)
        machine = dataclasses.replace(question.machine, gpus=(larger,))
        try:
            plan = resolve(question.config, question.model, machine, question.stored)
        except ConfigError:
            continue
        if plan.gpu is not None:
            yield PlanChange(f"a GPU with {size} GB", f"is used; this one has {gib(gpu.memory_bytes)}")
            return


def roundings(stored: StoredFormats) -> list[str]:
    """Values of --kt-method that make the experts smaller than they are stored."""
    experts = stored.experts
    return [m for m in ("INT8", "INT4") if FORMAT_BYTES[m.lower()] < 0.95 * experts.bytes_per_weight]
