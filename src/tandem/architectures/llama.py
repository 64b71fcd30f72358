"""Llama: the decoder of most families, without experts."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import Family, GgufKeys
from tandem.architectures.shared import gqa, model
from tandem.config.json_keys import JsonKeys
from tandem.config.model_config import ModelConfig


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    bias = keys.optional("attention_bias", False)
    keys.only("mlp_bias", False, "feed-forward matrices have no bias")
    attention = gqa(keys, qkv_bias=bias, out_bias=bias)
    return model(keys, generation, lambda _: attention)


def gguf_config(keys: GgufKeys) -> dict[str, Any]:
    return {"model_type": "llama", "attention_bias": keys.has_bias}


FAMILY = Family(("llama",), config)  # its GGUF architecture is Mixtral's, too: see mixtral.py
