"""How fast experts are used in a checkpoint's own pages, beside packed ones: `--map-experts`.

    PYTHONPATH=src python benchmarks/in_place.py /dev/shm/in_place.bin --tokens 1 --tokens 16

Writes bf16 experts of Qwen3-30B-A3B's shape, as checkpoints have them, into the file, maps it, makes one layer that
uses them there and one that packs them (`--layers` of each: from DRAM), and runs both in turn with the same random
routing. Prints medians in ms, their ratio, and whether results have the same bits; then removes the file.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from pathlib import Path

import torch

from tandem import _core
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import planned_pool
from tandem.planner.choices.threads import plan_threads

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def write(path: Path, layers: int) -> None:
    noise = (torch.randn(1 << 20) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    nbytes = layers * EXPERTS * 3 * HIDDEN * WIDTH * 2 + 8
    with path.open("wb", buffering=0) as out:
        while nbytes:
            nbytes -= out.write(noise[: min(nbytes, len(noise))])


def mapped(path: Path, layers: int) -> list[list[Matrices]]:
    """Matrices that begin 8 bytes off a cache line, as a header may have it."""
    with path.open("rb") as file:
        whole = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    size, numbers = HIDDEN * WIDTH, whole[8:].view(torch.bfloat16)

    def matrix(index: int, *shape: int) -> torch.Tensor:
        return numbers[index * size : (index + 1) * size].view(shape)

    def expert(first: int) -> Matrices:
        return (
            matrix(first, WIDTH, HIDDEN),
            matrix(first + 1, WIDTH, HIDDEN),
            matrix(first + 2, HIDDEN, WIDTH),
        )

    return [[expert(3 * (layer * EXPERTS + e)) for e in range(EXPERTS)] for layer in range(layers)]


def milliseconds(layers: list[PackedExperts], calls: list[tuple[torch.Tensor, ...]]) -> float:
    start = time.perf_counter()
    for i, (x, ids, weights, out) in enumerate(calls):
        layers[i % len(layers)].forward(x, ids, weights, out)
    return (time.perf_counter() - start) * 1e3 / len(calls)


def calls_of(tokens: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    made = []
    for _ in range(count):
        ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP_K].int().contiguous()
        x = torch.randn(tokens, HIDDEN).bfloat16()
        made.append((x, ids, torch.rand(tokens, TOP_K), torch.empty(tokens, HIDDEN)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = this_machine()
    pool = planned_pool(plan_threads(EngineConfig(model="none"), machine))
    tier = machine.tiers[-1] if options.tier == "auto" else options.tier
    workspace = _core.Workspace(pool, tier)
    write(options.file, options.layers)
    rows = []
    try:
        both: dict[str, list[PackedExperts]] = {"packed": [], "in place": []}
        seconds = dict.fromkeys(both, 0.0)
        for experts in mapped(options.file, options.layers):
            for name, made in both.items():
                layer = PackedExperts(workspace, EXPERTS, HIDDEN, WIDTH, in_place=name == "in place")
                start = time.perf_counter()
                layer.load_all(0, experts)
                seconds[name] += time.perf_counter() - start
                made.append(layer)
        print(
            f"{tier}, {len(pool)} workers; load: " + ", ".join(f"{k} {v:.2f} s" for k, v in seconds.items())
        )
        for tokens in options.tokens or [1, 4, 16, 64, 256, 1024, 4096]:
            times: dict[str, list[float]] = {name: [] for name in both}
            count = max(4, min(64, 512 // tokens))
            calls = calls_of(tokens, count)
            outs = [both[name][0].forward(*calls[0][:3]) for name in both]
            for _ in range(options.turns):
                for name, layers in both.items():
                    times[name].append(milliseconds(layers, calls))
            ms = {name: statistics.median(each) for name, each in times.items()}
            ratio = statistics.median(b / a for a, b in zip(times["packed"], times["in place"], strict=True))
            rows.append({"bench": "in_place", "shape": "q3", "tier": tier, "tokens": tokens, "packed_ms": ms["packed"],
                         "in_place_ms": ms["in place"], "ratio": ratio, "same_bits": torch.equal(*outs)})  # fmt: skip
            print(f"{tokens:5} tokens  packed {ms['packed']:8.3f}  in place {ms['in place']:8.3f}  x {ratio:.3f}  "
                  f"same bits: {rows[-1]['same_bits']}", flush=True)  # fmt: skip
    finally:
        options.file.unlink()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
