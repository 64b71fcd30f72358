"""A chat's next turn on a long prefix, beside a fresh prompt as long as what is new: seconds to the first token.

    python benchmarks/random_model.py qwen3-next-80b-fp8 /tmp/next --layers 12 --experts 64
    PYTHONPATH=src python benchmarks/second_turn.py /tmp/next --prefix 30000 --new 200

Prints one row of JSON. `rows`: tokens that the turn computed, the most of all rounds; `ratio`: the median turn by the
median fresh prompt. A fresh prompt shares no token with any other. Ends with status 1 where a turn computed as
many as `--new` and two pages, or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem import LLM
from tandem.bench.rows import machine_name, stamp, write
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.machine.machine import Machine
from tandem.spec.state import page_tokens

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Chat:
    """Sends prompts to one engine, and times them."""

    def __init__(self, llm: LLM, answer: int) -> None:
        self._engine, self._answer, self._sent = llm.engine, answer, 0

    def send(self, prompt: Sequence[int]) -> tuple[float, int, list[int]]:
        """(seconds to the first token, tokens of the prompt that were computed, the answer)."""
        self._sent += 1
        sampling = SamplingSettings(**GREEDY, max_tokens=self._answer)
        self._engine.add(GenerateRequest(id=str(self._sent), prompt_ids=list(prompt), sampling=sampling))
        started, first, cached, answer = perf_counter(), 0.0, 0, list[int]()
        while self._engine.has_work():
            for output in self._engine.step():
                if output.error:
                    raise SystemExit(output.error)
                first = first or perf_counter() - started
                cached = cached or output.cached_tokens
                answer += output.token_ids
        return first, len(prompt) - cached, answer


def tokens(count: int, seed: int, vocab: int) -> list[int]:
    return [(7919 * (seed * 100_003 + i) + 104_729 * seed) % vocab for i in range(count)]


def measure(llm: LLM, prefix: int, new: int, rounds: int, answer: int) -> dict[str, Any]:
    """Turns and fresh prompts take turns, so that both see the same machine."""
    vocab = llm.engine.model_config.vocab - 2
    chat = Chat(llm, answer)
    long, _, said = chat.send(history := tokens(prefix, 1, vocab))
    fresh, turns, rows = [], [], []
    for i in range(rounds + 1):
        alone, computed, _ = chat.send(tokens(new, 100 + i, vocab))
        assert computed == new, "a fresh prompt was known"
        history = [*history, *said, *tokens(new, 1000 + i, vocab)]
        seconds, computed, said = chat.send(history)
        if i:  # the first of both warms up
            fresh.append(alone), turns.append(seconds), rows.append(computed)
    middle = statistics.median(turns), statistics.median(fresh)
    return {
        "prefix": prefix, "new": new, "rounds": rounds, "rows": max(rows), "prefix_s": round(long, 3),
        "turn_ms": round(middle[0] * 1e3, 2), "fresh_ms": round(middle[1] * 1e3, 2),
        "ratio": round(middle[0] / middle[1], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefix", type=int, default=30_000)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu-share", type=float, default=1.0, help="of the experts, where there is a GPU")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="a file, or benchmarks/results")
    asked = parser.parse_args()
    whole = asked.prefix + (asked.rounds + 2) * (asked.new + asked.answer)
    flags: dict[str, Any] = {"context_length": whole, "max_running_requests": 2, "kt_cpuinfer": asked.threads}
    machine = Machine.detect()
    if machine.gpus:
        flags |= {"kt_gpu_experts_ratio": asked.gpu_share}
    llm = LLM(str(asked.model), max_total_tokens=2 * whole, **flags)
    page = page_tokens(llm.engine.model_config.states, llm.engine.plan.page_size)
    model = llm.engine.model_config
    row = {
        "bench": "second_turn", "config": asked.model.name, "layers": len(model.layers),
        "experts": model.moe.experts.count, "gpu_share": asked.gpu_share if machine.gpus else 0.0,
    }  # fmt: skip
    row |= measure(llm, asked.prefix, asked.new, asked.rounds, asked.answer) | {"page": page}
    row |= stamp(machine_name(machine, asked.threads))
    print(json.dumps(row), flush=True)
    if asked.out is not None:
        write([row], asked.out)
    if row["rows"] >= asked.new + 2 * page:
        raise SystemExit(f"a turn computed {row['rows']} rows, not fewer than {asked.new} + 2 x {page}")


if __name__ == "__main__":
    main()
