"""llama.cpp in turns with another engine, by llama-cpp-python: `llama_cpp_turns.py FILE THREADS`; lines as
`llama_turns.cc` reads and answers them. It runs in the environment that has llama-cpp-python and NumPy alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import llama_cpp
import numpy as np

CONTEXT, FIRST_TOKENS = 1024, 16


class Turns:
    """llama.cpp with one file. Logits of all rows come from a context of their own: they would take time in others."""

    def __init__(self, file: str, threads: int) -> None:
        self._arguments = {"model_path": file, "n_threads": threads, "n_threads_batch": threads}
        self._llama, self._every_row, self._dice = self._context(False), None, random.Random(1)

    def _context(self, logits_all: bool) -> Any:
        return llama_cpp.Llama(**self._arguments, n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=logits_all, verbose=False)

    def seconds(self, steps: Sequence[Sequence[int]], first: Sequence[int] = ()) -> tuple[float, float]:
        """By the clock, and of CPU time."""
        self._llama.reset()
        if first:
            self._llama.eval(first)
        began, used = perf_counter(), process_time()
        for step in steps:
            self._llama.eval(step)
        return perf_counter() - began, process_time() - used

    def logits(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """float32 [len(ids), vocab]."""
        self._every_row = self._every_row or self._context(True)
        self._every_row.reset()
        self._every_row.eval(ids)
        return np.asarray(self._every_row.scores[: len(ids)], np.float32)

    def tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(256) for _ in range(count)]


def main() -> None:
    turns = Turns(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        what, count, *paths = line.split()
        times = 0.0, 0.0
        if what == "logits":
            Path(paths[1]).write_bytes(turns.logits(np.fromfile(paths[0], np.int32).tolist()).tobytes())
        elif what == "prompt":
            times = turns.seconds([turns.tokens(int(count))])
        else:
            times = turns.seconds([[each] for each in turns.tokens(int(count))], turns.tokens(FIRST_TOKENS))
        print(f"{times[0]:.6f} {times[1]:.6f}", flush=True)


if __name__ == "__main__":
    main()
