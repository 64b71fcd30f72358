"""`Tight`: what a plan gives up for room in a memory, and which of the tighter plans is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.prediction import WIDTH, Case, predict
from tandem.planner.gpu_plan import GPU_FRACTION
from tandem.planner.memory import WANTED_CONTEXT, prefill_tokens
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats

T = TypeVar("T")

# Of free GPU memory. What was measured took 0.97 to 1.02 times as much as planned (benchmarks/results, memory.json).
TIGHT_FRACTION = 0.97
FEWER = (16, 4, 1)  # sequences together
SHORTER = (1024, 512, 256)  # tokens of a chunk
AS_LONG = 0.98  # times the longest context: for less of a difference nothing more is given up
# Tokens of a context. One that is shorter than wanted, and than others have, is taken if it has so many and no longer
# one comes within a forecast's WIDTH of its speed. A shorter one is never taken where another has so many. A chat with
# a coding agent begins with thousands of tokens, and a prompt that does not fit is refused.
USABLE_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Tight:
    """Things that a plan gives up. gpu_fraction: of free GPU memory; 0.0, None and False: nothing is."""

    embedding_in_ram: bool = False
    gpu_fraction: float = 0.0
    running: int | None = None  # sequences together
    chunk: int | None = None  # tokens of a step

    def flags(self, config: EngineConfig) -> EngineConfig:
        """As if the chunk had been asked for, which sizes of scratch and graphs go by."""
        return config if self.chunk is None else replace(config, chunked_prefill_size=self.chunk)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Each measure, and its cost to a user."""
        if self.embedding_in_ram:
            yield (
                "embedding in CPU memory",
                "the GPU reads the embedding's rows there, which takes CPU memory",
            )
        if self.gpu_fraction:
            yield f"{self.gpu_fraction:.0%} of GPU memory", "less GPU memory is left to other programs"
        if self.running is not None:
            yield f"{self.running} at a time", "more requests wait"
        if self.chunk is not None:
            yield f"chunks of {self.chunk} tokens", "long prompts are slower"


USUAL = Tight()


@dataclass(frozen=True, slots=True)
class Concessions:
    """Things that may be given up: whatever a flag names stays as it is."""

    embedding: tuple[bool, ...]
    fractions: tuple[float, ...]
    running: tuple[int | None, ...]
    chunks: tuple[int | None, ...]

    def easy(self) -> list[Tight]:
        """Measures that cost neither answers at once nor speed, the least first."""
        return [Tight(e, f) for f in self.fractions for e in self.embedding]

    def steps(self) -> list[Tight]:
        """Sequences and chunks, the least first, with all that `easy` gives up."""
        most = Tight(self.embedding[-1], self.fractions[-1])
        return [replace(most, running=r, chunk=c) for r in self.running for c in self.chunks]

    def tightest(self) -> list[Tight]:
        """Where nothing of these fits, nothing does: with the embedding on the GPU CPU memory has more room."""
        last = self.steps()[-1]
        return list(dict.fromkeys(replace(last, embedding_in_ram=e) for e in reversed(self.embedding)))

    def all(self) -> Iterator[Tight]:
        for step in self.steps():
            yield from (replace(each, running=step.running, chunk=step.chunk) for each in self.easy())


def room_of(config: EngineConfig, model: ModelConfig, running: int, gpu: bool) -> Concessions:
    """running: sequences together where nothing is given up."""
    usual = prefill_tokens(gpu)
    fewer = tuple(each for each in FEWER if each < running) if config.max_running_requests is None else ()
    fixed = config.chunked_prefill_size is not None or config.enable_deterministic_inference
    shorter = () if fixed else tuple(each for each in SHORTER if each < usual)
    embedding = (False, True) if gpu and model.foreign is None else (False,)
    tight = gpu and config.mem_fraction_static is None and TIGHT_FRACTION > GPU_FRACTION
    return Concessions(embedding, (0.0, TIGHT_FRACTION) if tight else (0.0,), (None, *fewer), (None, *shorter))


def wanted_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of context for which something is given up."""
    context = config.context_length or min(WANTED_CONTEXT, config.max_total_tokens or WANTED_CONTEXT)
    return min(context, model.max_positions)


def token_seconds(plan: Plan, model: ModelConfig, stored: StoredFormats, machine: Machine) -> float:
    """The geometric mean of seconds of a token, of a prompt and of an answer: both count alike. On an idle machine of
    common speeds, since a start knows no others."""
    speeds = wished_speeds(MachineWish(), machine, None)
    prediction = predict(Case(model, stored, plan, speeds), (1,))
    return float((prediction.prompt.middle * prediction.decode[1].middle) ** -0.5)


Option = tuple[T, int, float]
"""An option, its context in tokens, and `token_seconds`."""


def first_worth(options: Sequence[Option[T]], target_context: int, worth: float) -> T:
    """The first of those with the longest context up to `target_context` that no other is `worth` times as fast as. A
    longer context is not worth more than a forecast's width, where the shorter one is usable (USABLE_CONTEXT)."""
    usable = [each for each in options if each[1] >= min(target_context, USABLE_CONTEXT)] or options
    quick = _within(usable, WIDTH)
    longest = max(min(context, target_context) for _, context, _ in quick)
    return _within([each for each in quick if each[1] >= AS_LONG * longest], worth)[0][0]


def _within(options: Sequence[Option[T]], times: float) -> Sequence[Option[T]]:
    fastest = min(seconds for _, _, seconds in options)
    return [each for each in options if each[2] <= times * fastest]
