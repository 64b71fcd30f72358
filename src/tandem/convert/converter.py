"""`convert`: runs a conversion, file by file.

Memory: workers take some rows of a matrix at a time and write what they made of them straight to its place in the
output file. So neither side is ever held: of the source, the mapped pages of a few matrices; per worker, a few rows in
float32. That is far below the bound which is promised, one layer + 1 GB.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.architectures import FAMILIES
from tandem.architectures.names import ExpertNames
from tandem.checkpoint.checkpoint import open_checkpoint
from tandem.convert import record
from tandem.convert.calibration import Calibration, LayerInputs, expert_of, siblings
from tandem.convert.compensate import compensated
from tandem.convert.layout import Layout, OutputShard, OutputTensor, plan_layout
from tandem.convert.methods import Method, integer_parts, method_named
from tandem.convert.output_config import CONFIG, copy_small_files, write_config, write_index
from tandem.convert.shard_file import ShardFile
from tandem.convert.source import Module, SourceWeights
from tandem.errors import CheckpointError, ConfigError
from tandem.formats.codes import Weight
from tandem.quality.text import Windows
from tandem.spec.json_keys import read_json

Progress = Callable[[str, int, int], None]  # what is being done, bytes of the source done, bytes in all

WEIGHTS_AT_A_TIME = (
    1 << 20
)  # per worker, rounded up to BLOCK_ROWS rows; each costs some 30 bytes while it is rounded
BLOCK_ROWS = 128  # rows are cut at multiples of it: fp8 scales belong to blocks of 128
MATRICES_AHEAD = 3
COPIED_AT_A_TIME = 8 << 20
SHARD_BYTES = 4 << 30
VERSION = 1  # of what is written: a conversion does not resume what another version began


@dataclass(frozen=True, slots=True)
class Conversion:
    """The wishes of one `kt convert`."""

    model: Path
    out: Path
    method: str = "INT4"
    group: int = 32
    input_type: str = "auto"
    dense: bool = False
    merge: bool = True
    shard_bytes: int = SHARD_BYTES
    workers: int = 0  # 0: one for each core this process may use
    calibrate: Windows | None = (
        None  # a text: rounding errors are made up for where its tokens would see them
    )


def convert(wish: Conversion, progress: Progress | None = None) -> Layout:
    """Writes `wish.out`, or finishes it when it was interrupted.

    Raises ConfigError when a wish cannot be met, CheckpointError when a file is broken or cannot be written; what is
    finished then stays, and calling again goes on from there.
    """
    if wish.model.is_file():
        raise ConfigError(f"{wish.model} is served as it is; a directory of safetensors can be converted")
    source = SourceWeights(open_checkpoint(wish.model), _expert_names(wish.model))
    method = method_named(wish.method, wish.group)
    if wish.calibrate is not None and method.grid is None:
        raise ConfigError(
            f"--calibrate is for INT4 and INT8: leave it out, or take one of them instead of {method.name}"
        )
    layout = plan_layout(source, method, wish.dense, wish.merge, wish.shard_bytes)
    source.check_input(layout.converted, wish.input_type, method.name)
    with _named_disk_errors(wish.out), record.only_one(wish.out), _one_torch_thread():
        record.begin_or_resume(wish.out, _settings(wish, source))
        record.remove_unfinished(wish.out)
        _ConversionRun(source, method, wish, progress).write(layout)
        copy_small_files(wish.model, wish.out)
        write_index(layout, wish.out)
        write_config(source, method, layout, wish.out)  # last: without config.json a directory is no model
    return layout


def _expert_names(model: Path) -> ExpertNames | None:
    """Expert names of the model's family; None where there is no configuration, or it is no family that is served."""
    file = model / CONFIG
    kind = read_json(file).get("model_type") if file.is_file() else None
    return FAMILIES[kind].names[0].experts if kind in FAMILIES else None


class _ConversionRun:
    """One conversion under way."""

    def __init__(self, source: SourceWeights, method: Method, wish: Conversion, progress: Progress | None) -> None:
        self.source, self.method, self.out = source, method, wish.out
        self.workers = wish.workers or len(os.sched_getaffinity(0))
        self.report = progress or (lambda _what, _done, _total: None)
        self.calibration = Calibration(wish.model, wish.calibrate) if wish.calibrate else None
        self.done = self.total = 0

    def write(self, layout: Layout) -> None:
        """The files that are not there yet."""
        missing = [s for s in layout.shards if not s.layout.is_written(self.out / s.name)]
        record.need_free_bytes(self.out, sum(shard.layout.file_bytes for shard in missing))
        self.total = sum(self._source_bytes(item) for shard in missing for item in shard.items)
        with ThreadPoolExecutor(self.workers, "convert") as pool:
            for shard in missing:
                self._write_shard(shard, pool)

    def _write_shard(self, shard: OutputShard, pool: ThreadPoolExecutor) -> None:
        ahead: deque[tuple[OutputTensor, list[Future[None]]]] = deque()
        with ShardFile(self.out / shard.name, shard.layout) as file:
            try:
                for item in shard.items:
                    ahead.append((item, self._submit(item, file, pool)))
                    if len(ahead) > MATRICES_AHEAD:
                        self._finish(*ahead.popleft())
                while ahead:
                    self._finish(*ahead.popleft())
            except BaseException:
                _stop([future for _, futures in ahead for future in futures])
                raise

    def _submit(self, item: OutputTensor, file: ShardFile, pool: ThreadPoolExecutor) -> list[Future[None]]:
        if item.module is None:
            return [pool.submit(self._copy, item.copied, file, *item.parts)]
        module = item.module
        weight = self.source.weight(module)
        inputs = self.calibration.inputs(item.layer) if self.calibration and module.routed else None
        if inputs is not None:
            return [pool.submit(self._compensate, module, weight, inputs, file)]
        return [pool.submit(self._round, module, weight, rows, file) for rows in row_ranges(*module.shape)]

    def _finish(self, item: OutputTensor, futures: list[Future[None]]) -> None:
        try:
            for future in futures:
                future.result()
        except BaseException:
            _stop(futures)
            raise
        if item.module is not None:
            self.source.forget(item.module)
        self.done += self._source_bytes(item)
        self.report(f"layer {item.layer}" if item.layer >= 0 else "outer tensors", self.done, self.total)

    def _round(self, module: Module, weight: Weight, rows: slice, file: ShardFile) -> None:
        numbers = self.source.rows(module, weight, rows)
        self._put(module, self.method.rounded(numbers), rows.start, file)

    def _compensate(self, module: Module, weight: Weight, inputs: LayerInputs, file: ShardFile) -> None:
        assert self.method.grid is not None
        names, whole = siblings(module.name), slice(0, None)
        gate_up = None
        if names is not None:
            gate, up = (self.source.modules[name] for name in names)
            gate_up = tuple(self.source.rows(m, self.source.weight(m), whole) for m in (gate, up))
        products = inputs.products(expert_of(module.name), gate_up)
        numbers = self.source.rows(module, weight, whole)
        codes, scales = compensated(numbers, products, self.method.grid, self.method.group)
        self._put(module, integer_parts(codes, scales, self.method.scheme["num_bits"]), 0, file)

    def _put(self, module: Module, parts: dict[str, Tensor], first_row: int, file: ShardFile) -> None:
        for suffix, part in parts.items():
            file.put(f"{module.name}.{suffix}", first_row, part)
        if "weight_shape" in self.method.parts(*module.shape):
            file.put(f"{module.name}.weight_shape", 0, torch.tensor(module.shape))

    def _copy(self, name: str, file: ShardFile, output_name: str) -> None:
        begin, end = self.source.checkpoint.byte_range(name)
        with self.source.checkpoint.part(name).file.open("rb") as stream:
            stream.seek(begin)
            for offset in range(begin, end, COPIED_AT_A_TIME):
                data = stream.read(min(COPIED_AT_A_TIME, end - offset))
                file.put_bytes(output_name, offset - begin, memoryview(data))

    def _source_bytes(self, item: OutputTensor) -> int:
        return self.source.stored_bytes(item.module or item.copied)


def row_ranges(rows: int, columns: int) -> Iterator[slice]:
    """Rows that are rounded together."""
    step = BLOCK_ROWS * max(1, WEIGHTS_AT_A_TIME // (BLOCK_ROWS * columns))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _settings(wish: Conversion, source: SourceWeights) -> dict[str, Any]:
    """Everything that decides a byte of the output."""
    return {
        "version": VERSION,
        "source": source.checkpoint.identity(),
        "method": wish.method,
        "group": wish.group,
        "dense": wish.dense,
        "merge": wish.merge,
        "shard_bytes": wish.shard_bytes,
        "calibrate": wish.calibrate.digest if wish.calibrate else None,
    }


def _stop(futures: list[Future[None]]) -> None:
    """Nobody writes to a file that is being closed: what has not begun never does, the rest is waited for."""
    for future in futures:
        future.cancel()
    for future in futures:
        if not future.cancelled():
            future.exception()


@contextmanager
def _named_disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{out}: {error.strerror or error}; what is finished stays, and the same command goes on from there"
        ) from error


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The workers are the parallelism."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
