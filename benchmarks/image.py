"""An image in a prompt, with made-up weights of Qwen3-VL-30B: milliseconds of its tower, and what others notice.

    PYTHONPATH=src python benchmarks/image.py --size 1024x1024 --size 1920x1088
    PYTHONPATH=src python benchmarks/image.py --layers 4 --kt-gpu-experts-ratio 0.5

`ms`: the median of five passes of the tower alone. `others_p99_ratio`: the 99th percentile of steps in which eight
others decode while an image is read, by that of steps without one. Flags that it does not know are those of `kt serve`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tandem.bench.architectures import named_keys
from tandem.bench.gaps.made_up import made_up_parts, write_folder
from tandem.bench.rows import machine_name, progress, stamp, write
from tandem.bench.synthetic import FAR
from tandem.engine.engine import Engine
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.vision.pixels import pixels_of
from tandem.engine.vision.spans import ImageSpan, PixelSource
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine
from tandem.server.engine_process import take_cpus

TEXT = "qwen3-30b-a3b"
TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
OTHERS, PASSES, IDLE_STEPS = 8, 5, 200
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


def tower_ms(engine: Engine, source: PixelSource) -> float:
    encoder, times = engine._encoder, list[float]()
    assert encoder is not None, engine.plan.blind
    for _ in range(PASSES + 1):
        started = perf_counter()
        with torch.inference_mode(), engine._runner.side_stream():
            for _ in encoder._tower.encode(pixels_of(source)):
                pass
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return 1e3 * statistics.median(times[1:])  # the first one warms up


def steps(engine: Engine, most: int) -> Iterator[float]:
    for _ in range(most):
        started = perf_counter()
        engine.step()
        yield perf_counter() - started


def p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def others_ratio(engine: Engine, size: tuple[int, int]) -> float:
    for i in range(OTHERS):
        sampling = SamplingSettings(**GREEDY, max_tokens=4000)
        engine.add(GenerateRequest(id=str(i), prompt_ids=[100 + i] * 40, sampling=sampling))
    list(steps(engine, 40))
    idle, beside = list(steps(engine, IDLE_STEPS)), list[float]()
    for seed in range(PASSES):
        engine.add(asking(engine, picture(*size, seed)))
        beside += steps(engine, 1)
        while engine._encodes:
            beside += steps(engine, 1)
        list(steps(engine, 40))  # its prompt
    engine.abort("")
    list(steps(engine, 1))
    return p99(beside) / p99(idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="HEIGHTxWIDTH, multiples of 32")
    parser.add_argument("--layers", type=int, help="of the text")
    parser.add_argument("--out", type=Path, help="a file, or benchmarks/results")
    asked, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="tandem-image-") as folder:
        write_model(Path(folder), asked.layers)
        usual = ["--model", folder, "--context-length", "8192", "--max-total-tokens", "65536"]
        config = EngineConfig.from_args([*usual, *flags])
        progress("weights are made")
        parts = made_up_parts(config, embedded=FAR)
        engine = Engine.from_parts(parts)
        take_cpus(parts)
        rows = list(measured(engine, asked.size or ["1024x1024", "1088x1920"]))
    for row in rows:
        row |= {"layers": len(engine.model_config.layers)} | stamp(machine_name(Machine.detect()))
        print(json.dumps(row), flush=True)
    if asked.out is not None:
        write(rows, asked.out)


def measured(engine: Engine, sizes: list[str]) -> Iterator[dict[str, Any]]:
    where = "cpu" if engine.plan.gpu is None else "gpu"
    for text in sizes:
        height, _, width = text.partition("x")
        size = int(height), int(width)
        progress(f"an image of {text}")
        ms, ratio = tower_ms(engine, picture(*size, 100)), others_ratio(engine, size)
        yield {
            "bench": "image", "where": where, "pixels": size[0] * size[1], "ms": round(ms, 1),
            "others_p99_ratio": round(ratio, 2),
        }  # fmt: skip


if __name__ == "__main__":
    main()
