"""`load_parts`: from what the user asked for to the parts of an engine."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tandem import models
from tandem._core import LAYOUT_VERSION
from tandem.checkpoint import (
    Checkpoint,
    demo_dir,
    load_model_config,
    open_checkpoint,
    resolve_model,
    with_experts,
)
from tandem.checkpoint.demo import build_demo
from tandem.config import EngineConfig, ModelConfig, Plan, resolve
from tandem.engine.expert_statistics import expert_recorder, expert_usage
from tandem.engine.parts import EngineParts
from tandem.engine.tokenizer import Tokenizer
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.packed_cache import PackedCache
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import planned_pool

TURN_SECONDS = 5e-4


@contextmanager
def for_loading() -> Iterator[None]:
    """How Python runs meanwhile.

    A checkpoint's headers are hundreds of thousands of objects, all of which stay: looking for garbage among them, as
    Python does when many are made, took as long as making them. The threads that look up tensors take short turns: all
    workers stand still while the main thread, which gives them the next tensors, waits for the interpreter.
    """
    enabled, turn = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(turn)
        if enabled:
            gc.enable()


@for_loading()
def load_parts(
    config: EngineConfig,
    progress: models.Progress | None = None,
    planned: Callable[[Plan], None] | None = None,
) -> EngineParts:
    """Reads and packs the model. `planned` is called before the first weight is read, `progress(what, bytes done, bytes
    in all)` after every layer.

    Raises ConfigError when a wish cannot be met, CheckpointError when a file is missing or broken.
    """
    use_one_torch_thread()
    directory = model_directory(config.model)
    model_config = load_model_config(directory)
    checkpoint = with_experts(open_checkpoint(directory), config.kt_weight_path, model_config)
    plan = resolve(config, model_config, this_machine(), checkpoint.formats())
    if planned is not None:
        planned(plan)
    tokenizer = Tokenizer.load(directory)
    workers = planned_pool(plan)
    ops = CpuOps(workers, plan.tier, plan.int8_activations)
    kept = packed_cache(config, plan, model_config, checkpoint, ops)
    if kept is not None:
        kept.open(_verifying(progress))
    if plan.gpu is None:
        usage = expert_usage(config, plan, model_config)
        model = models.build(model_config, plan, checkpoint, ops, progress, kept=kept, usage=usage)
        recorder = expert_recorder(config, model_config, usage)
        return EngineParts(plan, model_config, model, tokenizer, workers, usage, recorder)
    from tandem.engine.gpu_side import gpu_side, live_experts  # Triton is there only where a GPU is

    gpu = gpu_side(plan, model_config, ops)
    usage = expert_usage(config, plan, model_config, gpu.ops.device, gpu.placement.on_gpu)
    model = models.build(model_config, plan, checkpoint, gpu.ops, progress, gpu.store, kept, usage)
    recorder = expert_recorder(config, model_config, usage)
    live = live_experts(plan, gpu, usage, progress)
    return EngineParts(
        plan, model_config, model, tokenizer, workers, usage, recorder, live, gpu.handoff, gpu.ops.begin_step
    )


def packed_cache(
    config: EngineConfig, plan: Plan, model: ModelConfig, checkpoint: Checkpoint, ops: CpuOps
) -> PackedCache | None:
    """Where --packed-cache keeps this model, as this plan packs it. Neither the kernel tier is part of that nor where
    experts live; with a GPU it is experts only."""
    if config.packed_cache is None:
        return None
    directory = checkpoint.path.resolve()
    made_from = (
        checkpoint.identity(), repr(model), plan.dtype, plan.expert_format, plan.dense_codes,
        plan.fuse_shared_experts, plan.parts, LAYOUT_VERSION,
    )  # fmt: skip
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    place = hashlib.sha256(f"{directory}{config.kt_weight_path or ''}".encode()).hexdigest()[:8]
    fused = (
        "-fused" if plan.fuse_shared_experts else ""
    )  # with a GPU they may not be: else starts would take turns
    name = f"{directory.name}-{place}-{plan.expert_format}-{plan.dtype}{fused}.packed"
    about = f"{directory} ({plan.expert_format} experts, files as of {key[:8]})"
    return PackedCache(
        Path(config.packed_cache).expanduser() / name, key, about, ops.workspace, ops.pool, _say,
        dense=plan.gpu is None,
    )  # fmt: skip


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _verifying(progress: models.Progress | None) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("verifying packed cache", done, total)

    return report


def use_one_torch_thread() -> None:
    """The parallelism of a step is our worker pool's, whose worker 0 is the calling thread. Torch's own pool would spin
    on the same cores between its operations and make both slower."""
    torch.set_num_threads(1)


def model_directory(name_or_path: str) -> Path:
    """The model's directory or GGUF file; the demo model is built if it is not there yet."""
    directory = resolve_model(name_or_path)
    if directory == demo_dir() and not (directory / "config.json").is_file():
        build_demo(directory)
    return directory
