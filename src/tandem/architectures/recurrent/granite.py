"""Granite 3 and 4: what it multiplies embedded tokens, results of blocks, scores and logits with; state spaces in most
layers of Granite 4.0-H, whose attention does not turn.

A residual whose blocks' results are multiplied with m is m times one whose results are added as they are, and which
begins with embedded tokens divided by m. Norms do not see the difference, but for what they add to a square, which m
squared divides.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tandem.architectures.family import DerivedTensor, Family, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER, ExpertNames, Names, Renames
from tandem.architectures.shared import (
    FULL,
    activation,
    assembled,
    check_convolutions,
    epsilon,
    gqa,
    layer_count,
    layer_kinds,
    moe,
    softmax_router,
)
from tandem.errors import ConfigError
from tandem.mechanisms.dense.shape import Dense
from tandem.mechanisms.experts.shape import Moe
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.spec.json_keys import JsonKeys
from tandem.spec.layers import Mixer, pre_norm
from tandem.spec.model_config import ModelConfig
from tandem.spec.norm import Norm
from tandem.spec.rope import still

ATTENTION, RECURRENT = ("attention", FULL), ("mamba", "linear_attention")
"""The hub's word and Transformers'."""

UNLIMITED = [0.0, math.inf], [0.0, {"__float__": "Infinity"}], (0.0, math.inf)
"""Time steps, as JSON has them."""

NAMES = Names(
    recurrent="mamba", dense="shared_mlp", router="block_sparse_moe.router", shared="shared_mlp",
    experts=ExpertNames(
        "block_sparse_moe.experts.{expert}.{matrix}", gate_up="block_sparse_moe.experts.gate_up_proj",
        down="block_sparse_moe.experts.down_proj",
    ),
)  # fmt: skip
RENAMES = Renames(
    {
        ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
        ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
        ".shared_mlp.input_linear.": ".shared_mlp.gate_up_proj.",
        ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
    },
    signs=(".block_sparse_moe.input_linear.", ".shared_mlp.input_linear."),
    relatives=(".self_attn.sinks",),  # Transformers' own code runs those, and knows their names
)  # fmt: skip


def plain(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    return _model(keys, generation, [_attention(keys)] * layer_count(keys))


def hybrid(keys: JsonKeys, generation: JsonKeys) -> ModelConfig:
    keys.only("normalization_function", "rmsnorm", "Granite's")
    kinds = layer_kinds(keys, lambda i: RECURRENT[1])
    if unknown := sorted(set(kinds) - {*ATTENTION, *RECURRENT}):
        raise ConfigError(f"{keys.where}: layer type {unknown[0]!r} is not supported; attention and mamba are")
    attention, turns = _attention(keys), keys.get("position_embedding_type") == "rope"
    if not turns:
        attention = replace(attention, rope=still(attention.head_dim))
    if not set(kinds) & set(ATTENTION):
        raise ConfigError(f"{keys.where}: layer_types has no attention")
    space = _space(keys) if set(kinds) & set(RECURRENT) else None
    if space is not None:
        check_convolutions(keys)
    return _model(keys, generation, [attention if kind in ATTENTION or space is None else space for kind in kinds])


def _attention(keys: JsonKeys) -> Gqa:
    bias = keys.optional("attention_bias", False)
    attention = gqa(keys, qkv_bias=bias, out_bias=bias)
    return replace(attention, factor=float(keys.optional("attention_multiplier", 1.0)))


def _space(keys: JsonKeys) -> StateSpace:
    check_time_steps(keys)
    heads, groups = keys.size("mamba_n_heads", 128), keys.count("mamba_n_groups", 1)
    inner = keys.count("mamba_expand", 2) * keys.size("hidden_size", 4096)
    head = inner // heads if keys.get("mamba_d_head") in (None, "auto") else keys.size("mamba_d_head", 64)
    if head * heads != inner or not inner or not groups or heads % groups:
        raise ConfigError(f"{keys.where}: {heads} heads of {head} in {groups} groups do not make {inner} channels")
    keys.get("mamba_chunk_size")
    return StateSpace(
        heads, head, groups, keys.size("mamba_d_state", 128), taps_of(keys, "mamba_d_conv"), Norm(epsilon(keys)),
        keys.optional("mamba_proj_bias", False), keys.optional("mamba_conv_bias", True),
    )  # fmt: skip


def check_time_steps(keys: JsonKeys) -> None:
    """Raises ConfigError where they have limits."""
    if keys.get("time_step_limit") not in (None, *UNLIMITED):
        raise ConfigError(f"{keys.where}: time_step_limit = {keys['time_step_limit']!r} is not supported; null is")


def taps_of(keys: JsonKeys, key: str) -> int:
    taps = keys.optional(key, 4)
    if not 2 <= taps <= 7:  # csrc/ops/recurrent/fold.cc has eight, of which a bias is one
        raise ConfigError(f"{keys.where}: {key} is {taps}, and must be 2 to 7; try 4")
    return taps


def _model(keys: JsonKeys, generation: JsonKeys, mixers: list[Mixer]) -> ModelConfig:
    scale = float(keys.optional("residual_multiplier", 1.0))
    embedding, logits = (float(keys.optional(what, 1.0)) for what in ("embedding_multiplier", "logits_scaling"))
    if not (scale > 0 and logits > 0):
        raise ConfigError(f"{keys.where}: residual_multiplier and logits_scaling must be above 0; try 1.0")
    norm, body = Norm(epsilon(keys) / scale**2), _feed_forward(keys)
    base = assembled(keys, generation, tuple(pre_norm(mixer, body, norm) for mixer in mixers), norm)
    return replace(base, embedding_scale=embedding / scale, logit_scale=1 / logits)


def _feed_forward(keys: JsonKeys) -> Moe | Dense:
    how, shared = activation(keys), keys.count("shared_intermediate_size", 0)
    if keys.get("num_local_experts") == 0:
        keys.get("num_experts_per_tok"), keys.get("intermediate_size")
        return Dense(keys.size("shared_intermediate_size", 1024), how)
    router = softmax_router(keys, "num_local_experts", True, "num_experts")
    return moe(router, keys.size("intermediate_size", 512), shared).activated_by(how)


def gguf_plain(keys: GgufKeys) -> dict[str, Any]:
    return _gguf_shared(keys) | {"model_type": "granitemoe"}


def gguf_hybrid(keys: GgufKeys) -> dict[str, Any]:
    """Layers without key heads are state spaces."""
    key_heads = keys.layers("attention.head_count_kv", keys.depth)
    heads, inner = keys.size("ssm.time_step_rank"), keys.need("ssm.inner_size")
    return _gguf_shared(keys) | {
        "model_type": "granitemoehybrid",
        "layer_types": [ATTENTION[0] if each else RECURRENT[0] for each in key_heads],
        "num_key_value_heads": max(key_heads),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", False) else None,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // keys.size("embedding_length"),
        "mamba_n_groups": keys.need("ssm.group_count"),
        "mamba_d_state": keys.need("ssm.state_size"),
        "mamba_d_conv": keys.need("ssm.conv_kernel"),
        "mamba_conv_bias": any(keys.has_tensor(f"blk.{i}.ssm_conv1d.bias") for i in range(len(key_heads))),
    }


def _gguf_shared(keys: GgufKeys) -> dict[str, Any]:
    experts, shared = keys.optional("expert_count", 0), keys.has_tensor("blk.0.ffn_gate_shexp.weight")
    ending = "ffn_gate_shexp.weight" if experts else "ffn_gate.weight"
    return {
        "attention_bias": keys.has_bias,
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.optional("expert_used_count", 0),
        "intermediate_size": keys.expert_width if experts else keys.need("feed_forward_length"),
        "shared_intermediate_size": keys.rows(ending) if shared or not experts else 0,
    }


def gguf_parts(_: GgufKeys) -> dict[str, DerivedTensor]:
    return {"mamba.A_log": DerivedTensor("mamba.A_log", numbers="log(-x)")}


SPACE_STEMS = {
    "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt_bias", "ssm_a": "A_log", "ssm_d": "D",
    "ssm_norm": "norm", "ssm_out": "out_proj",
}  # fmt: skip
"""Tensors of a state space, below its module."""
MATRICES = ("gate", "up", "down")
STEMS = (
    GGUF_DECODER
    | {f"ffn_{each}{end}": f"shared_mlp.{each}_proj" for each in MATRICES for end in ("", "_shexp")}
    | {f"ffn_{each}_exps": f"block_sparse_moe.experts.{{expert}}.{each}_proj" for each in MATRICES}
    | {"ffn_gate_inp": NAMES.router}
)
HYBRID_STEMS = STEMS | {stem: f"mamba.{name}" for stem, name in SPACE_STEMS.items()}

GRANITE = Gguf("granitemoe", gguf_plain, STEMS, pairs=True)
HYBRID = Gguf("granitehybrid", gguf_hybrid, HYBRID_STEMS, gguf_parts, pairs=True)

FAMILIES = (
    Family(("granitemoe", "granitemoeshared"), plain, (NAMES,), GRANITE, renames=RENAMES),
    Family(("granitemoehybrid",), hybrid, (NAMES,), HYBRID, renames=RENAMES),
)
