"""Llama: the decoder of all families, without experts."""

from __future__ import annotations

from tandem.models.builder import Builder
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.names import MoENames

NAMES = MoENames()


def layer(b: Builder, index: int) -> DecoderLayer:
    return decoder_layer(b, index, NAMES)
