"""Quilted, a family that only a test has: every second layer sees a window, biases everywhere, a score of its own."""

from __future__ import annotations

from dataclasses import replace

from tandem.architectures.family import Family
from tandem.architectures.shared import gqa, layers_after_dense, model, moe, softmax_router, windowed
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    mixers = windowed(keys, gqa(keys, qkv_bias=True, out_bias=True), 8, lambda i: i % 2 == 1)
    router = softmax_router(keys, "num_experts", normalize=True)
    router = replace(router, score="softsign", has_bias=True, logits_bias=True, scale=keys.optional("scale", 1.0))
    plain = moe(router, keys.size("moe_intermediate_size", 512))
    biased = replace(plain, experts=replace(plain.experts, biases=True))
    return model(keys, generation, mixers.__getitem__, biased, layers_after_dense(keys, 1))


FAMILY = Family(("quilted",), config)
