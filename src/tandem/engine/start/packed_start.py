"""`PackedStart`: `--packed-cache` while an engine starts: which file it is, and that its bytes are verified meanwhile.

Verifying takes as long as reading the file; everything else that a start does from it (headers of the checkpoint, plan,
tokenizer, layers) is Python's work on one thread. So both go on at the same time, and the model counts only when its
bytes are right.
"""

from __future__ import annotations

import glob
import hashlib
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tandem._core import LAYOUT_VERSION, WorkerPool
from tandem.checkpoint import Checkpoint
from tandem.errors import CacheDamaged, CheckpointError
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.packed.cache import PackedCache
from tandem.kernels.packed.file import PackedFile
from tandem.kernels.packed.verification import Verification
from tandem.machine.gpus import may_have_gpus
from tandem.models import Progress
from tandem.planner.plan import Plan
from tandem.spec.model_config import ModelConfig
from tandem.spec.shard import ALONE, RankShard

Made = TypeVar("Made")


class PackedStart:
    """Entered before GPUs are looked for and the checkpoint's headers are read. Once left, nothing new is begun."""

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        pool: WorkerPool,
        progress: Progress | None,
        shard: RankShard = ALONE,
    ) -> None:
        self._config, self._progress = config, progress
        self._early = early_verification(config, directory, pool, shard)
        self.cache: PackedCache | None = None

    def __enter__(self) -> PackedStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._early is not None:
            self._early.stop()
        if self.cache is not None:
            self.cache.stop()

    def open(self, plan: Plan, model: ModelConfig, checkpoint: Checkpoint, ops: CpuOps) -> None:
        """From now on weights may be taken from the cache."""
        self.cache = packed_cache(self._config, plan, model, checkpoint, ops)
        if self.cache is not None:
            self.cache.begin(self._early)

    def built(self, make: Callable[[], Made]) -> Made:
        """Calls `make`; again, without the file, if its bytes turn out to be wrong."""
        with suppress(CacheDamaged):  # which the cache has said; it has nothing any more
            return self._confirmed(make())
        return make()

    def confirm(self) -> None:
        """Waits until the file is verified: for those who copy out of it."""
        with suppress(CacheDamaged):
            self._confirmed(None)

    def _confirmed(self, model: Made) -> Made:
        if self.cache is not None:
            self.cache.confirm(self._report)
        return model

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress("verifying packed cache", done, total)


def early_verification(
    config: EngineConfig, directory: Path, pool: WorkerPool, shard: RankShard
) -> Verification | None:
    """Verification of the only file that this rank has of this checkpoint in the cache; whether it is the right one,
    its key will say. None: there is none, or several, or it cannot be opened, which is said when it is asked for."""
    if config.packed_cache is None:
        return None
    names = f"{glob.escape(_beginning(config, directory.resolve(), shard))}*.packed"
    paths = list(_cache_directory(config.packed_cache).glob(names))
    if len(paths) != 1:
        return None
    surely_cpu = config.device == "cpu" or not may_have_gpus()
    try:
        return Verification(PackedFile(paths[0]), pool, in_place=surely_cpu)
    except (CheckpointError, OSError):
        return None


def packed_cache(
    config: EngineConfig, plan: Plan, model: ModelConfig, checkpoint: Checkpoint, ops: CpuOps
) -> PackedCache | None:
    """Cache in --packed-cache of this model as the plan packs it, or of this rank's part; None without the flag.

    Its key has neither the kernel tier nor where experts live. With a GPU it holds experts only.
    """
    if config.packed_cache is None:
        return None
    directory = checkpoint.path.resolve()
    text = replace(model, tower=None, vision=None, blind="")  # a tower's matrices are there or not, and are the same
    made_from = (
        checkpoint.identity(), repr(text), plan.dtype, plan.expert_format, plan.dense_codes,
        plan.fuse_shared_experts, plan.parts, LAYOUT_VERSION,
    )  # fmt: skip
    key = hashlib.sha256(repr(made_from).encode()).hexdigest()
    fused = (
        "-fused" if plan.fuse_shared_experts else ""
    )  # with a GPU they may not be: else starts would take turns
    name = f"{_beginning(config, directory, model.shard)}{plan.expert_format}-{plan.dtype}{fused}.packed"
    description = f"{directory} ({plan.expert_format} experts, files as of {key[:8]})"
    path = _cache_directory(config.packed_cache) / name
    return PackedCache(path, key, description, ops.workspace, ops.pool, _say, dense=plan.gpu is None)


def _beginning(config: EngineConfig, directory: Path, shard: RankShard) -> str:
    """Beginning of the names of a checkpoint's files in the cache, or of a rank's. No other rank's begins so."""
    rank = "" if shard == ALONE else f"rank{shard.rank}of{shard.ranks}-"
    place = hashlib.sha256(f"{directory}{config.kt_weight_path or ''}{rank}".encode()).hexdigest()[:8]
    return f"{directory.name}-{place}-{rank}"


def _cache_directory(path: str) -> Path:
    return Path(path).expanduser()


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
