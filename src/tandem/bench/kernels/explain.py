"""`kt bench kernels --explain`: which kernel multiplies how many rows, as the engine chooses. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich import box
from rich.table import Table

from tandem import _core
from tandem.bench.formats import empty_layer
from tandem.bench.kernels.experts import ExpertShape
from tandem.formats.gpu_reading import PACKED_KINDS, is_plain_steps, refusal, takes_tensor_cores
from tandem.kernels.packed.experts import PackedExperts
from tandem.kernels.which import Kernel, Reads, cpu_kernel, gpu_kernel

GPU = "GPU"
COLUMNS = "format", "where", "tokens", "rows of an expert", "kernel", "because"
NUMBERS = "tokens", "rows of an expert"


class ChosenKernel(NamedTuple):
    """tokens: of a step; rows: of an expert, where all are used alike."""

    fmt: str
    place: str
    tokens: int
    rows: int
    kernel: Kernel


def chosen(shape: ExpertShape, fmt: str, tiers: Iterable[str], tokens: Iterable[int]) -> Iterator[ChosenKernel]:
    """On CPU tiers, and on an NVIDIA GPU of compute capability 8.0 or more. Raises ConfigError for sizes that the
    format does not have."""
    layer = empty_layer(shape.hidden, shape.width, fmt)
    code = PACKED_KINDS[fmt][0] if fmt in PACKED_KINDS else layer.layout()[0][0]
    counts = [(count, max(1, round(count * shape.top_k / shape.experts))) for count in tokens]
    for tier in tiers:
        workspace = _core.Workspace(_core.WorkerPool([-1]), tier)
        for count, rows in counts:
            yield ChosenKernel(fmt, tier, count, rows, cpu_kernel(workspace, code, rows))
    for count, rows in counts:
        yield ChosenKernel(fmt, GPU, count, rows, _gpu_kernel(shape, layer, count))


def _gpu_kernel(shape: ExpertShape, layer: PackedExperts, tokens: int) -> Kernel:
    mma, plain = [], []
    for codes, _, depth, padded, _, _, scales, scale, group, _ in layer.layout():
        if why := refusal(codes, scale, depth):
            return Kernel("none", why)
        mma.append(scales > 0 and takes_tensor_cores(codes, scale, group, depth, padded))
        plain.append(is_plain_steps(codes, depth, padded))
    aligned = shape.hidden % 8 == shape.width % 8 == 0
    reads = Reads(all(mma), aligned, codes=aligned and (all(mma) or all(plain)), plain=any(plain))
    return gpu_kernel(tokens, shape.top_k, shape.experts, reads)


def table(shape: ExpertShape, rows: Iterable[ChosenKernel]) -> Table:
    title = f"{shape.name}: {shape.experts} experts, {shape.top_k} of them for each token"
    kernels = Table(box=box.SIMPLE_HEAD, title=title)
    for name in COLUMNS:
        kernels.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in rows:
        kernels.add_row(row.fmt, row.place, str(row.tokens), str(row.rows), *row.kernel)
    return kernels
