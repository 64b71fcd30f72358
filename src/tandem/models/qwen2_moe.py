"""Qwen1.5-MoE and Qwen2-MoE: softmax router, biases on q, k, v, a shared expert behind a sigmoid gate."""

from __future__ import annotations

from tandem.models.builder import Builder
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.names import MoENames

NAMES = MoENames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def layer(b: Builder, index: int) -> DecoderLayer:
    return decoder_layer(b, index, NAMES)
