"""Qwen3.8-Flash-Next (Qwen4-exp), its text: Qwen3.5's delta nets with a sigmoid for a gate, and attention that chooses
tokens. Residual streams never mix. N-grams come out of a table that is read by row.

Transformers leaves the draft layer out. Here all streams pass one norm together, and the token's projection is added to
each; no published draft tokens have been compared, but what is drafted is verified.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from tandem.architectures.family import Family
from tandem.architectures.gguf.qwen4_exp import QWEN4_EXP, TABLE_ROWS
from tandem.architectures.names import DraftNames, Names, Renames
from tandem.architectures.recurrent.qwen3_next import delta_rule
from tandem.architectures.shared import (
    FULL,
    activation,
    assembled,
    epsilon,
    gqa,
    layer_count,
    layer_kinds,
    moe,
    positive,
    softmax_router,
    text_part,
    with_drafts,
)
from tandem.errors import ConfigError
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.ngrams.shape import MOST_VOCAB, Ngram
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Block, Layer, Mixer
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.stored import RowTable

RECURRENT = "linear_attention"
CHOOSING = FULL, "indexed_attention", "qwen_sparse_attention"
"""Layer kinds of the hub, of Transformers, and of others: all mean the same."""

MOST_BASE = 1 << 26  # of what primes are looked for above


def config(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys = text_part(keys)
    keys.only("attn_output_gate", True, "attention is gated")
    keys.only("mlp_only_layers", [], "every layer has experts")
    for key in ("mamba_ssm_dtype", "number_of_conv_states", "split_ngram_parts", "seed", "intermediate_size"):
        keys.get(key)  # states are float32 here; multipliers are in the checkpoint; no layer is dense
    norm = Norm(epsilon(keys), plus_one=True)
    streams = GatedStreams(positive(keys, "hc_count", 4), keys.size("hc_lowrank", 320))
    if streams.streams < 2:
        raise ConfigError(f"{keys.where}: hc_count is 1, and must be at least 2; try 4")
    experts, added = _experts(keys), _ngrams(keys, streams.streams, norm)
    layers = []
    for i, mixer in enumerate(_mixers(keys)):
        own = (Block(added[i], norm),) if i in added else ()
        layers.append(Layer((*own, Block(mixer, norm, streams), Block(experts, norm, streams))))
    drafts = keys.count("mtp_num_hidden_layers", 0)
    keys.only("mtp_use_dedicated_embeddings", False, "the draft layer shares the model's")
    keys.get("mtp")  # the same again
    return with_drafts(keys, assembled(keys, generation, tuple(layers), norm), count=drafts)


def _experts(keys: JsonKeys) -> Moe:
    router = softmax_router(keys, "num_experts", keys.optional("norm_topk_prob", True))
    shared = keys.size("shared_expert_intermediate_size", 640)
    experts = moe(router, keys.size("moe_intermediate_size", 640), shared, shared_gate=True)
    return experts.activated_by(activation(keys))


def _mixers(keys: JsonKeys) -> list[Mixer]:
    interval = keys.optional("full_attention_interval", 4)
    if interval < 1:
        raise ConfigError(f"{keys.where}: full_attention_interval is {interval}; try 4")
    kinds = layer_kinds(keys, lambda i: FULL if (i + 1) % interval == 0 else RECURRENT)
    if unknown := sorted(set(kinds) - {RECURRENT, *CHOOSING}):
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; {RECURRENT} and {FULL} are")
    if set(kinds) <= {RECURRENT}:
        raise ConfigError(f"{keys.where}: layer_types has no {FULL}")
    attention, recurrent = _attention(keys), replace(delta_rule(keys, "kinds"), gate=_gate(keys))
    return [recurrent if kind == RECURRENT else attention for kind in kinds]


def _gate(keys: JsonKeys) -> Literal["silu", "sigmoid"]:
    name = keys.optional("output_gate_type", keys.optional("hidden_act", "silu"))
    if name == "sigmoid":
        return "sigmoid"
    if name != "silu":
        raise ConfigError(f"{keys.where}: output_gate_type = {name!r} is not supported; sigmoid and silu are")
    return "silu"


def _attention(keys: JsonKeys) -> Gqa:
    bias = keys.optional("attention_bias", False)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias, qk_norm="head", rotary_share=1.0, plus_one=True)
    keys.only("indexer_kv_heads", 1, "all heads of an indexer share one key")
    index = MeanIndex(
        keys.size("indexer_n_heads", 4), keys.size("indexer_head_dim", 128), keys.size("indexer_budget", 2048),
        attention.rope, attention.norm, keys.size("indexer_compress_ratio", 4, most=4096),
    )  # fmt: skip
    return replace(attention, gate=True, index=index)


def _ngrams(keys: JsonKeys, streams: int, norm: Norm) -> dict[int, Ngram]:
    """By layer, of which config.json's first is 1."""
    count, numbers = layer_count(keys), sorted(set(keys.integers("ple_layer_ids")))
    if wrong := [number for number in numbers if not 1 <= number <= count]:
        raise ConfigError(f"{keys.where}: ple_layer_ids has {wrong[0]}, and layers are 1 to {count}")
    if not numbers:
        return {}
    return {number - 1: _ngram(keys, at, streams, norm) for at, number in enumerate(numbers)}


def _ngram(keys: JsonKeys, at: int, streams: int, norm: Norm) -> Ngram:
    """at: which of the model's tables it reads."""
    hidden, stop = keys.size("hidden_size", 2560), keys.integers("eos_token_id")
    longest, heads = positive(keys, "ngram_size", 3), positive(keys, "heads_per_ngram", 8)
    width, hashes = keys.optional("ple_embed_dim", hidden), (longest - 1) * heads
    if not stop:
        raise ConfigError(f"{keys.where} lacks 'eos_token_id', at which n-grams end: add it, for example 248044")
    if hashes < 1 or width < 1 or width % hashes:
        fitting = f"is not a multiple of {hashes} hashes; try {hashes * 160}"
        raise ConfigError(f"{keys.where}: ple_embed_dim {width} {fitting}")
    if keys.size("vocab_size", 248320) > MOST_VOCAB:
        raise ConfigError(f"{keys.where}: vocab_size {keys['vocab_size']} is more than n-grams take, {MOST_VOCAB}")
    taps = positive(keys, "ple_conv_kernel_size", keys.optional("ple_conv_kernel", 4))
    table = RowTable(_rows(keys, at, hashes), width // hashes, hashes)
    return Ngram(longest, heads, table, taps, streams, hidden, stop[0], norm)


def _rows(keys: JsonKeys, at: int, hashes: int) -> int:
    if TABLE_ROWS in keys:
        return keys.size(TABLE_ROWS, 320_001_536)
    base = keys.size("ngram_vocab_size_base", 20_000_000, most=MOST_BASE)
    unit = max(1, keys.count("make_ngram_vocab_size_divisible_by", 128, most=1 << 20))
    return -(-sum(primes(base - 1, at * hashes, hashes)) // unit) * unit


@lru_cache(16)
def primes(above: int, skipped: int, count: int) -> tuple[int, ...]:
    """So many primes above a number, behind the first `skipped`."""
    numbers, number = list[int](), above
    while len(numbers) < skipped + count:
        number += 1
        if _is_prime(number):
            numbers.append(number)
    return tuple(numbers[skipped:])


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


RENAMES = Renames({"model.hyper_connection_mixer.hc_norm.": "model.norm."}, signs=("hyper_connection_mixer.hc_norm",))
"""The last norm is in front of the sum of the streams, not behind it."""

NAMES = Names(
    norms=("attn_hyper_connection.hc_norm", "mlp_hyper_connection.hc_norm"),
    streams=("attn_hyper_connection", "mlp_hyper_connection"), shared="mlp.shared_expert",
    shared_gate="mlp.shared_expert_gate",
)  # fmt: skip
DRAFTS = DraftNames(
    "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc_embedding",
    "mtp.hyper_connection_mixer.hc_norm", hidden_projection="mtp.fc_hidden", streams="mtp.hyper_connection_mixer",
)  # fmt: skip
FAMILY = Family(("qwen4_exp", "qwen4_exp_text"), config, (NAMES,), QWEN4_EXP, DRAFTS, renames=RENAMES)
