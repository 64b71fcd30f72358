"""Qwen3.8-Flash-Next in GGUF files: delta nets and norms as Qwen3.5's, a table outside all layers, hashes' numbers in
the metadata."""

from __future__ import annotations

from typing import Any

from tandem.architectures.family import DerivedTensor, Gguf, GgufKeys
from tandem.architectures.gguf.qwen3_next import STEMS as QWEN35_STEMS
from tandem.architectures.gguf.qwen3_next import hybrid_config, qwen35_parts

TABLE_ROWS = "ngram_table_rows"
"""A key of no config.json: files say how many rows there are, not what primes they were made of."""
EMBEDDING = "ple.ple_embedding."

STREAMS = {
    "norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight",
}  # fmt: skip
STEMS = QWEN35_STEMS | {
    **{f"hc_attn_{last}": f"attn_hyper_connection.{ours}" for last, ours in STREAMS.items()},
    **{f"hc_ffn_{last}": f"mlp_hyper_connection.{ours}" for last, ours in STREAMS.items()},
    "indexer.q_proj": "self_attn.indexer.q_proj", "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_proj": "self_attn.indexer.k_proj", "indexer.k_norm": "self_attn.indexer.k_layernorm",
    "ple_key": "ple.key_proj", "ple_value": "ple.value_proj", "ple_conv1d": "ple.conv1d",
    "ple_norm_key": "ple.norm_key", "ple_norm_query": "ple.norm_query", "ple_norm_conv": "ple.norm_conv",
}  # fmt: skip
NORMS = tuple(f"{module}.weight" for module in STEMS.values() if module.endswith(("hc_norm", "layernorm")))
NORMS += tuple(f"ple.norm_{which}.weight" for which in ("key", "query", "conv"))
WHOLES = {
    "layer_multipliers": "layer_multipliers", "ngram_heads_vocab_sizes": "head_vocab_sizes",
    "ngram_heads_offsets": "head_offsets",
}  # fmt: skip


def config(keys: GgufKeys) -> dict[str, Any]:
    heads, longest = keys.size("ple.heads_per_ngram"), keys.size("ple.ngram_size")
    ratios = keys.layers("attention.compress_ratios", keys.depth)
    return hybrid_config(keys) | {
        "model_type": "qwen4_exp_text",
        "norm_topk_prob": True,
        "output_gate_type": "sigmoid",
        "hc_count": keys.size("hyper_connection.count"),
        "hc_lowrank": keys.size("hyper_connection.low_rank"),
        "indexer_n_heads": keys.size("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.size("attention.indexer.key_length"),
        "indexer_budget": keys.size("attention.indexer.top_k"),
        "indexer_compress_ratio": max(ratios, default=1),
        "ple_layer_ids": [_layer(keys) + 1],
        "ple_embed_dim": keys.size("embedding_length_per_layer_input") * heads * (longest - 1),
        "ple_conv_kernel_size": keys.size("ple.conv_kernel"),
        "ngram_size": longest,
        "heads_per_ngram": heads,
        "eos_token_id": keys.need("ple.eos_token_id"),
        TABLE_ROWS: keys.rows("per_layer_token_embd.weight"),
    }


def parts(keys: GgufKeys) -> dict[str, DerivedTensor]:
    table = f"model.layers.{_layer(keys)}.{EMBEDDING}ngram_embedding.weight"
    norms = {name: DerivedTensor(name, numbers="x - 1") for name in NORMS}
    return qwen35_parts(keys) | norms | {table: DerivedTensor("model.ngram_table.weight")}


def wholes(keys: GgufKeys) -> dict[str, list[int]]:
    front = f"model.layers.{_layer(keys)}.{EMBEDDING}"
    return {front + ours: keys.wholes(f"ple.{theirs}") for ours, theirs in WHOLES.items()}


def _layer(keys: GgufKeys) -> int:
    """Whose table the file has, from 0."""
    layers = keys.wholes("ple.layers")
    if len(layers) != 1:
        raise keys.refuse("ple.layers", f"names {len(layers)} layers, but a file has one table of n-grams")
    return layers[0]


QWEN4_EXP = Gguf("qwen4exp", config, STEMS, parts, wholes=wholes)
