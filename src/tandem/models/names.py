"""A layer's feed-forward matrices, read by the names that its family gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.architectures.names import ExpertNames
from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError, ConfigError
from tandem.experts import ExpertMatrices
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import rows_of
from tandem.kernels.ops import ExpertBiases
from tandem.spec.shard import ALL, Share

Sizes = tuple[int, int, Share]
"""Experts, hidden, width: as config.json implies them."""


def expert_matrices(
    names: ExpertNames, checkpoint: Checkpoint, layer: str, expert: int, sizes: Sizes, gated: bool = True
) -> ExpertMatrices:
    """One expert's gate, up and down, as wide as this rank has them; without a gate, up stands for it.

    Raises CheckpointError where the layer has neither spelling.
    """
    count, hidden, width = sizes
    if checkpoint.has_matrix(layer + names.gate_up):
        gate, up = _gate_and_up(names, checkpoint, layer + names.gate_up, expert, sizes)
        down = layer + names.down
        check_groups(checkpoint, down, width)
        return gate, up, _of_all(names, checkpoint, down, expert, (count, hidden, width.whole), columns=width.cut)
    gate_name, up_name, down_name = (layer + names.stacked.format(matrix=m) for m in names.matrices)
    if checkpoint.has_matrix(gate_name if gated else up_name):
        check_groups(checkpoint, down_name, width)
        up = checkpoint.expert_weight(up_name, expert, (count, width.whole, hidden), width.cut)
        gate = checkpoint.expert_weight(gate_name, expert, (count, width.whole, hidden), width.cut) if gated else up
        down_shape = count, hidden, width.whole
        return gate, up, checkpoint.expert_weight(down_name, expert, down_shape, columns=width.cut)
    modules = [layer + names.each.format(expert=expert, matrix=m) for m in names.matrices]
    first = modules[0 if gated else 1]
    if not checkpoint.has_matrix(first):
        raise CheckpointError(
            f"{checkpoint.path_of(first)} has neither {first}.weight nor {layer + names.gate_up}"
        )
    return _from_modules(checkpoint, modules, hidden, width, gated)


def _from_modules(
    checkpoint: Checkpoint, modules: Sequence[str], hidden: int, width: Share, gated: bool
) -> ExpertMatrices:
    """Matrices of an expert from gate, up and down as modules of their own."""
    gate_name, up_name, down_name = modules
    check_groups(checkpoint, down_name, width)
    rows = width.whole, hidden
    gate = checkpoint.weight(gate_name if gated else up_name, rows, width.cut)
    up = checkpoint.weight(up_name, rows, width.cut) if gated else gate
    return gate, up, checkpoint.weight(down_name, (hidden, width.whole), columns=width.cut)


def check_groups(checkpoint: Checkpoint, module: str, inputs: Share) -> None:
    """ConfigError where a rank's inputs of a matrix are not whole groups of codes: what is left would be no codes."""
    if inputs.cut == ALL or inputs.size % (unit := checkpoint.format(module).along) == 0:
        return
    groups = inputs.whole // unit
    possible = [str(n) for n in range(1, groups + 1) if groups % n == 0 and inputs.whole % unit == 0]
    raise ConfigError(
        f"--tensor-parallel-size {inputs.whole // inputs.size}: {module} is {checkpoint.format(module)}, and its "
        f"{inputs.whole} inputs have groups of {unit}, which stay whole; possible: {', '.join(possible or ['1'])}",
        fields=("tensor_parallel_size",),
    )


def _gate_and_up(
    names: ExpertNames, checkpoint: Checkpoint, module: str, expert: int, sizes: Sizes
) -> tuple[Weight, Weight]:
    """Gate and up of an expert, from a tensor that has both."""
    count, hidden, width = sizes
    shape = count, 2 * width.whole, hidden
    if names.interleaved or width.cut == ALL:
        rows = slice(2 * width.first, 2 * (width.first + width.size)) if width.cut != ALL else ALL
        gate_up = _of_all(names, checkpoint, module, expert, shape, rows)
        gate, up = (rows_of(gate_up, half) for half in _halves(names, width.size))
        return gate, up
    first, second = (_of_all(names, checkpoint, module, expert, shape, half) for half in _halves_of(width))
    return first, second


def _halves(names: ExpertNames, width: int) -> tuple[slice, slice]:
    """Rows of gate and up where both are one matrix."""
    if names.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, width), slice(width, None)


def _halves_of(width: Share) -> tuple[slice, slice]:
    """Likewise, one behind the other, as far as they are this rank's."""
    if width.cut == ALL:
        return slice(0, width.whole), slice(width.whole, None)
    first, last = width.first, width.first + width.size
    return slice(first, last), slice(width.whole + first, width.whole + last)


def _of_all(
    names: ExpertNames,
    checkpoint: Checkpoint,
    module: str,
    expert: int,
    shape: tuple[int, int, int],
    rows: slice = ALL,
    columns: slice = ALL,
) -> Weight:
    """Weight of one expert [N, K] of a tensor of all, `shape` [E, N, K]. Codes always lie along K."""
    count, n, k = shape
    if not names.transposed or checkpoint.format(module).quantised:
        return checkpoint.expert_weight(module, expert, shape, rows, columns)
    weight = checkpoint.expert_weight(module, expert, (count, k, n), columns, rows)
    assert not isinstance(weight, WeightCodes)
    return weight.T


def expert_biases(names: ExpertNames, checkpoint: Checkpoint, layer: str, sizes: Sizes) -> ExpertBiases:
    """Biases of all experts of a layer, from tensors of all of them, or from one for each. Those of down are whole."""
    count, hidden, width = sizes
    if f"{layer}{names.gate_up}_bias" not in checkpoint:
        each = [_biases_of(names, checkpoint, layer, expert, (width, hidden)) for expert in range(count)]
        return ExpertBiases(*(torch.stack(biases) for biases in zip(*each, strict=True)))
    gate_up = checkpoint.get(f"{layer}{names.gate_up}_bias", (count, 2 * width.whole)).float()
    gate, up = (gate_up[:, rows][:, width.cut].contiguous() for rows in _halves(names, width.whole))
    return ExpertBiases(gate, up, checkpoint.get(f"{layer}{names.down}_bias", (count, hidden)).float())


def _biases_of(
    names: ExpertNames, checkpoint: Checkpoint, layer: str, expert: int, rows: tuple[Share, int]
) -> list[Tensor]:
    gate, up, down = (layer + names.each.format(expert=expert, matrix=matrix) for matrix in names.matrices)
    width, hidden = rows
    own = [checkpoint.get(f"{module}.bias", (width.whole,)).float()[width.cut] for module in (gate, up)]
    return [*own, checkpoint.get(f"{down}.bias", (hidden,)).float()]


def ungated(up: Weight, down: Weight) -> ExpertMatrices:
    """As kernels take an expert without a gate: both halves of up's rows, and down."""
    half = up.shape[0] // 2
    return rows_of(up, slice(0, half)), rows_of(up, slice(half, None)), down


def mlp_matrices(
    checkpoint: Checkpoint, prefix: str, hidden: int, width: Share, gated: bool = True
) -> ExpertMatrices:
    """A dense MLP's gate, up and down, as wide as this rank has them; without a gate, up stands for it."""
    down = f"{prefix}.down_proj"
    if not gated or not checkpoint.has_matrix(f"{prefix}.gate_up_proj"):
        return _from_modules(checkpoint, [f"{prefix}.gate_proj", f"{prefix}.up_proj", down], hidden, width, gated)
    check_groups(checkpoint, down, width)
    module, shape = f"{prefix}.gate_up_proj", (2 * width.whole, hidden)
    if width.cut == ALL:
        gate_up = checkpoint.weight(module, shape)
        gate, up = (rows_of(gate_up, half) for half in _halves_of(width))
    else:
        gate, up = (checkpoint.weight(module, shape, half) for half in _halves_of(width))
    return gate, up, checkpoint.weight(down, (hidden, width.whole), columns=width.cut)
