"""GLM-4.5 and 4.6: sigmoid router with a selection bias, ungated shared expert, first layers dense."""

from __future__ import annotations

from tandem.models.builder import Builder
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.names import MoENames

NAMES = MoENames(shared="mlp.shared_experts")


def layer(b: Builder, index: int) -> DecoderLayer:
    return decoder_layer(b, index, NAMES)
