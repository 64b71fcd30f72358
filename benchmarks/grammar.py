"""Cost of a grammar in a decode step: the demo model's steps with and without, in turn, another schema in each row.

    python benchmarks/grammar.py [--only masks|compiling] [--out benchmarks/results]

A row of the results: `ratio` is the time of a step without grammars over that of one with. Both are medians. The steps
without say the same tokens as those with: which experts a step reads, and so its time, depends on them.

A row of "grammar_compile" says what others notice while grammars are compiled, one after the other: `ratio` is the P99
of their steps' times meanwhile over that of steps without. `refused_s` is how long the worst schema takes to be refused
beside those steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from tandem.bench.rows import Row, keep, machine_name, stamp
from tandem.engine.engine import Engine
from tandem.engine.grammar import sources
from tandem.engine.protocol import GenerateRequest, SamplingSettings, TokenOutput
from tandem.engine.sampling.sampler import Sampled
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine

BATCHES = (1, 16)
STEPS, ROUNDS = 24, 4
GAP_BATCH, GAP_STEPS, GAP_ROUNDS = 4, 200, 4
GAP_SECONDS = 4.0  # of a round at least: a grammar must be refused in it
MOST_GAP_STEPS = 4000
PROMPT = list(range(100, 120))


def schema(number: int) -> dict[str, Any]:
    """Nested, with an enum, a pattern, a list and an object; long enough that no answer ends while it is measured."""
    item = {
        "type": "object",
        "properties": {
            f"name{number}": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
            "kind": {"enum": ["red", "green", "blue", f"kind{number}"]},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "number"}, "note": {"type": "string"}},
                "required": ["x", "y", "note"],
            },
        },
        "required": [f"name{number}", "kind", "tags", "place"],
    }
    return {"type": "array", "items": item, "minItems": 40}


class Replayed:
    """A runner whose rows choose as ever, and then get the tokens that they are given: `tokens[step][row]`."""

    def __init__(self, runner: Any, tokens: list[list[int]]) -> None:
        self._runner, self._tokens = runner, iter(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def start(self, step: Any, *rest: Any) -> Any:
        return self._runner.start(step, *rest).then(self._replaying)

    def _replaying(self, output: Any) -> Any:
        logits = output.logits
        chosen = logits.chosen

        def replayed(*arguments: Any) -> list[Sampled]:
            made = chosen(*arguments)
            return [Sampled(token, None) for token in next(self._tokens)] if made else made

        logits.chosen = replayed
        return output


def steps(engine: Engine, batch: int, constrained: bool) -> tuple[list[float], list[list[int]]]:
    """Seconds of the steps in which all rows decode, and every step's tokens."""
    for number in range(batch):
        grammar = sources.json_schema(schema(number)) if constrained else None
        sampling = SamplingSettings(temperature=0.0, max_tokens=1000, ignore_eos=True, grammar=grammar)
        engine.add(GenerateRequest(id=str(number), prompt_ids=PROMPT, sampling=sampling))
    said: list[list[int]] = []
    seconds: list[float] = []
    while len(seconds) < STEPS:
        began = time.perf_counter()
        outputs = engine.step()
        taken = time.perf_counter() - began
        assert all(each.finish_reason is None for each in outputs), outputs
        if len(outputs) == batch and said:
            seconds.append(taken)
        if outputs:
            said.append([token for each in outputs for token in each.token_ids])
    engine.abort("")
    engine.step()
    return seconds, said


def replayed_steps(engine: Engine, batch: int, said: list[list[int]]) -> list[float]:
    runner = engine._runner
    engine._runner = Replayed(runner, said)  # type: ignore[assignment]
    try:
        return steps(engine, batch, constrained=False)[0]
    finally:
        engine._runner = runner


def measure(engine: Engine, batch: int, machine: str) -> Row:
    free: list[float] = []
    held: list[float] = []
    steps(engine, batch, constrained=True)  # compiles
    for _ in range(ROUNDS):
        seconds, said = steps(engine, batch, constrained=True)
        held += seconds
        free += replayed_steps(engine, batch, said)
    without, with_one = statistics.median(free), statistics.median(held)
    return {
        "bench": "grammar", "batch": batch, "ratio": round(without / with_one, 3),
        "step_ms": round(1e3 * without, 3), "step_ms_with": round(1e3 * with_one, 3), **stamp(machine),
    }  # fmt: skip


def too_large(number: int) -> dict[str, Any]:
    """A schema whose compiling takes all the time that it may have for, and the check before it lets pass."""
    names = {f"k{number}_{i}": {"type": "string", "maxLength": 3000 + i} for i in range(10)}
    return {"type": "object", "properties": names}


class Compiling:
    """Keeps one grammar after another being compiled."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._began, self._numbers = engine, 0.0, itertools.count()
        self.refused_seconds: list[float] = []

    def ask(self) -> None:
        sampling = SamplingSettings(grammar=sources.json_schema(too_large(next(self._numbers))))
        self._engine.add(GenerateRequest(id="compiled", prompt_ids=PROMPT, sampling=sampling))
        self._began = time.perf_counter()

    def see(self, outputs: list[TokenOutput]) -> None:
        if any(each.id == "compiled" for each in outputs):
            self.refused_seconds.append(time.perf_counter() - self._began)
            self.ask()


def gaps(engine: Engine, compiling: Compiling | None) -> list[float]:
    """Seconds from one step of free answers to the next."""
    sampling = SamplingSettings(temperature=0.0, max_tokens=MOST_GAP_STEPS, ignore_eos=True)
    for number in range(GAP_BATCH):
        engine.add(GenerateRequest(id=str(number), prompt_ids=PROMPT, sampling=sampling))
    if compiling is not None:
        compiling.ask()
    found: list[float] = []
    last, began = None, time.perf_counter()
    while len(found) < GAP_STEPS or time.perf_counter() < began + GAP_SECONDS:
        outputs = engine.step()
        now = time.perf_counter()
        if any(each.id != "compiled" for each in outputs):
            found += [] if last is None else [now - last]
            last = now
        if compiling is not None:
            compiling.see(outputs)
    engine.abort("")
    engine.step()
    return found


def measure_compiling(engine: Engine, machine: str) -> Row:
    compiling = Compiling(engine)
    gaps(engine, compiling)  # imports
    compiling.refused_seconds.clear()
    free: list[float] = []
    meanwhile: list[float] = []
    for _ in range(GAP_ROUNDS):  # in turn: what else the machine does then hits both
        free += gaps(engine, None)
        meanwhile += gaps(engine, compiling)
    p99 = [statistics.quantiles(each, n=100)[98] for each in (free, meanwhile)]
    return {
        "bench": "grammar_compile", "batch": GAP_BATCH, "ratio": round(p99[1] / p99[0], 3),
        "p99_ms": round(1e3 * p99[0], 3), "p99_ms_meanwhile": round(1e3 * p99[1], 3),
        "refused_s": round(max(compiling.refused_seconds), 3), **stamp(machine),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the rows here")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", choices=("masks", "compiling"), help="one of the two measurements")
    options = parser.parse_args()
    engine = Engine(EngineConfig(model=options.model, max_running_requests=max(BATCHES)))
    machine = machine_name(Machine.detect(), len(engine.plan.cpus))
    rows: list[Row] = []
    if options.only != "compiling":
        rows += [measure(engine, batch, machine) for batch in BATCHES]
    if options.only != "masks":
        rows.append(measure_compiling(engine, machine))
    engine.close()
    for row in rows:
        print(row)
    if options.out is not None:
        keep(rows, options.out)


if __name__ == "__main__":
    main()
