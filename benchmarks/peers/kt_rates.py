"""Rates of Tandem inside this process, as JSON: `kt_rates.py FILE PROMPT_TOKENS NEW_TOKENS THREADS`."""

from __future__ import annotations

import json
import random
import sys
from time import perf_counter

import tandem
from tandem import LLM, SamplingParams


def main() -> None:
    model, prompt_tokens, new_tokens, threads = sys.argv[1], *map(int, sys.argv[2:5])
    llm = LLM(model, kt_cpuinfer=threads, disable_radix_cache=True)
    dice = random.Random(0)

    def seconds(tokens: int) -> tuple[float, float]:
        """To the first piece, and from it to the last."""
        prompt = [dice.randint(200, 10_000) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        times = [perf_counter()]
        for _ in llm.generate([prompt], sampling, progress=False, stream=True):
            times.append(perf_counter())
        return times[1] - times[0], times[-1] - times[1]

    seconds(2)
    first, others = seconds(1 + new_tokens)
    rates = {"prompt": prompt_tokens / first, "answer": new_tokens / others}
    print(json.dumps({"version": tandem.__version__, **rates}))


if __name__ == "__main__":
    main()
