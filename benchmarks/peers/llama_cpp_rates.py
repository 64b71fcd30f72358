"""Rates of llama.cpp inside this process, as JSON: `llama_cpp_rates.py FILE PROMPT_TOKENS NEW_TOKENS THREADS`.

It runs in the environment that has llama-cpp-python, and imports nothing else.
"""

from __future__ import annotations

import json
import random
import sys
from time import perf_counter

import llama_cpp


def main() -> None:
    model, prompt_tokens, new_tokens, threads = sys.argv[1], *map(int, sys.argv[2:5])
    llama = llama_cpp.Llama(
        model, n_ctx=2 * (prompt_tokens + new_tokens), n_batch=512, n_threads=threads, n_threads_batch=threads,
        flash_attn=True, verbose=False,
    )  # fmt: skip
    dice = random.Random(0)

    def prefill() -> float:
        llama.reset()
        ids = [dice.randint(200, 10_000) for _ in range(prompt_tokens)]
        began = perf_counter()
        llama.eval(ids)
        llama.sample(temp=0.0)
        return perf_counter() - began

    prefill()
    first = prefill()
    began = perf_counter()
    for _ in range(new_tokens):
        llama.eval([int(llama.sample(temp=0.0))])
    rates = {"prompt": prompt_tokens / first, "answer": new_tokens / (perf_counter() - began)}
    print(json.dumps({"version": llama_cpp.__version__, **rates}))


if __name__ == "__main__":
    main()
