"""The decoder layer that all families share; they differ in `ModelConfig` and in names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.kernels.ops import SureRead
from tandem.models.attention import Attention, KVPages
from tandem.models.batch import ForwardBatch
from tandem.models.builder import Builder
from tandem.models.moe import MoEBlock, dense_mlp
from tandem.models.names import MoENames


class MLP(Protocol):
    def reads(self) -> list[SureRead]: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class SelfAttention(Protocol):
    def reads(self) -> list[SureRead]: ...
    def __call__(self, x: Tensor, batch: ForwardBatch, pages: KVPages) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    input_norm: Tensor
    attention: SelfAttention
    mlp_norm: Tensor
    mlp: MLP

    def reads(self) -> list[SureRead]:
        """Weights in the order in which a step reads them."""
        return self.attention.reads() + self.mlp.reads()


def decoder_layer(
    b: Builder,
    index: int,
    moe_names: MoENames,
    dense_prefix: str = "mlp",
    attention: Callable[[Builder, int], SelfAttention] = Attention,
) -> DecoderLayer:
    """Layer `index`, dense or MoE as the configuration says."""
    layer, hidden = f"model.layers.{index}.", b.config.hidden
    mlp: MLP
    if index in b.config.moe_layers:
        mlp = MoEBlock(b, index, moe_names)
    else:
        mlp = dense_mlp(b, layer + dense_prefix, b.config.dense_width)
    return DecoderLayer(
        input_norm=b.tensor(layer + "input_layernorm.weight", hidden),
        attention=attention(b, index),
        mlp_norm=b.tensor(layer + "post_attention_layernorm.weight", hidden),
        mlp=mlp,
    )
