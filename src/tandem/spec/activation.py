"""Activations of feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamp", "swiglu_oai", "silu_clamp", "relu2"]


@dataclass(frozen=True, slots=True)
class Activation:
    """Activation of a feed-forward, from gate and up. alpha and limit: of the kinds that have them.

    "silu", "gelu" and "gelu_tanh": that of gate, times up. "swiglu_clamp": gate at most `limit`, up within it, then
    silu(gate) * up. "swiglu_oai": clamped likewise, then gate * sigmoid(alpha * gate) * (up + 1). "silu_clamp":
    silu(gate) at most `limit`, times up within it. "relu2": there is no gate; max(up, 0) squared.
    """

    kind: ActivationKind = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in ("swiglu_clamp", "swiglu_oai", "silu_clamp") and not self.limit > 0:
            raise ConfigError(f"the limit of a {self.kind} activation is {self.limit}, and must be above 0")

    @property
    def gated(self) -> bool:
        return self.kind != "relu2"

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward."""
        return 3 if self.gated else 2


SILU = Activation()
