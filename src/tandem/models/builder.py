"""`Builder`: everything a layer needs to build itself: what to build, from which tensors, with which operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.checkpoint import Checkpoint
from tandem.config import ModelConfig, Plan
from tandem.experts import CpuExperts, ExpertMatrices
from tandem.kernels.ops import Linear, Ops, Rope

Progress = Callable[[str, int, int], None]  # what is being loaded, bytes done, bytes in all


class Builder:
    """Reads tensors by their checkpoint names, with the shapes config.json implies, and packs them once."""

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        checkpoint: Checkpoint,
        ops: Ops,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.plan, self.checkpoint, self.ops = config, plan, checkpoint, ops
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.dense_format = "f32" if self.dtype == torch.float32 else "bf16"
        self.rope = rope_table(config, plan.context_length)
        self._report = progress or (lambda _name, _done, _total: None)
        self._done, self._total = 0, checkpoint.nbytes()
        checkpoint.read_ahead(0)
        checkpoint.read_ahead(1)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A small tensor (norm weight, bias), copied in the activations' dtype."""
        return self._get(name, *shape).to(self.dtype, copy=True)

    def float_tensor(self, name: str, *shape: int) -> Tensor:
        """A small tensor, copied in float32."""
        return self._get(name, *shape).to(torch.float32, copy=True)

    def view(self, name: str, *shape: int) -> Tensor:
        """The mapped tensor itself, in its stored dtype; it stays mapped as long as it is referenced."""
        return self._get(name, *shape)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool = False) -> Linear:
        """The modules `names` (without `.weight`), stacked along their output rows, as one packed matrix."""
        weights = [
            self._get(f"{name}.weight", n, columns).to(self.dtype)
            for name, n in zip(names, rows, strict=True)
        ]
        biases = [self.tensor(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)] if bias else []
        return self.ops.linear(_stack(weights), _stack(biases) if bias else None, self.dense_format)

    def float_linear(self, name: str, rows: int, columns: int) -> Linear:
        """A matrix that is multiplied in float32 whatever the activations' dtype is (router gates)."""
        return self.ops.linear(self.float_tensor(f"{name}.weight", rows, columns), None, "f32")

    def experts(
        self, count: int, width: int, fmt: str, matrices: Callable[[int], ExpertMatrices]
    ) -> CpuExperts:
        """A layer of `count` experts, packed from `matrices(expert)`."""
        experts = CpuExperts(self.ops.experts(count, self.config.hidden, width, fmt, "silu"))
        experts.load(count, lambda expert: self._counted(matrices(expert)))
        return experts

    def layer_done(self, index: int) -> None:
        """Between layers: lets go of the file pages that were read, asks for those after next, reports progress."""
        self.checkpoint.forget(index)
        self.checkpoint.read_ahead(index + 2)
        self._report(
            f"loading layer {index + 1}/{self.config.layers}", min(self._done, self._total), self._total
        )

    def all_done(self) -> None:
        self.checkpoint.release()
        self._report("loading", self._total, self._total)

    def _get(self, name: str, *shape: int) -> Tensor:
        tensor = self.checkpoint.get(name, shape)
        self._done += tensor.nbytes
        return tensor

    def _counted(self, matrices: ExpertMatrices) -> ExpertMatrices:
        self._done += sum(matrix.nbytes for matrix in matrices)
        if matrices[0].dtype == torch.float16:  # exact in float32; the kernels pack from bf16 and f32
            return matrices[0].float(), matrices[1].float(), matrices[2].float()
        return matrices


def rope_table(config: ModelConfig, positions: int) -> Rope:
    """cos and sin of position / theta^(2i / rotary_dim), float32 [positions, rotary_dim / 2] (RoFormer)."""
    dim = config.attention.rotary_dim
    inverse = 1.0 / config.attention.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
    return Rope(angles.cos(), angles.sin())


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
