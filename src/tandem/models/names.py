"""A layer's feed-forward matrices, read by the names that its family gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.architectures.names import ExpertNames
from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError
from tandem.experts import ExpertMatrices
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.cut import rows_of
from tandem.kernels.ops import ExpertBiases

Sizes = tuple[int, int, int]
"""Experts, hidden, width: as config.json implies them."""


def expert_matrices(
    names: ExpertNames, checkpoint: Checkpoint, layer: str, expert: int, sizes: Sizes, gated: bool = True
) -> ExpertMatrices:
    """One expert's gate, up and down; without a gate, up stands for it.

    Raises CheckpointError where the layer has neither spelling.
    """
    count, hidden, width = sizes
    if checkpoint.has_matrix(layer + names.gate_up):
        both = _of_all(names, checkpoint, layer + names.gate_up, expert, (count, 2 * width, hidden))
        gate, up = (rows_of(both, rows) for rows in _gate_and_up(names, width))
        return gate, up, _of_all(names, checkpoint, layer + names.down, expert, (count, hidden, width))
    gate_name, up_name, down_name = (layer + names.stacked.format(matrix=m) for m in names.matrices)
    if checkpoint.has_matrix(gate_name if gated else up_name):
        up = checkpoint.expert_weight(up_name, expert, (count, width, hidden))
        gate = checkpoint.expert_weight(gate_name, expert, (count, width, hidden)) if gated else up
        return gate, up, checkpoint.expert_weight(down_name, expert, (count, hidden, width))
    gate_name, up_name, down_name = (
        layer + names.each.format(expert=expert, matrix=m) for m in names.matrices
    )
    first = gate_name if gated else up_name
    if not checkpoint.has_matrix(first):
        raise CheckpointError(
            f"{checkpoint.path_of(first)} has neither {first}.weight nor {layer + names.gate_up}"
        )
    up = checkpoint.weight(up_name, (width, hidden))
    gate = checkpoint.weight(gate_name, (width, hidden)) if gated else up
    return gate, up, checkpoint.weight(down_name, (hidden, width))


def _gate_and_up(names: ExpertNames, width: int) -> tuple[slice, slice]:
    """Their rows where both are one matrix."""
    if names.interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, width), slice(width, None)


def _of_all(names: ExpertNames, checkpoint: Checkpoint, module: str, expert: int, shape: Sizes) -> Weight:
    """One expert [N, K] of a tensor of all, `shape` [E, N, K]. Codes always lie along K."""
    count, rows, depth = shape
    if not names.transposed or checkpoint.format(module).quantised:
        return checkpoint.expert_weight(module, expert, shape)
    weight = checkpoint.expert_weight(module, expert, (count, depth, rows))
    assert not isinstance(weight, WeightCodes)
    return weight.T


def expert_biases(names: ExpertNames, checkpoint: Checkpoint, layer: str, sizes: Sizes) -> ExpertBiases:
    """Of all experts of a layer, from tensors that hold all of them, or from one for each."""
    count, hidden, width = sizes
    if f"{layer}{names.gate_up}_bias" not in checkpoint:
        each = [_biases_of(names, checkpoint, layer, expert, (width, hidden)) for expert in range(count)]
        return ExpertBiases(*(torch.stack(biases) for biases in zip(*each, strict=True)))
    both = checkpoint.get(f"{layer}{names.gate_up}_bias", (count, 2 * width)).float()
    gate, up = (both[:, rows].contiguous() for rows in _gate_and_up(names, width))
    return ExpertBiases(gate, up, checkpoint.get(f"{layer}{names.down}_bias", (count, hidden)).float())


def _biases_of(
    names: ExpertNames, checkpoint: Checkpoint, layer: str, expert: int, rows: tuple[int, int]
) -> list[Tensor]:
    modules = (layer + names.each.format(expert=expert, matrix=matrix) for matrix in names.matrices)
    sizes = rows[0], rows[0], rows[1]
    return [checkpoint.get(f"{module}.bias", (n,)).float() for module, n in zip(modules, sizes, strict=True)]


def ungated(up: Weight, down: Weight) -> ExpertMatrices:
    """As kernels take an expert without a gate: both halves of up's rows, and down."""
    half = up.shape[0] // 2
    return rows_of(up, slice(0, half)), rows_of(up, slice(half, None)), down


def mlp_matrices(checkpoint: Checkpoint, prefix: str, hidden: int, width: int, gated: bool = True) -> ExpertMatrices:
    """A dense MLP's gate, up and down; without a gate, up stands for it."""
    if not gated:
        up = checkpoint.weight(f"{prefix}.up_proj", (width, hidden))
        return up, up, checkpoint.weight(f"{prefix}.down_proj", (hidden, width))
    if checkpoint.has_matrix(f"{prefix}.gate_up_proj"):
        both = checkpoint.weight(f"{prefix}.gate_up_proj", (2 * width, hidden))
        gate, up = rows_of(both, slice(0, width)), rows_of(both, slice(width, None))
    else:
        gate, up = (checkpoint.weight(f"{prefix}.{m}_proj", (width, hidden)) for m in ("gate", "up"))
    return gate, up, checkpoint.weight(f"{prefix}.down_proj", (hidden, width))
