"""Experts of every activation against float64: the largest error beside the result's size, on every tier and the GPU.

One row for each kind, tier ("gpu": the kernels of one), format and number of rows; all have biases. Example:

    PYTHONPATH=src python benchmarks/activations.py --out activations.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from torch import Tensor

from tandem import _core
from tandem.bench.rows import Row, machine_name, stamp, write
from tandem.formats.codes import Weight
from tandem.formats.cut import numbers
from tandem.formats.reference import stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertBiases, ExpertMatrices
from tandem.kernels.reference import activated
from tandem.kernels.this_machine import this_machine
from tandem.spec.activation import Activation, ActivationKind

EXPERTS, TOP_K, HIDDEN, HALF = 8, 3, 256, 96  # HALF: rows of gate, and of up
ALPHA, LIMIT = 1.702, 1.0  # a limit that cuts many values
ROWS = {"few": 4, "many": 400}
FORMATS = ("bf16", "mxfp4")


@dataclass(frozen=True)
class Case:
    """Experts, and rows that are routed to them."""

    how: Activation
    matrices: list[tuple[Weight, Weight, Weight]]
    biases: ExpertBiases
    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def width(self) -> int:
        return HALF if self.how.gated else 2 * HALF

    def exact(self) -> Tensor:
        """float64 [rows, hidden]; the weights are those that the format holds."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for e, matrices in enumerate(self.matrices):
            token, slot = torch.where(self.ids == e)
            gate, up, down = (numbers(m).double() for m in matrices)
            biases = [each[e].double() for each in self.biases]
            x = self.x[token].double()
            hidden = activated(self.how, x @ gate.T + biases[0], x @ up.T + biases[1])
            y = hidden @ down.T + biases[2]
            out.index_add_(0, token, self.weights[token, slot, None].double() * y)
        return out

    def computed(self, layer: ExpertMatrices, device: torch.device) -> Tensor:
        layer.load_all(0, self.matrices)
        layer.set_biases(self.biases)
        x, ids, weights = (each.to(device) for each in (self.x, self.ids, self.weights))
        return layer.forward(x, ids, weights, out=torch.empty(x.shape, device=device)).cpu()


def case_of(kind: ActivationKind, fmt: str, rows: int) -> Case:
    how, g = Activation(kind, ALPHA, LIMIT), torch.Generator().manual_seed(1)
    width = HALF if how.gated else 2 * HALF
    shapes = (HALF, HIDDEN), (HALF, HIDDEN), (HIDDEN, width)

    def held(shape: tuple[int, int]) -> Weight:
        weight = torch.randn(shape, generator=g) / shape[1] ** 0.5
        return weight.bfloat16() if fmt == "bf16" else stored(weight, fmt)

    matrices = [(held(shapes[0]), held(shapes[1]), held(shapes[2])) for _ in range(EXPERTS)]
    biases = ExpertBiases(*(torch.randn(EXPERTS, n, generator=g) for n in (HALF, HALF, HIDDEN)))
    x = 2 * torch.randn(rows, HIDDEN, generator=g)
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(rows)]).int()
    return Case(how, matrices, biases, x.bfloat16(), ids, torch.rand(rows, TOP_K, generator=g))


def layers(case: Case) -> Iterator[tuple[str, ExpertMatrices, torch.device]]:
    """(tier, an empty layer, where it computes)."""
    pool, shape = _core.WorkerPool([-1] * 2), (EXPERTS, HIDDEN, case.width, "bf16", case.how)
    cpu = torch.device("cpu")
    for tier in _core.supported_tiers():
        yield tier, CpuOps(pool, tier).experts(*shape), cpu
    if torch.cuda.is_available():
        from tandem.kernels.gpu.ops import GpuOps  # Triton is there only where a GPU is

        device = torch.device("cuda")
        yield "gpu", GpuOps(device, CpuOps(pool, _core.supported_tiers()[-1])).experts(*shape), device


def main(
    out: Annotated[Path | None, typer.Option(help="a JSON file, or a directory of results")] = None,
) -> None:
    """Prints and writes one row for each case."""
    rows: list[Row] = []
    name = machine_name(this_machine(), 2)
    for kind in get_args(ActivationKind):
        for fmt in FORMATS:
            for many, count in ROWS.items():
                case = case_of(kind, fmt, count)
                exact = case.exact()
                for tier, layer, device in layers(case):
                    error = (case.computed(layer, device).double() - exact).abs().max() / exact.abs().max()
                    figures = {"rows": count, "max_rel_err": float(f"{float(error):.3g}")}
                    row = {"bench": "activation", "kind": kind, "tier": tier, "format": fmt, "size": many}
                    rows.append(row | figures | stamp(name))
                    print(f"{kind:14} {tier:12} {fmt:6} {many:5} {float(error):.2e}")
    if out is not None:
        write(rows, out)


if __name__ == "__main__":
    typer.run(main)
