"""Qwen3-Next and Qwen3.5 in GGUF files: llama.cpp's converter puts heads, norms and decays otherwise.

A norm's file has 1 + w, `ssm_a` is -exp(A_log). Qwen3.5's value heads lie by their number within a group, then by the
group's key head, while Hugging Face has groups together.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from tandem.architectures.family import DerivedTensor, Gguf, GgufKeys
from tandem.architectures.names import GGUF_DECODER
from tandem.architectures.qwen2_moe import gguf_experts

APART = "linear_projections_apart"
"""A key of no config.json: q, k, v in one matrix, the gate in another, instead of one for each key head in turn."""

STEMS = GGUF_DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
NORMS = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    "model.norm.weight",
)  # fmt: skip


def qwen3_next_config(keys: GgufKeys) -> dict[str, Any]:
    legacy = {"model_type": "qwen3_next", APART: not _has_whole_projections(keys)}
    return hybrid_config(keys) | legacy | {"norm_topk_prob": True, "num_nextn_predict_layers": 0}


def qwen35_config(keys: GgufKeys) -> dict[str, Any]:
    return hybrid_config(keys) | {"model_type": "qwen3_5_moe_text"}


def qwen3_next_parts(keys: GgufKeys) -> dict[str, DerivedTensor]:
    """Files from before 2026 have `ssm_in`, which is Hugging Face's matrix; newer ones, only the gates' is."""
    if _has_whole_projections(keys):
        return _plain_parts()
    k_heads, group = _heads(keys)
    _check_rows(keys, "ssm_ba.weight", 2 * k_heads * group)
    starts = [2 * group * head for head in range(k_heads)]
    b, a = ([start + first + i for start in starts for i in range(group)] for first in (0, group))
    both = "linear_attn.in_proj_ba.weight"
    cut = {
        "linear_attn.in_proj_b.weight": DerivedTensor(both, tuple(b)),
        "linear_attn.in_proj_a.weight": DerivedTensor(both, tuple(a)),
    }
    return _plain_parts() | cut


def qwen35_parts(keys: GgufKeys) -> dict[str, DerivedTensor]:
    k_heads, group = _heads(keys)
    if group == 1:
        return _plain_parts()
    width = keys.need("ssm.inner_size") // (k_heads * group)
    before = 2 * k_heads * keys.need("ssm.state_size")  # channels of q and k
    _check_rows(keys, "attn_qkv.weight", before + width * k_heads * group)
    heads = tuple(within * k_heads + head for head in range(k_heads) for within in range(group))
    values = tuple(chain.from_iterable(range(head * width, (head + 1) * width) for head in heads))
    channels = (*range(before), *(before + value for value in values))
    turned = {
        "in_proj_qkv.weight": DerivedTensor("", channels), "conv1d.weight": DerivedTensor("", channels),
        "in_proj_z.weight": DerivedTensor("", values), "in_proj_b.weight": DerivedTensor("", heads),
        "in_proj_a.weight": DerivedTensor("", heads),
        "dt_bias": DerivedTensor("", heads), "A_log": DerivedTensor("", heads, numbers="log(-x)"),
        "out_proj.weight": DerivedTensor("", columns=values),
    }  # fmt: skip
    return _plain_parts() | {
        (name := f"linear_attn.{module}"): DerivedTensor(name, part.rows, part.columns, part.numbers)
        for module, part in turned.items()
    }


def _check_rows(keys: GgufKeys, matrix: str, rows: int) -> None:
    """Before a list of them is made."""
    if keys.rows(matrix) != rows:
        raise keys.refuse("ssm.time_step_rank", f"implies {rows} rows of {matrix}, which has {keys.rows(matrix)}")


def _plain_parts() -> dict[str, DerivedTensor]:
    norms = {name: DerivedTensor(name, numbers="x - 1") for name in NORMS}
    return norms | {"linear_attn.A_log": DerivedTensor("linear_attn.A_log", numbers="log(-x)")}


def _has_whole_projections(keys: GgufKeys) -> bool:
    return keys.has_tensor("blk.0.ssm_in.weight")


def _heads(keys: GgufKeys) -> tuple[int, int]:
    """Key heads, and value heads of each."""
    k_heads, v_heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    if k_heads < 1 or v_heads % k_heads:
        raise keys.refuse("ssm.group_count", f"{k_heads} does not divide {v_heads} value heads")
    return k_heads, v_heads // k_heads


def hybrid_config(keys: GgufKeys) -> dict[str, Any]:
    head, v_heads = keys.size("attention.key_length"), keys.size("ssm.time_step_rank")
    if keys.need("ssm.inner_size") % v_heads:
        raise keys.refuse("ssm.inner_size", f"is not a multiple of {v_heads} value heads")
    return gguf_experts(keys) | {
        "moe_intermediate_size": keys.expert_width,
        "shared_expert_intermediate_size": keys.rows("ffn_gate_shexp.weight"),
        "partial_rotary_factor": keys.optional("rope.dimension_count", head) / head,
        "layer_types": _layer_types(keys),
        "num_key_value_heads": _key_heads(keys),
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // v_heads,
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": v_heads,
    }


def _key_heads(keys: GgufKeys) -> int:
    """Key heads of layers with attention; Ollama's converter lists all layers, and writes 0 for the others."""
    counts = set(keys.layers("attention.head_count_kv", keys.depth)) - {0}
    if len(counts) != 1:
        raise keys.refuse("attention.head_count_kv", "differs between layers, which is not supported")
    return counts.pop()


def _layer_types(keys: GgufKeys) -> list[str]:
    """As listed, or those without key heads, or every so many layers attention."""
    layers = keys.depth
    every = keys.optional("full_attention_interval", 4)
    heads = keys.layers("attention.head_count_kv", layers)
    listed = keys.flags("attention.recurrent_layers") or [not count for count in heads if 0 in heads]
    recurrent = listed or [bool((i + 1) % max(every, 1)) for i in range(layers)]
    if len(recurrent) < layers:
        raise keys.refuse("attention.recurrent_layers", f"has {len(recurrent)} values for {layers} layers")
    return ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]


QWEN3_NEXT = Gguf("qwen3next", qwen3_next_config, STEMS, qwen3_next_parts)
QWEN35 = Gguf("qwen35moe", qwen35_config, STEMS, qwen35_parts)
