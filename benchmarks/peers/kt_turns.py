"""Tandem in turns with another engine: `kt_turns.py FILE THREADS [int8]`; lines as `llama_turns.cc` reads and answers
them. int8: activations of experts are rounded, which is lossy."""

from __future__ import annotations

import itertools
import random
import sys
from time import perf_counter, process_time

from tandem import LLM, SamplingParams

FIRST_TOKENS = 16


def main() -> None:
    llm = LLM(
        sys.argv[1], kt_cpuinfer=int(sys.argv[2]), device="cpu", disable_radix_cache=True, max_total_tokens=8192,
        kt_int8_activations="int8" in sys.argv[3:],
    )  # fmt: skip
    dice, seeds = random.Random(0), itertools.count()

    def times(prompt_tokens: int, tokens: int) -> list[tuple[float, float]]:
        """Clocks at the beginning and at each token, and the process's CPU time. Tokens are random, as the peer's."""
        prompt = [dice.randrange(256) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=tokens, temperature=50.0, seed=next(seeds), ignore_eos=True)
        found = [(perf_counter(), process_time())]
        for _ in llm.generate([prompt], sampling, progress=False, stream=True):
            found.append((perf_counter(), process_time()))
        return found

    for line in sys.stdin:
        what, tokens = line.split()[0], int(line.split()[1])
        found = times(tokens, 1) if what == "prompt" else times(FIRST_TOKENS, 1 + tokens)
        (began, used), (ended, used_then) = (found[0], found[1]) if what == "prompt" else (found[1], found[-1])
        print(f"{ended - began:.6f} {used_then - used:.6f}", flush=True)


if __name__ == "__main__":
    main()
