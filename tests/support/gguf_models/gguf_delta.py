"""What llama.cpp's converter does to gated delta nets: norms of 1 + w, -exp(A_log), heads in another order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

KINDS = ("qwen3_next", "qwen3_5_moe_text", "qwen4_exp_text")
TILED = KINDS[1:]
STEMS = {
    "in_proj_qkv": "attn_qkv.weight", "in_proj_z": "attn_gate.weight", "in_proj_b": "ssm_beta.weight",
    "in_proj_a": "ssm_alpha.weight", "in_proj_ba": "ssm_ba.weight", "in_proj_qkvz": "ssm_in.weight",
    "conv1d": "ssm_conv1d.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm.weight",
    "out_proj": "ssm_out.weight",
}  # fmt: skip


def of_delta(
    name: str, array: np.ndarray, config: dict[str, Any], legacy: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """legacy: with q, k, v and gate in one matrix, as files of Qwen3-Next had them at first."""
    layer, module = name.split(".")[2], name.partition("linear_attn.")[2].removesuffix(".weight")
    block = f"blk.{layer}."
    if module == "A_log":
        array = -np.exp(array)
    if module == "conv1d":
        array = array.squeeze(1)
    if module == "in_proj_qkvz" and not legacy:
        yield from apart(block, array, config)
        return
    if config["model_type"] in TILED:
        array = tiled(module, array, config)
    yield block + STEMS[module], np.ascontiguousarray(array)


def apart(block: str, array: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Parts of each key head in turn: q, k, the values and gates of its group."""
    k_heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // k_heads * config["linear_value_head_dim"]
    heads = array.reshape(k_heads, 2 * key + 2 * values, -1)
    q, k, v, z = np.split(heads, np.cumsum([key, key, values]), axis=1)
    hidden = array.shape[1]
    yield f"{block}attn_qkv.weight", np.concatenate([each.reshape(-1, hidden) for each in (q, k, v)])
    yield f"{block}attn_gate.weight", np.ascontiguousarray(z.reshape(-1, hidden))


def tiled(module: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Value heads: first the first of every group, then the second of every group, …"""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, width = 2 * k_heads * config["linear_key_head_dim"], config["linear_value_head_dim"]

    def turned(x: np.ndarray, each: int) -> np.ndarray:
        groups = x.reshape(k_heads, v_heads // k_heads, each, *x.shape[1:])
        return groups.swapaxes(0, 1).reshape(x.shape)

    if module in ("in_proj_qkv", "conv1d"):
        return np.concatenate([array[:keys], turned(array[keys:], width)])
    if module == "out_proj":
        return turned(array.T, width).T
    if module == "in_proj_z":
        return turned(array, width)
    return array if module == "norm" else turned(array, 1)


def add_delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] in TILED:
        writer.add_rope_dimension_sections([11, 11, 10, 0])
