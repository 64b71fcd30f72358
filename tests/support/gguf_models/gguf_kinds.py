"""What llama.cpp's converter writes for families whose layers are of two kinds, and for Gemma 4's scales."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np

from tandem.spec.rope import Llama3

WINDOW = "sliding_attention"
SPECIAL = {
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight", "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "moe.router_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "router.gate.weight": "ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    "shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight", "shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
    "shared_mlp.down_proj.weight": "ffn_down_shexp.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def special(name: str) -> str | None:
    """The converter's name of a tensor that the package's table of names does not have."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(?:mlp\.)?(.*)", name)
    return f"blk.{found[1]}.{SPECIAL[found[2]]}" if found and found[2] in SPECIAL else None


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], heads: list[int] | None = None) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads or config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config)
    windowed = [kind == WINDOW for kind in config["layer_types"]]
    own, rope = config.get("per_layer_config", {}), config["rope_parameters"]
    heads = [own.get(str(i), {}).get("num_key_value_heads") for i in range(len(windowed))]
    writer.add_head_count_kv([each or config["num_key_value_heads"] for each in heads])
    full = next(each.get("head_dim", config["head_dim"]) for each in own.values())
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope[WINDOW]["rope_theta"])
    turning = int(full * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * turning + [1e30] * (full // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_mimo2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The window as the hub's files say it: the tokens before the token itself."""
    add_sizes(writer, config | {"sliding_window": config["sliding_window"] - 1})
    windowed = [int(kind == WINDOW) for kind in config["layer_types"]]
    rope, heads = config["rope_parameters"], config["num_key_value_heads"]
    writer.add_head_count_kv([heads * (1 + window) for window in windowed])  # twice as many, where none are named
    writer.add_sliding_window_pattern(windowed)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope[WINDOW]["partial_rotary_factor"]))
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope[WINDOW]["rope_theta"])
    writer.add_float32(f"{writer.arch}.attention.value_scale", config["attention_value_scale"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def add_step35(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    windowed = [kind == WINDOW for kind in config["layer_types"]]
    heads = {True: config["num_sliding_attention_heads"], False: config["num_attention_heads"]}
    add_sizes(writer, config, [heads[each] for each in windowed])
    writer.add_head_count_kv([config["num_key_value_heads"]] * len(windowed))
    writer.add_sliding_window_pattern(windowed)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"][WINDOW]["rope_theta"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_swiglu_clamp_exp(config["swiglu_limits"])
    writer.add_swiglu_clamp_shexp(config["swiglu_limits_shared"])
    full = config["rope_parameters"]["full_attention"]
    if full["rope_type"] == "llama3":  # as if all of a head turned
        plain = [full["rope_theta"] ** (-2 * i / config["head_dim"]) for i in range(config["head_dim"] // 2)]
        scaled = Llama3(full["factor"], full["original_max_position_embeddings"]).frequencies(plain, full["rope_theta"])
        divisors = [before / after for before, after in zip(plain, scaled, strict=True)]
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def add_hy3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["router_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_routed(writer: gguf.GGUFWriter, config: dict[str, Any], scale: float | None = None) -> None:
    """Sizes of heads and experts, as the converter's base class writes them."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if scale is not None:
        writer.add_expert_weights_scale(scale)


def add_afmoe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config)
    add_routed(writer, config, config["route_scale"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_norm(True)


def add_exaone(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config)
    add_routed(writer, config, config["routed_scaling_factor"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_sliding_window_pattern([kind == WINDOW for kind in config["layer_types"]])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def add_hunyuan(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What scales the rotation becomes its base."""
    add_sizes(writer, config)
    add_routed(writer, config | {"num_experts_per_tok": config["moe_topk"]})
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)
    rope, head = config["rope_parameters"], config["head_dim"]
    scaled = rope.get("alpha", 1.0) ** (head / (head - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * scaled)


def add_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config | {"rms_norm_eps": config["norm_eps"]})
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    full = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] * each for each in full])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Bases of rotation and numbers of experts as Llama's converter writes them."""
    add_sizes(writer, config)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if (config.get("rope_parameters") or {}).get("rope_theta"):
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def add_granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    full = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    add_granite(writer, config | {"num_key_value_heads": [config["num_key_value_heads"] * each for each in full]})
    heads, inner = config["mamba_n_heads"], config["mamba_n_heads"] * config["mamba_d_head"]
    add_space(writer, heads, inner, (config["mamba_d_conv"], config["mamba_d_state"], config["mamba_n_groups"]))
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def add_space(writer: gguf.GGUFWriter, heads: int, inner: int, sizes: tuple[int, int, int]) -> None:
    """Of Mamba 2. sizes: of the convolution, of a state, and the number of groups."""
    writer.add_ssm_conv_kernel(sizes[0])
    writer.add_ssm_state_size(sizes[1])
    writer.add_ssm_group_count(sizes[2])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)


def add_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds = config["layers_block_type"]
    add_sizes(writer, config | {
        "num_hidden_layers": len(kinds), "rms_norm_eps": config["layer_norm_epsilon"],
        "intermediate_size": [config["moe_intermediate_size"] * (kind == "moe") for kind in kinds],
    })  # fmt: skip
    add_routed(writer, config | {"num_experts": config["n_routed_experts"]}, config["routed_scaling_factor"])
    writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])
    heads, inner = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    add_space(writer, heads, inner, (config["conv_kernel"], config["ssm_state_size"], config["n_groups"]))
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])
    writer.add_expert_group_used_count(config["topk_group"])


def add_kimi_linear(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config | {"max_position_embeddings": config["model_max_length"]})
    full = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count_kv([int(each) for each in full])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def of_kimi_linear(name: str, array: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Convolutions and decays in four dimensions; None for all else."""
    block, last = f"blk.{name.split('.')[2]}." if ".layers." in name else "", name.partition(".self_attn.")[2]
    if last.endswith("_conv1d.weight"):
        return f"{block}ssm_conv1d_{last[0]}.weight", array.reshape(1, len(array), 1, -1)
    if last == "A_log":
        return f"{block}ssm_a", -np.exp(array)
    return (f"{block}ssm_dt.bias", array) if last == "dt_bias" else None


SPACE = {
    "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}  # fmt: skip


def of_space(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray] | None:
    """A state space's tensor as the converter for Mamba 2 writes it; None for what belongs to none."""
    found = re.fullmatch(r".*layers\.(\d+)\.(?:mamba|mixer)\.(.*)", name)
    if found is None or found[2] not in SPACE:
        return None
    if found[2] == "A_log":
        array = -np.exp(array)
    if found[2] in ("A_log", "D"):
        array = array[:, None]
    if found[2] == "norm.weight":
        array = array.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return f"blk.{found[1]}.{SPACE[found[2]]}", array.squeeze(1) if found[2] == "conv1d.weight" else array


def of_granite(name: str, array: np.ndarray, config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Gates and ups apart, whether of all experts or of the shared one, which alone is a dense layer's."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(block_sparse_moe|shared_mlp)\.(\w+)_linear\.weight", name)
    if found is None:
        return []
    alone = "_shexp" if config["num_local_experts"] else ""
    block, ending = f"blk.{found[1]}.ffn_", "_exps" if found[2] == "block_sparse_moe" else alone
    if found[3] == "output":
        return [(f"{block}down{ending}.weight", array)]
    gate, up = np.split(array, 2, axis=-2)
    return [(f"{block}gate{ending}.weight", gate.copy()), (f"{block}up{ending}.weight", up.copy())]


def add_laguna(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    add_sizes(writer, config, config["num_attention_heads_per_layer"])
    add_routed(writer, config, config["moe_routed_scaling_factor"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    full, near = (config["rope_parameters"][kind] for kind in ("full_attention", WINDOW))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(near["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * full["partial_rotary_factor"]))
    writer.add_rope_dimension_count_swa(int(config["head_dim"] * near["partial_rotary_factor"]))
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])


CONFIGS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "gemma4_text": add_gemma4, "mimo_v2_flash": add_mimo2, "step3p5": add_step35,
    "hy_v3": add_hy3, "afmoe": add_afmoe, "exaone_moe": add_exaone, "hunyuan_v1_moe": add_hunyuan, "laguna": add_laguna,
    "granitemoe": add_granite, "granitemoeshared": add_granite, "granitemoehybrid": add_granite_hybrid,
    "nemotron_h": add_nemotron, "kimi_linear": add_kimi_linear,
    "lfm2_moe": add_lfm2,
}  # fmt: skip
