"""DeepSeek-V2, V3, R1 and Kimi-K2: latent attention, first layers dense, ungated shared experts, grouped routing."""

from __future__ import annotations

from tandem.models.builder import Builder
from tandem.models.latent_attention import LatentAttention
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.names import MoENames

NAMES = MoENames(shared="mlp.shared_experts")


def layer(b: Builder, index: int) -> DecoderLayer:
    return decoder_layer(b, index, NAMES, attention=LatentAttention)
