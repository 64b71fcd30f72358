"""An image in a prompt, with made-up weights of Qwen3-VL-30B: milliseconds of its tower, and what others notice.

    PYTHONPATH=src python benchmarks/image.py --size 1024x1024 --size 1920x1088
    PYTHONPATH=src python benchmarks/image.py --layers 4 --kt-gpu-experts-ratio 0.5
    PYTHONPATH=src python benchmarks/image.py --prefill-reserved-sms 32 --variant between --variant beside:0.9 \
        --variant reserved:0.9
    PYTHONPATH=src python benchmarks/image.py --device cpu --layers 2 --size 1024x1024

`ms`: the median of five passes of the tower alone. `others_p99_ratio`: the 99th percentile of steps in which eight
others decode while an image is read, by that of steps without one. Medians stand beside it, and `image_ms`, from an
image's arrival to its features. A variant is where a GPU computes pieces, with the share of a step that they may take:
`between` decode graphs, as it is served; `beside` them, on the stream of prompts; or there with multiprocessors that
are `reserved` for steps. The last row is GPU memory, as planned and as used. Other flags are those of `kt serve`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.bench.architectures import named_keys
from tandem.bench.gaps.made_up import made_up_parts, write_folder
from tandem.bench.rows import machine_name, progress, stamp, write
from tandem.bench.synthetic import FAR
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.vision.encoder import Encoder
from tandem.engine.vision.pace import pace_of
from tandem.engine.vision.pixels import pixels_of
from tandem.engine.vision.spans import ImageSpan, PixelSource
from tandem.flags.engine_config import EngineConfig
from tandem.machine.gpus import detect_gpus
from tandem.machine.machine import Machine
from tandem.planner.forecast.ledger import VRAM
from tandem.planner.vision_costs import feature_bytes, scratch_bytes
from tandem.server.engine_process import take_cpus

TEXT = "qwen3-30b-a3b"
TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
OTHERS, PASSES, IDLE_STEPS = 8, 5, 400
GPU_IMAGES, CPU_IMAGES = 20, 2  # beside others: enough steps for a percentile, and as many as one waits for
PARTS = "tandem.models.vision.tower", "tandem.kernels.gpu.linear"  # whose objects have a tower's weights
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def write_model(folder: Path, layers: int | None) -> None:
    """A folder as `made_up` takes it."""
    write_folder(folder, TEXT, layers)
    text = named_keys(TEXT, layers) | {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}
    ids = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
    keys = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": TOWER} | ids
    (folder / "config.json").write_text(json.dumps(keys))


def picture(height: int, width: int, seed: int) -> PixelSource:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return PixelSource(height=height, width=width, inline=pixels.numpy().tobytes())


def asking(engine: Engine, source: PixelSource) -> GenerateRequest:
    """A prompt that is an image and a little text."""
    tower = engine.model_config.vision
    assert tower is not None and source.inline is not None
    grid = tower.processor.grid(source.height, source.width)
    rows, key = tower.processor.tokens(grid), hashlib.sha256(source.inline).digest()[:16]
    ids = [tower.start, *[tower.placeholder] * rows, tower.end, *range(1000, 1020)]
    span = ImageSpan(first=1, rows=rows, grid=grid, key=key, pixels=source)
    return GenerateRequest(
        id=key.hex(), prompt_ids=ids, images=(span,), sampling=SamplingSettings(**GREEDY, max_tokens=2)
    )


class Variant(NamedTuple):
    """share: of a decoding step's time, for a slice of an image; 0: the usual one."""

    name: str
    share: float = 0.0

    @classmethod
    def of(cls, text: str) -> Variant:
        name, _, share = text.partition(":")
        if name not in ("between", "beside", "reserved"):
            raise argparse.ArgumentTypeError(f"{name}: between, beside or reserved")
        return cls(name, float(share or 0))

    def use(self, engine: Engine) -> None:
        encoder = encoder_of(engine)
        encoder.pace = pace_of(encoder._tower.device)
        encoder.pace.share = self.share or encoder.pace.share
        encoder.pace._watch.waits &= self.name == "between"
        encoder._place = lambda: self._place(engine)

    def _place(self, engine: Engine) -> AbstractContextManager[None]:
        if self.name == "between":
            return nullcontext()
        return reserved(engine) if self.name == "reserved" else engine.gpu_runner._streams.side_stream()


@contextmanager
def reserved(engine: Engine) -> Iterator[None]:
    streams = engine.gpu_runner._streams
    with streams.side_stream(reserve_sms=True), streams.cut(True):
        yield


def encoder_of(engine: Engine) -> Encoder:
    assert engine._encoder is not None, engine.plan.blind
    return engine._encoder


def tower_ms(engine: Engine, source: PixelSource) -> float:
    times = list[float]()
    for _ in range(PASSES + 1):
        started = perf_counter()
        encode(engine, source)
        times.append(perf_counter() - started)
    return 1e3 * statistics.median(times[1:])  # the first one warms up


def encode(engine: Engine, source: PixelSource) -> None:
    with torch.inference_mode():
        for _ in encoder_of(engine)._tower.encode(pixels_of(source)):
            pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def steps(engine: Engine, most: int) -> Iterator[float]:
    for _ in range(most):
        started = perf_counter()
        engine.step()
        yield perf_counter() - started


def p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def others(engine: Engine, size: tuple[int, int], seeds: Iterator[int], images: int) -> dict[str, Any]:
    """Steps of others while so many images of this size are read. seeds: of images that were never seen."""
    for i in range(OTHERS):
        sampling = SamplingSettings(**GREEDY, max_tokens=4000)
        engine.add(GenerateRequest(id=str(i), prompt_ids=[100 + i] * 40, sampling=sampling))
    list(steps(engine, 40))
    idle, beside = list(steps(engine, IDLE_STEPS)), list[list[float]]()
    for _ in range(images):
        engine.add(asking(engine, picture(*size, next(seeds))))
        times = list(steps(engine, 1))
        while engine._encodes:
            times += steps(engine, 1)
        beside.append(times)
        list(steps(engine, 40))  # its prompt
    engine.abort("")
    list(steps(engine, 1))
    return told(idle, beside)


def told(idle: list[float], beside: list[list[float]]) -> dict[str, Any]:
    """Columns of a row. beside: steps of each image; slowest_step: which of them the longest was."""
    every = [each for times in beside for each in times]
    slowest = max(beside, key=max)
    figures = {
        "idle_ms": statistics.median(idle), "idle_p99_ms": p99(idle), "others_ms": statistics.median(every),
        "others_p99_ms": p99(every), "others_max_ms": max(every), "image_ms": statistics.median(map(sum, beside)),
    }  # fmt: skip
    ratio = {"others_p99_ratio": round(p99(every) / p99(idle), 2), "steps": len(every)}
    return ratio | {name: round(1e3 * each, 2) for name, each in figures.items()} | {
        "slowest_step": slowest.index(max(slowest))
    }  # fmt: skip


def tensor_bytes(thing: Any) -> int:
    """Bytes of the tensors of a tower, or of a part of it."""
    if isinstance(thing, Tensor):
        return thing.nbytes
    if isinstance(thing, list | tuple):
        return sum(map(tensor_bytes, thing))
    return sum(map(tensor_bytes, vars(thing).values())) if type(thing).__module__ in PARTS else 0


def longest_prompt(engine: Engine) -> None:
    """A chunk of as many tokens as a step may have: workspace and scratch are planned for it."""
    tokens = min(engine.plan.max_step_tokens, engine.plan.context_length - 2)
    ids = torch.randint(1000, 100_000, (tokens,)).tolist()
    engine.add(GenerateRequest(id="longest", prompt_ids=ids, sampling=SamplingSettings(**GREEDY, max_tokens=1)))
    while engine.has_work():
        engine.step()


def memory(engine: Engine, free_before: int, seed: int) -> dict[str, Any]:
    """GPU memory as planned and as used: of the tower, of an image's pass, and in all. free_before: bytes, before this
    process had a context."""
    plan, tower = engine.plan, engine.model_config.vision
    assert tower is not None
    longest_prompt(engine)
    (vram,) = (ledger for ledger in plan.ledgers if ledger.place == VRAM)
    tokens, side = plan.image_tokens, tower.processor.side
    down = next(n for n in range(int(tokens**0.5), 0, -1) if tokens % n == 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    encode(engine, picture(down * side, tokens // down * side, seed))
    scratch = torch.cuda.max_memory_allocated() - before - tokens * feature_bytes(tower, plan.dtype)
    planned = {entry.name: entry.nbytes for entry in vram.entries}
    used = free_before - torch.cuda.mem_get_info()[0]
    return {
        "bench": "image_memory", "tokens": tokens, "planned": vram.total_bytes, "used": used,
        "ratio": round(used / vram.total_bytes, 4), "tower_planned": planned["vision tower"],
        "tower_used": tensor_bytes(encoder_of(engine)._tower),
        "scratch_planned": scratch_bytes(tower, tokens, plan.dtype, gpu=True), "scratch_used": scratch,
        "entries": planned,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="HEIGHTxWIDTH, multiples of 32")
    parser.add_argument("--layers", type=int, help="of the text")
    parser.add_argument("--variant", action="append", type=Variant.of, help="NAME or NAME:SHARE; several in turn")
    parser.add_argument("--images", type=int, help="that are read beside others, in each variant")
    parser.add_argument("--out", type=Path, help="a file, or benchmarks/results")
    asked, flags = parser.parse_known_args()
    gpus, _ = detect_gpus()  # before there is a context
    with tempfile.TemporaryDirectory(prefix="tandem-image-") as folder:
        write_model(Path(folder), asked.layers)
        usual = ["--model", folder, "--context-length", "8192", "--max-total-tokens", "65536"]
        config = EngineConfig.from_args([*usual, *flags])
        progress("weights are made")
        parts = made_up_parts(config, embedded=FAR)
        engine = Engine.from_parts(parts)
        take_cpus(parts)
        sizes, variants = asked.size or ["1024x1024", "1088x1920"], asked.variant or [Variant("between")]
        images = asked.images or (CPU_IMAGES if engine.plan.gpu is None else GPU_IMAGES)
        rows = [stamped(engine, row) for row in measured(engine, sizes, variants, images)]
        if engine.plan.gpu is not None:
            rows.append(stamped(engine, memory(engine, gpus[0].free_bytes, 7)))
    if asked.out is not None:
        write(rows, asked.out)


def stamped(engine: Engine, row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed: what was measured before a fault is not lost."""
    row |= {"layers": len(engine.model_config.layers)} | stamp(machine_name(Machine.detect()))
    print(json.dumps(row), flush=True)
    return row


def measured(
    engine: Engine, sizes: list[str], variants: list[Variant], images: int
) -> Iterator[dict[str, Any]]:
    where, seeds = "cpu" if engine.plan.gpu is None else "gpu", count(1000)
    for text in sizes:
        height, _, width = text.partition("x")
        size = int(height), int(width)
        progress(f"an image of {text}")
        ms = tower_ms(engine, picture(*size, 100))
        for variant in variants:
            variant.use(engine)
            shown = {"variant": variant.name, "share": encoder_of(engine).pace.share}
            row = {"bench": "image", "where": where, "pixels": size[0] * size[1], "ms": round(ms, 1)}
            yield row | shown | others(engine, size, seeds, images)


if __name__ == "__main__":
    main()
