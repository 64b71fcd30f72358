"""The first prompts after a start, one by one: how long each takes, and how much of the experts is streamed.

    PYTHONPATH=src python benchmarks/first_prompts.py --layers 24 --gpu-share 0.5 --tokens 512
    PYTHONPATH=src python benchmarks/first_prompts.py --layers 24 --tokens 512 --busy-start 16
    PYTHONPATH=src:tests/support/fakes python benchmarks/first_prompts.py --made-up

A start measures bus and CPU; prompts correct that (`StreamRates`). `--busy-start N`: so many processes keep the CPU and
its memory busy until the model is there. `--tokens` again: prompts of each size in turn. Other builds are measured with
their own `src` in PYTHONPATH. Rows: {"bench": "first_prompts", "tokens": …, "ms": […], "streamed": […]}.

`--made-up` needs no GPU. It prints a table: prompts of a made-up machine (`tests/support/fakes/made_up_bus.py`) until
three in a row take a tenth more than the best at most, by how wrong the start was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

WRONG = 0.3, 0.5, 1.0, 2.0, 3.0
SIZES = (256,), (512,), (1024,), (2048,), (256, 512, 1024, 2048)
SKEWS, SEEDS, MOST = (0.0, 0.7), 10, 40


def keep_busy(nbytes: int = 64 << 20) -> None:
    """Reads and writes memory until the process is ended."""
    memory = np.zeros(nbytes // 8)
    while True:
        memory += 1.0


@contextmanager
def busy_cpus(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=keep_busy, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


class FirstPrompts:
    """A model of made-up weights, whose prompts choose all experts."""

    def __init__(self, flags: argparse.Namespace) -> None:
        from tandem.bench import hybrid, prefill

        request = prefill.PrefillFlags(
            flags.config, (flags.format,), (flags.gpu_share,), tuple(flags.tokens), flags.layers, threads=flags.threads
        )
        with busy_cpus(flags.busy_start):
            self.built = hybrid.build(
                request.model(), flags.format, flags.gpu_share, chunked_prefill_size=request.chunk,
                kt_gpu_prefill_token_threshold=None,
            )  # fmt: skip
        if self.built.stream is None:
            raise SystemExit("nothing is streamed here: the start found the CPU faster, or all experts are on the GPU")
        self._stream, layers = self.built.stream, [each.cpu for each in self.built.side.hybrids]
        self._cpu_bytes = sum(each.loaded * each.bytes_per_expert for each in layers if each is not None)

    @property
    def rates(self) -> str:
        """As measured at the start, and as they are corrected now."""
        return str(self._stream.rates)

    def prompt(self, tokens: int, seed: int) -> tuple[float, float]:
        """Milliseconds, and the share of the experts in CPU memory that went over the bus."""
        import torch

        from tandem.bench import prefill

        before, most, started = self._stream.deliveries.bytes, self.built.plan.max_step_tokens, perf_counter()
        with torch.inference_mode():
            for first in range(0, tokens, most):
                self.built.runner.logits(prefill.chunk_of(self.built, first, min(first + most, tokens), seed))
        seconds, chunks = perf_counter() - started, -(-tokens // most)
        return seconds * 1e3, (self._stream.deliveries.bytes - before) / self._cpu_bytes / chunks


def measured(flags: argparse.Namespace) -> list[dict[str, Any]]:
    from tandem.engine.start.loader import use_one_torch_thread

    use_one_torch_thread()
    prompts = FirstPrompts(flags)
    print("at the start:", prompts.rates, flush=True)
    found: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in flags.tokens}
    for number in range(flags.prompts):
        for tokens, each in found.items():
            each.append(prompts.prompt(tokens, number))
            print(f"{tokens} tokens, prompt {number + 1}: {each[-1][0]:.1f} ms, {each[-1][1]:.2f} streamed", flush=True)
    print("corrected:", prompts.rates)
    about = {"bench": "first_prompts", "config": flags.config, "layers": flags.layers, "format": flags.format}
    about |= {"gpu_share": flags.gpu_share, "busy_start": flags.busy_start}
    return [
        about | {
            "tokens": tokens, "ms": [round(ms, 1) for ms, _ in each], "streamed": [round(s, 3) for _, s in each],
        }
        for tokens, each in found.items()
    ]  # fmt: skip


def made_up() -> None:
    """The table of a simulation."""
    from made_up_bus import MadeUpMachine, found_after

    print("| tokens, routers | " + " | ".join(f"{wrong:g}" for wrong in WRONG) + " |")
    print("| --- |" + " --- |" * len(WRONG))
    for skew in SKEWS:
        for sizes in SIZES:
            cells = []
            for wrong in WRONG:
                each = [found_after(MadeUpMachine(wrong, seed, skew), sizes, MOST) for seed in range(SEEDS)]
                medians = [statistics.median(found[rows] for found in each) for rows in sizes]
                cells.append(", ".join("never" if found >= MOST else f"{found:g}" for found in medians))
            print(f"| {', '.join(map(str, sizes))}, {'skewed' if skew else 'flat'} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="INT4")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpu-share", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, action="append", help="of a prompt; default: 512")
    parser.add_argument("--prompts", type=int, default=16, help="of each size")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--busy-start", type=int, default=0, metavar="N", help="processes beside the start")
    parser.add_argument("--made-up", action="store_true", help="a simulation; no GPU")
    parser.add_argument("--json", help="where the rows are written")
    flags = parser.parse_args()
    flags.tokens = flags.tokens or [512]
    if flags.made_up:
        return made_up()
    rows = measured(flags)
    for row in rows:
        print(json.dumps(row))
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump(rows, file, indent=1)
    return None


if __name__ == "__main__":
    main()
