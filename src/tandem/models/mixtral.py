"""Mixtral: softmax router over few wide experts; names of its own, or those of Transformers 5 in memory."""

from __future__ import annotations

from tandem.models.builder import Builder
from tandem.models.layers import DecoderLayer, decoder_layer
from tandem.models.names import MIXTRAL, MoENames

NAMES = MoENames(router="block_sparse_moe.gate", experts=MIXTRAL)
IN_MEMORY_NAMES = MoENames()


def layer(b: Builder, index: int) -> DecoderLayer:
    in_memory = f"model.layers.{index}.mlp.gate.weight" in b.checkpoint
    return decoder_layer(b, index, IN_MEMORY_NAMES if in_memory else NAMES)
