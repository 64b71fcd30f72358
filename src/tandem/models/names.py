"""How families call the tensors of a feed-forward block in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.checkpoint import Checkpoint
from tandem.errors import CheckpointError
from tandem.experts import ExpertMatrices


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names below `model.layers.{L}.`: one tensor per expert and matrix, or all experts in two 3-D tensors.

    The fused form, as Transformers 5 holds it: gate_up [E, 2 width, hidden] (gate rows first), down [E, hidden, width].
    """

    each: str = "mlp.experts.{expert}.{matrix}.weight"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"

    def read(
        self, checkpoint: Checkpoint, layer: str, expert: int, sizes: tuple[int, int, int]
    ) -> ExpertMatrices:
        """Views of one expert's matrices; `sizes` = (experts, hidden, width) that config.json implies."""
        count, hidden, width = sizes
        if layer + self.gate_up in checkpoint:
            both = checkpoint.get(layer + self.gate_up, (count, 2 * width, hidden))[expert]
            return (
                both[:width],
                both[width:],
                checkpoint.get(layer + self.down, (count, hidden, width))[expert],
            )
        gate, up, down = (layer + self.each.format(expert=expert, matrix=m) for m in self.matrices)
        if gate not in checkpoint:
            raise CheckpointError(f"{checkpoint.path} has neither {gate} nor {layer + self.gate_up}")
        up_shape = (width, hidden)
        return (
            checkpoint.get(gate, up_shape),
            checkpoint.get(up, up_shape),
            checkpoint.get(down, (hidden, width)),
        )


PER_EXPERT = ExpertNames()
MIXTRAL = ExpertNames("block_sparse_moe.experts.{expert}.{matrix}.weight", ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class MoENames:
    """Modules of an MoE block, below `model.layers.{L}.`; "" where a family has none."""

    router: str = "mlp.gate"
    experts: ExpertNames = PER_EXPERT
    shared: str = ""
    shared_gate: str = ""


def mlp_matrices(checkpoint: Checkpoint, prefix: str, hidden: int, width: int) -> ExpertMatrices:
    """Views of a dense MLP's gate, up and down."""
    gate, up = (checkpoint.get(f"{prefix}.{m}_proj.weight", (width, hidden)) for m in ("gate", "up"))
    return gate, up, checkpoint.get(f"{prefix}.down_proj.weight", (hidden, width))
