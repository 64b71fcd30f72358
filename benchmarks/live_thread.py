"""Microseconds that live placement takes of the engine's thread in each step, before and after it; without a GPU.

    PYTHONPATH=src python benchmarks/live_thread.py --routing zipf --cold --out rows.json

A trace is followed as in `benchmarks/placement.py`. Copies copy nothing and arrive at once; the driver's part is not
counted. Pieces between answers are done when no clock runs. --window: microseconds that the GPU computes after the
CPU's last answer. --cold: the caches are emptied before each call, as the experts of a step do.

Columns are medians of some runs, in time of this thread. Of each run's steps the slowest 2 in 100 do not count: others
use the machine.
"""

from __future__ import annotations

import ctypes
import json
import statistics
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem import _core
from tandem.bench.placement.trace_usage import TraceUsage
from tandem.bench.placement.traces import ROUTINGS, TraceShape, generate
from tandem.bench.rows import machine_name, stamp, write
from tandem.experts.live.cost import READS_PER_EXCHANGE
from tandem.experts.live.exchange import LiveExchange, LiveLayer
from tandem.experts.live.live_experts import LiveExperts
from tandem.experts.live.policy import LivePolicy, PolicySettings
from tandem.experts.placement import place
from tandem.experts.residency import Residency
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.kernels.cpu import WorkerPool, Workspace
from tandem.kernels.packed.experts import PackedExperts
from tandem.machine.machine import Machine

TOP_K, WIDTH, HIDDEN = 10, 32, 32
EXPERT_BYTES = 3 * 2048 * 512 * 9 / 16  # qwen3-512e in int4: what the policy weighs


class NoCopies:
    """Copies that are there at once. The functions are some of libc's that answer 0 whatever they are given."""

    def __init__(self) -> None:
        address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        self.functions, self.directions = (address, address), (1, 2)

    def computing(self) -> int:
        return 3

    def hold(self, owner: object, address: int, nbytes: int) -> None: ...

    def device_buffer(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def follow(self) -> None: ...

    def in_order(self, source: int, target: int, nbytes: int) -> None: ...


class Slots:
    def __init__(self, slot_of: Tensor, nbytes: int) -> None:
        self.slot_of, self.slots, self.bytes_per_expert = slot_of.int().clone(), int(slot_of.max()) + 1, nbytes
        self._memory = torch.zeros(self.slots, nbytes, dtype=torch.uint8)

    def address(self, slot: int) -> int:
        return self._memory[slot].data_ptr()


class Tables:
    copied = 1, 2, 3


def layers_of(slots: Tensor) -> list[LiveLayer]:
    workspace, each = Workspace(WorkerPool([-1]), "scalar"), []
    for row in slots:
        there = int((row >= 0).sum())
        cpu = PackedExperts(workspace, len(row), HIDDEN, WIDTH, "bf16", cpu_slots=len(row) - there + 1)
        weights = torch.zeros(WIDTH, HIDDEN), torch.zeros(WIDTH, HIDDEN), torch.zeros(HIDDEN, WIDTH)
        for expert in (row < 0).nonzero().flatten().tolist():
            cpu.load(expert, *weights)
        each.append(LiveLayer(Slots(row, cpu.bytes_per_expert), cpu))
    return each


class Steps:
    """Steps of a trace, and seconds of each call before and after them."""

    def __init__(self, trace: Tensor, experts: int, share: float, window: float, cold: bool) -> None:
        layers = trace.shape[1]
        placement = place("uniform", layers, experts, round(share * layers * experts), None)
        slots = torch.stack([placement.slots(layer) for layer in range(layers)])
        self.settings, self.works = PolicySettings(), list[_core.Meanwhile]()
        policy = LivePolicy(Residency(slots), EXPERT_BYTES, READS_PER_EXCHANGE, self.settings)
        sides = layers_of(slots)
        allowed = self.settings.bytes_per_step * self.settings.interval_steps * sides[0].cpu.bytes_per_expert
        exchange = LiveExchange(
            sides, Tables(), NoCopies(), int(allowed / EXPERT_BYTES), between_answers=self.works.append
        )
        self.usage = TraceUsage(ExpertUsage(layers, experts), trace, placement.gpu_experts)
        self.live = LiveExperts(policy, exchange, self.usage, clock=thread_time)
        self._tokens, self._window = len(trace), window
        self._evicted = np.zeros(48 << 20, np.uint8) if cold else None
        self.seconds: dict[str, list[float]] = {"beside_step": [], "after_step": []}
        self.over: list[float] = []  # seconds of `after_step` beyond the window

    def run(self) -> None:
        for _ in range(self._tokens):
            self.usage.tokens += 1
            self._timed("beside_step", self.live.beside_step)
            for work in self.works:
                while work.next_of_step() or work.next():
                    pass
            self.works.clear()
            self._evict()
            self._end = thread_time() + self._window
            self._timed("after_step", lambda: self.live.after_step(self._is_over))
            self.over.append(max(0.0, thread_time() - self._end))

    def _is_over(self) -> bool:
        return thread_time() >= self._end

    def _timed(self, name: str, call: Any) -> None:
        if name == "beside_step":
            self._evict()
        started = thread_time()
        call()
        self.seconds[name].append(thread_time() - started)

    def _evict(self) -> None:
        if self._evicted is not None:
            self._evicted += 1


def columns(steps: Steps) -> dict[str, Any]:
    """waited_us: beyond the window; hidden_us: within. Means of steps."""
    before, after = (np.array(steps.seconds[name]) for name in ("beside_step", "after_step"))
    over = np.minimum(np.array(steps.over), after)
    quiet = before + after <= np.percentile(before + after, 98)
    means = {"beside_step_us": before, "after_step_us": after, "thread_us": before + after}
    means |= {"waited_us": before + over, "hidden_us": after - over}
    times = steps.live.times()
    return {name: float(values[quiet].mean()) * 1e6 for name, values in means.items()} | {
        "put_off": getattr(times, "put_off", 0) / times.steps, "exchanges": times.exchanges,
    }  # fmt: skip


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--routing", nargs="+", default=["zipf", "mild", "steady", "adversarial", "uniform"])
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--window", type=float, default=100.0, help="microseconds")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for routing in asked.routing:
        trace = generate(TraceShape(asked.tokens, asked.layers, asked.experts, TOP_K), ROUTINGS[routing], 11)
        runs = [measured(asked, trace) for _ in range(asked.repeats)]
        medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
        named = {name: getattr(asked, name) for name in ("layers", "experts", "share", "tokens", "window", "cold")}
        rows.append({"bench": "live_thread", "routing": routing} | named | medians)
        print(json.dumps(rows[-1]), flush=True)
    if asked.out is not None:
        write([row | stamp(machine_name(Machine.detect(), 1)) for row in rows], asked.out)


def measured(asked: Namespace, trace: Tensor) -> dict[str, Any]:
    steps = Steps(trace, asked.experts, asked.share, asked.window * 1e-6, asked.cold)
    with torch.inference_mode():
        steps.run()
    return columns(steps)


if __name__ == "__main__":
    main()
