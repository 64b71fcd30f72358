"""Layers in stages beside one stage, in turns: decode steps, or prompts, of a named architecture with made-up weights.

    python benchmarks/stages.py --config qwen3-30b-a3b --share 1 --share 0.5 --batch 1 --batch 8
    python benchmarks/stages.py --devices 0,1 --layers 24
    python benchmarks/stages.py --devices 0,1 --chunk 4096 --chunks 1 --chunks 2 --chunks 4 --chunks 8

Both stages are on the same GPU unless --devices says otherwise; both models are there at once. Rows: {"bench":
"stages", "tok_s": …, "tok_s_one": …, "ratio": …}, medians; `spread`: the least and the largest ratio of a turn. With
--chunks, prompts of so many chunks of --chunk tokens, all experts on the GPUs: `equal` says whether the last row's
logits have the bits of one GPU's; `gpu_gb`: what the model in stages takes of each GPU, by tensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tandem.bench import hybrid
from tandem.bench.prefill import chunk_of
from tandem.bench.rows import keep, machine_name, stamp
from tandem.bench.stored import experts_of
from tandem.bench.synthetic import FAR, SyntheticCheckpoint, SyntheticStore
from tandem.engine.graphs.inputs import GraphPlan
from tandem.engine.stages.hooks import StagedStart
from tandem.engine.stages.runner import StagedRunner
from tandem.engine.stages.sides import end_posts, staged_sides, staged_usage
from tandem.engine.stages.states import allocate_stages
from tandem.engine.start.loader import use_one_torch_thread
from tandem.engine.step.batch import StepShape
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.machine.machine import Machine
from tandem.models.batch import ForwardBatch
from tandem.models.staged import StagedBuilder, StagedModel
from tandem.planner.cuda_graphs import PROMPT_SIZES
from tandem.planner.gpu_plan import StagePlan

CONTEXT, STEPS = 1024, 20


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", default="0,0", help="GPU of each stage")
    parser.add_argument("--config", default="qwen3-30b-a3b")
    parser.add_argument("--format", default="INT4", help="of experts, as --kt-method")
    parser.add_argument("--dense", default="bf16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--share", type=float, action="append", default=[], help="of experts on the GPUs")
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--chunks", type=int, action="append", default=[], help="of a prompt")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    flags, rows = arguments().parse_args(), list[dict[str, Any]]()
    use_one_torch_thread()
    if flags.chunks:
        rows += list(prompts(flags, 1.0))
    else:
        for share in flags.share or [1.0]:
            rows += measured(flags, share, flags.batch or [1])
    if flags.out:
        keep([row | stamp(machine_name(Machine.detect())) for row in rows], flags.out)


def measured(flags: argparse.Namespace, share: float, batches: Sequence[int]) -> list[dict[str, Any]]:
    request = hybrid.HybridFlags(
        flags.config, (flags.format,), (share,), tuple(batches), flags.layers, CONTEXT, STEPS, flags.repeats, None,
        "auto", flags.dense,
    )  # fmt: skip
    one = hybrid.build(request, flags.format, share)
    staged = in_stages(one, flags)
    rows = []
    for batch in batches:
        each = [times_on(built, batch, request) for built in (staged, one)]
        row = row_of(flags, share, batch, list(zip(*each, strict=True)))
        row |= {name: round(row[name], 1) for name in ("tok_s", "tok_s_one")}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def times_on(built: hybrid.Built, batch: int, request: hybrid.HybridFlags) -> Iterator[float]:
    """Seconds of a step, turn after turn. An engine has a process of its own, whose current GPU is its runner's."""
    times, device = hybrid.step_times(built, batch, request), built.runner.device
    while True:
        torch.cuda.set_device(device)
        try:
            yield next(times)
        except StopIteration:
            return


def in_stages(one: hybrid.Built, flags: argparse.Namespace) -> hybrid.Built:
    """The same model once more, in stages."""
    devices, layers = [int(each) for each in flags.devices.split(",")], len(one.config.layers)
    ends = [layers * number // len(devices) for number in range(len(devices) + 1)]
    stages = tuple(
        StagePlan("GPU", f"GPU-{torch.cuda.get_device_properties(device).uuid}", first, end)
        for device, first, end in zip(devices, ends, ends[1:], strict=False)
    )
    assert one.plan.gpu is not None
    plan = dataclasses.replace(one.plan, gpu=dataclasses.replace(one.plan.gpu, stages=stages))
    sides = staged_sides(plan, one.config, CpuOps(one.workers, plan.tier))
    usage = staged_usage(EngineConfig(model="demo"), plan, one.config, sides)
    store: Any = SyntheticStore(sides.store, sides.handoffs)  # type: ignore[arg-type]
    checkpoint: Any = SyntheticCheckpoint(flags.dense, experts_of(flags.format), FAR if flags.chunks else 1.0)
    first = sides.stages[0].ops
    model = StagedModel(StagedBuilder(sides.stages, one.config, plan, checkpoint, first, None, store, usage=usage))
    end_posts(sides)
    states = allocate_stages(plan, one.config, sides.stages).arrays
    for array in (array for arrays in states for array in arrays):
        array.normal_()
    graphs = GraphPlan(plan.gpu.graph_sizes, -(-plan.context_length // plan.page_size), one_stream=True)
    runner = StagedRunner(
        model, states, sides.handoffs, graphs, StepShape(plan.page_size, plan.max_step_tokens), usage=usage,
        begin_step=StagedStart(sides.stages),
    )  # fmt: skip
    return dataclasses.replace(one, plan=plan, runner=runner)


def prompts(flags: argparse.Namespace, share: float) -> Iterator[dict[str, Any]]:
    """Rows of prompts of each length: one GPU computes chunk after chunk, stages compute them one behind the other."""
    started, tokens = perf_counter(), flags.chunk * max(flags.chunks)
    request = hybrid.HybridFlags(
        flags.config, (flags.format,), (share,), (1,), flags.layers, tokens, STEPS, flags.repeats, None, "auto",
        flags.dense, prompts=(few := flags.chunk <= max(PROMPT_SIZES)), eager_prompts=not few,
    )  # fmt: skip
    one = hybrid.build(request, flags.format, share, chunked_prefill_size=flags.chunk)
    assert one.plan.max_step_tokens == flags.chunk, one.plan.max_step_tokens
    before = allocated(flags)
    staged = in_stages(one, flags)
    print(f"built in {perf_counter() - started:.0f} s", flush=True)
    for count in flags.chunks:
        turns, equal = zip(*timed(one, staged, flags, count), strict=True)
        row = row_of(flags, share, 1, turns[1:])  # the first turn warms up
        tok_s = {name: round(row[name] * flags.chunk * count, 1) for name in ("tok_s", "tok_s_one")}
        gpu_gb = [round((now - then) / 1e9, 2) for now, then in zip(allocated(flags), before, strict=True)]
        of_prompt = {"prompt": flags.chunk * count, "chunks": count, "equal": all(equal), "gpu_gb": gpu_gb}
        print(json.dumps(row := row | tok_s | of_prompt), flush=True)
        yield row


def timed(
    one: hybrid.Built, staged: hybrid.Built, flags: argparse.Namespace, count: int
) -> Iterator[tuple[tuple[float, float], bool]]:
    """Seconds of a prompt in stages and on one GPU, turn after turn, and whether both have the same logits."""
    for turn in range(flags.repeats + 1):
        firsts = range(0, flags.chunk * count, flags.chunk)
        chunks = [chunk_of(one, first, first + flags.chunk, turn, pinned=True) for first in firsts]
        (many, many_logits), (single, logits) = (prompt_on(built, chunks) for built in (staged, one))
        yield (many, single), torch.equal(many_logits, logits)


def prompt_on(built: hybrid.Built, chunks: Sequence[ForwardBatch]) -> tuple[float, torch.Tensor]:
    """Seconds of a prompt, and the logits of its last row."""
    runner: Any = built.runner
    torch.cuda.set_device(runner.device)
    started = perf_counter()
    with torch.inference_mode():
        if isinstance(runner, StagedRunner):
            result = runner.prompt_logits(chunks)
        else:
            result = [runner.logits(each) for each in chunks][-1]
    return perf_counter() - started, result.logits[-1].cpu()


def allocated(flags: argparse.Namespace) -> list[int]:
    """Bytes of tensors on each of the GPUs."""
    return [torch.cuda.memory_allocated(int(device)) for device in sorted(set(flags.devices.split(",")))]


def row_of(
    flags: argparse.Namespace, share: float, batch: int, turns: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """turns: seconds of a step, in stages and in one."""
    ratios, devices = sorted(one / staged for staged, one in turns), flags.devices.split(",")
    staged, single = (statistics.median(each) for each in zip(*turns, strict=True))
    return {
        "bench": "stages", "stages": len(devices), "gpus": len(set(devices)), "config": flags.config,
        "layers": flags.layers, "format": flags.format, "dense": flags.dense, "gpu_share": share, "batch": batch,
        "tok_s": batch / staged, "tok_s_one": batch / single,
        "ratio": round(statistics.median(ratios), 3), "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
    }  # fmt: skip


if __name__ == "__main__":
    main()
