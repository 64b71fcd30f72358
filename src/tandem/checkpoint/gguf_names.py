"""Tensor names of GGUF files → the Hugging Face names that `models/` asks for, by GGUF architecture.

A GGUF name is `blk.{layer}.{stem}.{weight or bias}`; a layer's experts are one 3-D tensor, which stands for one name
per expert here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.checkpoint.gguf_file import GGUFTensor

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
QWEN2_MOE = DECODER | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GLM4_MOE = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
DEEPSEEK2 = GLM4_MOE | {  # latent attention; newer files have kv_b in two, k_b transposed per head
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
LLAMA = DECODER | {  # without experts this is Llama, with them Mixtral
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
STEMS = {
    "deepseek2": DEEPSEEK2, "glm4moe": GLM4_MOE, "llama": LLAMA, "olmoe": DECODER, "qwen2moe": QWEN2_MOE,
    "qwen3moe": DECODER,
}  # fmt: skip
PLAIN = ("mlp.gate.e_score_correction_bias",)  # Hugging Face names without `.weight` or `.bias`


class Place(NamedTuple):
    """Where a Hugging Face tensor is: a tensor of the file, or one expert of it."""

    tensor: GGUFTensor
    expert: int | None = None


def places(architecture: str, tensor: GGUFTensor) -> Iterator[tuple[str, Place]]:
    """The Hugging Face names that `tensor` stands for; none for one that no model of ours reads."""
    stem, _, ending = tensor.name.rpartition(".")
    if stem in OUTER:
        yield f"{OUTER[stem]}.{ending}", Place(tensor)
        return
    layer, name = layer_of(tensor), STEMS[architecture].get(stem.rpartition(".")[2])
    if layer is None or name is None:
        return
    full = f"model.layers.{layer}.{name}"
    if name in PLAIN:
        yield full, Place(tensor)
    elif "{expert}" in name:
        for expert in range(tensor.shape[0]):
            yield full.format(expert=expert) + f".{ending}", Place(tensor, expert)
    else:
        yield f"{full}.{ending}", Place(tensor)


def holds_experts(tensor: GGUFTensor) -> bool:
    """Whether it has a layer's routed experts."""
    return "_exps." in tensor.name


def layer_of(tensor: GGUFTensor) -> int | None:
    """The number of its layer; None for what belongs to none."""
    block, _, rest = tensor.name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if block == "blk" and number.isdecimal() else None
