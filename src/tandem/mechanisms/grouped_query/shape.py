"""Grouped-query attention: keys and values of all tokens, or of a window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import ConfigError
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope
from tandem.spec.state import Array, Pages, State

QkNorm = Literal["none", "head", "width", "turned"]
OwnGate = Literal["none", "softplus", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Values:
    """Differences of a head's values from a projection of its own, as wide as keys."""

    dim: int = 0  # of a head; 0: as keys
    scale: float = 1.0  # they are multiplied with it
    norm: bool = False  # each head passes a norm without weights, with the eps of q's and k's
    from_keys: bool = False  # they are made of keys before norm and rotation

    @property
    def plain(self) -> bool:
        """Whether they are kept as they were projected."""
        return self.scale == 1.0 and not self.norm and not self.from_keys


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention. window: how many last tokens a token sees, itself included; 0: all."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    qk_norm: QkNorm = "none"  # of q and k, before they turn: per head, or over all heads at once; "turned": behind
    norm: Norm = field(default=Norm(1e-6))
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float = 0.0  # q, k, v are clamped to [-clip, clip]; 0: not
    sinks: bool = False  # a score of each head counts in the softmax and has no value
    gate: bool = (
        False  # the result times the sigmoid of a gate, which q's projection makes beside each query head
    )
    own_gate: OwnGate = "none"  # the result times that of numbers, which a projection of its own makes ...
    gates_each: Literal["head", "channel"] = "head"  # ... one for each of these
    values: Values = field(default=Values())
    factor: float = 0.0  # of the softmax; 0: head_dim ** -0.5
    cached: str = "act"  # dtype of keys and values in pages
    kv_copies: int = 1  # so many neighbouring ranks have the same KV heads
    index: MeanIndex | None = None  # a token looks at some others; None: at all that it sees

    def __post_init__(self) -> None:
        if not 0 <= self.values.dim <= self.head_dim:
            raise ConfigError(
                f"config.json: values of {self.values.dim} channels are wider than keys of {self.head_dim}"
            )

    @property
    def scale(self) -> float:
        """Scale of the softmax."""
        return self.factor or float(self.head_dim**-0.5)

    @property
    def sees_all(self) -> bool:
        """Whether a token looks back farther than a window."""
        return self.window == 0

    @property
    def value_dim(self) -> int:
        """Channels of a head's values."""
        return self.values.dim or self.head_dim

    @property
    def gate_rows(self) -> int:
        """Rows of the projection that makes the gate; 0: there is none."""
        wide = self.heads * self.value_dim if self.gates_each == "channel" else self.heads
        return 0 if self.own_gate == "none" else wide

    def params(self, hidden: int) -> int:
        q = self.heads * (2 if self.gate else 1) * self.head_dim + self.gate_rows
        v = 0 if self.values.from_keys else self.kv_heads * self.value_dim
        index = 0 if self.index is None else self.index.params(hidden)
        return index + hidden * (q + self.kv_heads * self.head_dim + v + self.heads * self.value_dim)

    def states(self) -> tuple[State, ...]:
        k, v = (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        pages = Pages((Array("k", k, self.cached), Array("v", v, self.cached)), window=self.window)
        return (pages,) if self.index is None else (pages, *self.index.states())
