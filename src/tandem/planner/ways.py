"""`choose_way`: over how many GPUs a model goes where no flag says so: one, ranks (`--tp`), or stages (`--pp`).

Another way than one GPU is taken if the forecast says that it is clearly better, and it refuses nothing of what one GPU
would do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from tandem.errors import ConfigError, DoesNotFit
from tandem.flags.engine_config import EngineConfig
from tandem.flags.ways import way_is_open
from tandem.machine.gpus import Gpu, is_free, is_new_enough, most_equal
from tandem.machine.machine import Machine
from tandem.planner.choices.cached import cached_as
from tandem.planner.choices.decision import Decision
from tandem.planner.forecast.advice import LEAST_KEPT, RANKS, PlanQuestion, both
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.prediction import SUMS, WIDTH, WORTH, Case, Prediction, Range, predict
from tandem.planner.forecast.speeds import ASSUMED
from tandem.planner.forecast.sums import gpu_lane
from tandem.planner.notices import HOW_FAST
from tandem.planner.plan import Plan
from tandem.planner.ranks.ranked import gpu_of_rank
from tandem.planner.resolve import resolve
from tandem.planner.stages.pool import gpus_of_stages
from tandem.planner.tight import AS_LONG, wanted_tokens
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats

# How many times as fast as one GPU a way decodes at least, if it is taken. Where one GPU has all experts, the others
# would wait for little, so the forecast's ranges must not overlap. Nothing becomes slower than LEAST_KEPT.
LEAST_GAIN, LEAST_GAIN_WHOLE = WORTH, WIDTH
# GB/s of RAM, few channels and many. A start measures nothing, so a way has to be better with both; and with sums that
# take twice as long, where their time was not measured.
RAM_GBPS = 60.0, 400.0
BATCHES = 1, 8
# Flags that ranks or stages refuse, or some of them: what they cost is said.
REFUSED_FLAGS = (
    "speculative_algorithm", "kt_enable_dynamic_expert_update", "kt_max_deferred_experts_per_token",
    "kt_expert_placement_strategy", "init_expert_location", "enable_deterministic_inference", "prefill_reserved_sms",
    "attention_backend", "packed_cache", "map_experts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """One of ranks and stages is 1."""

    ranks: int = 1
    stages: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks * self.stages

    @property
    def flag(self) -> str:
        """As typed."""
        return f"--tp {self.ranks}" if self.stages == 1 else f"--pp {self.stages}"

    def config(self, config: EngineConfig) -> EngineConfig:
        return replace(config, tensor_parallel_size=self.ranks, pipeline_parallel_size=self.stages)

    def used(self, machine: Machine) -> list[Gpu]:
        """The GPUs that ranks or stages are on, of more than one."""
        if self.ranks == 1:
            return list(gpus_of_stages(self.config(EngineConfig(model="")), machine))
        return [gpu for rank in range(self.ranks) for gpu in gpu_of_rank(machine, rank, self.ranks)]


def way_of(config: EngineConfig) -> Way:
    return Way(config.tensor_parallel_size, config.pipeline_parallel_size)


ONE_GPU = Way()
ONE_GPU_TEXT = "one GPU"


@dataclass(frozen=True, slots=True)
class WayChoice:
    """config: with the way that was chosen, or as it was. decision: what the plan says first; None: flags decided.
    notices: ways that flags stand against."""

    config: EngineConfig
    decision: Decision | None = None
    notices: tuple[str, ...] = ()

    def told(self, plan: Plan) -> Plan:
        """The plan, which begins with the choice."""
        if self.decision is None:
            return plan
        weighed = self.decision.value == ONE_GPU_TEXT  # so nothing is advised that it spoke against
        notices = (each for each in plan.notices if not (weighed and each.endswith(HOW_FAST)))
        return replace(plan, decisions=(self.decision, *plan.decisions), notices=(*self.notices, *notices))


@dataclass(frozen=True, slots=True)
class Gains:
    """How many times as fast as one GPU, with the RAM that gains least. score: of answers and prompts alike."""

    decode: float
    batch: float
    prompt: float
    score: float

    def text(self) -> str:
        return f"decoding {self.decode:.2f} times as fast as with one GPU, prompts {self.prompt:.2f} times"


@dataclass(frozen=True, slots=True)
class WayPlan:
    """A way, its plan, and a forecast for each of RAM_GBPS."""

    way: Way
    plan: Plan
    forecasts: tuple[Prediction, ...]

    @property
    def score(self) -> float:
        """Tokens per second, of answers and prompts alike, with the slower RAM."""
        return both(self.forecasts[0])

    def gains(self, one: WayPlan) -> Gains:
        pairs = list(zip(self.forecasts, one.forecasts, strict=True))
        batch = max(set(self.forecasts[0].decode) & set(one.forecasts[0].decode))
        return Gains(
            min(own.decode[1].middle / other.decode[1].middle for own, other in pairs),
            min(own.decode[batch].middle / other.decode[batch].middle for own, other in pairs),
            min(own.prompt.middle / other.prompt.middle for own, other in pairs),
            min(both(own) / both(other) for own, other in pairs),
        )


@dataclass(frozen=True, slots=True)
class WayQuestion:
    """Input of a choice."""

    config: EngineConfig
    model: ModelConfig
    machine: Machine
    stored: StoredFormats

    def planned(self, way: Way) -> WayPlan:
        """Raises ConfigError."""
        config = way.config(self.config)
        plan = resolve(config, self.model, self.machine, self.stored)
        machine = self.machine if way.gpus == 1 else replace(self.machine, gpus=tuple(way.used(self.machine)))
        model, speeds = cached_as(config, self.model), wished_speeds(MachineWish(), machine, None)
        each = (speeds.having(ASSUMED, dram_gbps=gbps) for gbps in RAM_GBPS)
        forecasts = [predict(Case.of_plan(model, self.stored, plan, speeds), BATCHES) for speeds in each]
        if plan.gpu is not None and way.ranks > 1 and gpu_lane(plan.gpu, way.ranks, speeds.pcie_gbps).estimated:
            forecasts = list(map(_doubted, forecasts))
        return WayPlan(way, plan, tuple(forecasts))

    def ways(self, failed: Collection[str] = ()) -> Iterator[WayPlan]:
        """That can be planned on GPUs which nobody else uses, the fewest GPUs first. failed: flags of those that did
        not start."""
        for way in possible_ways(self.machine):
            if way.flag in failed or not all(map(is_free, way.used(self.machine))):
                continue
            try:
                planned = self.planned(way)
            except ConfigError:
                continue
            if planned.plan.gpu is not None:
                yield planned

    def is_better(self, planned: WayPlan, one: WayPlan) -> bool:
        """Clearly, and it does all that one GPU does."""
        gains, enough = planned.gains(one), LEAST_GAIN_WHOLE if _has_all(one.plan, self.model) else LEAST_GAIN
        if min(gains.decode, gains.batch, gains.prompt) < LEAST_KEPT or self._loses(planned.plan, one.plan):
            return False
        return gains.decode >= enough or self.is_longer(planned.plan, one.plan)

    def is_longer(self, plan: Plan, one: Plan) -> bool:
        """True if `one` (one GPU) is short of the wanted context, and `plan` has a longer one."""
        wanted = wanted_tokens(self.config, self.model)
        return min(plan.context_length, wanted) * AS_LONG > min(one.context_length, wanted)

    def _loses(self, plan: Plan, one: Plan) -> bool:
        wanted = min(one.context_length, wanted_tokens(self.config, self.model))
        return plan.context_length < wanted or bool(one.image_tokens and not plan.image_tokens)


def choose_way(
    config: EngineConfig, model: ModelConfig, machine: Machine, stored: StoredFormats, failed: Collection[str] = ()
) -> WayChoice:
    """failed: flags of ways that have been tried, and did not start. The choice changes nothing where a flag says over
    how many GPUs, or there are not two that can be used."""
    if not (way_is_open(config) and several_usable(machine)):
        return WayChoice(config)
    question = WayQuestion(config, model, machine, stored)
    try:
        one = question.planned(ONE_GPU)
    except DoesNotFit:
        return _that_fits(question, failed)
    except ConfigError:  # whoever plans says why
        return WayChoice(config)
    ways = list(question.ways(failed))
    best = _best([each for each in ways if question.is_better(each, one)])
    if best is not None:
        return _taken(question, best, _why_better(question, best, one))
    if not ways and one.plan.gpu is None:
        return WayChoice(config)
    return _one(question, one, ways, failed)


def with_way(question: PlanQuestion, **changes: object) -> tuple[PlanQuestion, WayChoice]:
    """The question with these flags instead, and as many GPUs as a server would take."""
    choice = choose_way(question.changed(changes), question.model, question.machine, question.stored)
    return replace(question, config=choice.config), choice


def _doubted(forecast: Prediction) -> Prediction:
    """If sums of ranks took twice as long."""
    decode = {batch: _with_sums_again(each) for batch, each in forecast.decode.items()}
    return replace(forecast, decode=decode, prompt=_with_sums_again(forecast.prompt))


def _with_sums_again(speed: Range) -> Range:
    total = sum(speed.parts.values())
    share = total / (total + speed.parts.get(SUMS, 0.0))
    return replace(speed, low=share * speed.low, high=share * speed.high)


def several_usable(machine: Machine) -> bool:
    """True if two or more GPUs can compute: new enough, and their Python packages installed."""
    missing = [name for name in machine.gpu_missing if name != "cuda-core"]
    return not missing and len(list(filter(is_new_enough, machine.gpus))) > 1


def possible_ways(machine: Machine) -> Iterator[Way]:
    """Over more than one GPU, the fewest first; whether a model can be divided so is not looked at."""
    gpus = list(filter(is_new_enough, machine.gpus))
    equal = len(most_equal(gpus))
    for count in sorted({*RANKS, len(gpus)}):
        if count in RANKS and count <= equal:
            yield Way(ranks=count)
        if count <= len(gpus):
            yield Way(stages=count)


def _best(ways: list[WayPlan]) -> WayPlan | None:
    """The fastest; more GPUs than another has only if that is WORTH as much."""
    best: WayPlan | None = None
    for each in ways:
        more = best is not None and each.way.gpus > best.way.gpus
        if best is None or each.score >= (WORTH if more else 1.0) * best.score:
            best = each
    return best


def _has_all(plan: Plan, model: ModelConfig) -> bool:
    """Whether all experts are on the GPU."""
    return plan.gpu is not None and plan.gpu.sizes.experts >= model.routed_experts


def _taken(question: WayQuestion, best: WayPlan, why: str) -> WayChoice:
    numbers = ", ".join(str(gpu.number) for gpu in best.way.used(question.machine))
    turns = "; a prompt and running answers take turns" if best.way.stages > 1 else ""
    decision = Decision("parallelism", best.way.flag, f"GPUs {numbers}: {why}{turns}; --tp 1 takes one GPU")
    return WayChoice(best.way.config(question.config), decision)


def _that_fits(question: WayQuestion, failed: Collection[str]) -> WayChoice:
    """Where one GPU and the RAM are too small."""
    best = _best(list(question.ways(failed)))
    if best is None:
        return WayChoice(question.config)
    return _taken(question, best, "with one GPU the model does not fit")


def _why_better(question: WayQuestion, best: WayPlan, one: WayPlan) -> str:
    longer = f"a context of {best.plan.context_length} tokens, with one GPU {one.plan.context_length}"
    gains = f"forecast: {best.gains(one).text()}"
    return f"{longer}; {gains}" if question.is_longer(best.plan, one.plan) else gains


def _one(question: WayQuestion, one: WayPlan, ways: list[WayPlan], failed: Collection[str]) -> WayChoice:
    """One GPU, with what the best other way would gain."""
    least = LEAST_GAIN_WHOLE if _has_all(one.plan, question.model) else LEAST_GAIN
    next_best = max(ways, key=lambda each: each.gains(one).decode, default=None)
    if next_best is None:
        why = "no other way can be planned for this model and these flags"
    else:
        taken = f"it is taken from {least:.2f} times on, if nothing is slower"
        why = f"forecast with {next_best.way.flag}: {next_best.gains(one).text()}; {taken}"
    tried = f"{' and '.join(failed)} did not start; " if failed else ""
    decision = Decision("parallelism", ONE_GPU_TEXT, tried + why)
    return WayChoice(ONE_GPU.config(question.config), decision, tuple(_forgone(question, one, failed)))


def _forgone(question: WayQuestion, one: WayPlan, failed: Collection[str]) -> Iterator[str]:
    """The way that would be taken without flags that it refuses, or without images."""
    left = replace(question.config.without(REFUSED_FLAGS), disable_vision=True)
    free, blind = replace(question, config=left), replace(one, plan=replace(one.plan, image_tokens=0))
    best = _best([each for each in free.ways(failed) if free.is_better(each, blind)])
    if best is not None and (why := _why_refused(question, best.way)):
        yield f"{best.way.flag} is not taken: {why}. Its forecast: {best.gains(one).text()}"


def _why_refused(question: WayQuestion, way: Way) -> str:
    try:
        return question.planned(way).plan.blind
    except ConfigError as error:
        return error.reasons[0]
