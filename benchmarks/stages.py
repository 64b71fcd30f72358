"""Layers in stages beside one stage, in turns: decode steps of a named architecture with made-up weights.

    python benchmarks/stages.py --config qwen3-30b-a3b --share 1 --share 0.5 --batch 1 --batch 8
    python benchmarks/stages.py --devices 0,1 --layers 24

Both stages are on the same GPU unless --devices says otherwise; both models are there at once. Rows: {"bench":
"stages", "tok_s": …, "tok_s_one": …, "ratio": …}, medians; `spread`: the least and the largest ratio of a turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.bench import hybrid
from tandem.bench.rows import keep, machine_name, stamp
from tandem.bench.stored import experts_of
from tandem.bench.synthetic import SyntheticCheckpoint, SyntheticStore
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
from tandem.models.staged import StagedBuilder, StagedModel
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    flags, rows = arguments().parse_args(), list[dict[str, Any]]()
    use_one_torch_thread()
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
    checkpoint: Any = SyntheticCheckpoint(flags.dense, experts_of(flags.format), 1.0)
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


def row_of(
    flags: argparse.Namespace, share: float, batch: int, turns: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """turns: seconds of a step, in stages and in one."""
    ratios, devices = sorted(one / staged for staged, one in turns), flags.devices.split(",")
    staged, single = (statistics.median(each) for each in zip(*turns, strict=True))
    return {
        "bench": "stages", "stages": len(devices), "gpus": len(set(devices)), "config": flags.config,
        "layers": flags.layers, "format": flags.format, "dense": flags.dense, "gpu_share": share, "batch": batch,
        "tok_s": round(batch / staged, 1), "tok_s_one": round(batch / single, 1),
        "ratio": round(statistics.median(ratios), 3), "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
    }  # fmt: skip


if __name__ == "__main__":
    main()
