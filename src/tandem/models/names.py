"""How families call the tensors of a feed-forward block in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError
from tandem.experts import ExpertMatrices
from tandem.formats.cut import rows_of


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Modules below `model.layers.{L}.`: one per expert and matrix, or all experts in two 3-D tensors.

    The fused form, as Transformers 5 holds it: gate_up [E, 2 width, hidden] (gate rows first), down [E, hidden, width].
    """

    each: str = "mlp.experts.{expert}.{matrix}"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"

    def read(
        self, checkpoint: Checkpoint, layer: str, expert: int, sizes: tuple[int, int, int]
    ) -> ExpertMatrices:
        """One expert's matrices; `sizes` = (experts, hidden, width) that config.json implies."""
        count, hidden, width = sizes
        if checkpoint.has_matrix(layer + self.gate_up):
            both = checkpoint.expert_weight(layer + self.gate_up, expert, (count, 2 * width, hidden))
            gate, up = rows_of(both, slice(0, width)), rows_of(both, slice(width, None))
            return gate, up, checkpoint.expert_weight(layer + self.down, expert, (count, hidden, width))
        names = [layer + self.each.format(expert=expert, matrix=m) for m in self.matrices]
        if not checkpoint.has_matrix(names[0]):
            raise CheckpointError(
                f"{checkpoint.path_of(names[0])} has neither {names[0]}.weight nor {layer + self.gate_up}"
            )
        up_shape = (width, hidden)
        return (
            checkpoint.weight(names[0], up_shape),
            checkpoint.weight(names[1], up_shape),
            checkpoint.weight(names[2], (hidden, width)),
        )


PER_EXPERT = ExpertNames()
MIXTRAL = ExpertNames("block_sparse_moe.experts.{expert}.{matrix}", ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class MoENames:
    """Modules of an MoE block, below `model.layers.{L}.`; "" where a family has none."""

    router: str = "mlp.gate"
    experts: ExpertNames = PER_EXPERT
    shared: str = ""
    shared_gate: str = ""


def mlp_matrices(checkpoint: Checkpoint, prefix: str, hidden: int, width: int) -> ExpertMatrices:
    """A dense MLP's gate, up and down."""
    gate, up = (checkpoint.weight(f"{prefix}.{m}_proj", (width, hidden)) for m in ("gate", "up"))
    return gate, up, checkpoint.weight(f"{prefix}.down_proj", (hidden, width))
