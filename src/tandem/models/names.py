"""A layer's feed-forward matrices, read by the names that its family gives them."""

from __future__ import annotations

from tandem.architectures.names import ExpertNames
from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError
from tandem.experts import ExpertMatrices
from tandem.formats.cut import rows_of


def expert_matrices(
    names: ExpertNames, checkpoint: Checkpoint, layer: str, expert: int, sizes: tuple[int, int, int]
) -> ExpertMatrices:
    """One expert's gate, up and down; `sizes` = (experts, hidden, width) that config.json implies.

    Raises CheckpointError where the layer has neither spelling.
    """
    count, hidden, width = sizes
    if checkpoint.has_matrix(layer + names.gate_up):
        both = checkpoint.expert_weight(layer + names.gate_up, expert, (count, 2 * width, hidden))
        gate, up = rows_of(both, slice(0, width)), rows_of(both, slice(width, None))
        return gate, up, checkpoint.expert_weight(layer + names.down, expert, (count, hidden, width))
    gate_name, up_name, down_name = (
        layer + names.each.format(expert=expert, matrix=m) for m in names.matrices
    )
    if not checkpoint.has_matrix(gate_name):
        raise CheckpointError(
            f"{checkpoint.path_of(gate_name)} has neither {gate_name}.weight nor {layer + names.gate_up}"
        )
    up_shape = (width, hidden)
    return (
        checkpoint.weight(gate_name, up_shape),
        checkpoint.weight(up_name, up_shape),
        checkpoint.weight(down_name, (hidden, width)),
    )


def mlp_matrices(checkpoint: Checkpoint, prefix: str, hidden: int, width: int) -> ExpertMatrices:
    """A dense MLP's gate, up and down."""
    gate, up = (checkpoint.weight(f"{prefix}.{m}_proj", (width, hidden)) for m in ("gate", "up"))
    return gate, up, checkpoint.weight(f"{prefix}.down_proj", (hidden, width))
