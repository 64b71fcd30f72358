"""Tiny random models of families that run through Transformers' modules."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from reference_config import reference_config
from tiny import BOS, EOS, VOCAB, save_tokenizer, settings

COMMON = settings(
    vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, max_position_embeddings=128, num_experts_per_tok=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=44, moe_intermediate_size=20,
    bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.15,
)  # fmt: skip

# model type: what differs from COMMON
PAGED: dict[str, dict[str, object]] = {
    "flex_olmo": settings(num_experts=6),
    "granitemoe_swa": settings(num_local_experts=6, sliding_window=7, shared_intermediate_size=24),
    "phimoe": settings(num_local_experts=6, num_experts_per_tok=2),
    "mellum": settings(num_experts=6, sliding_window=7),
    "kolibri1": settings(num_experts=6),
    "cohere2_moe": settings(num_experts=6, num_shared_experts=1, sliding_window=7),
    "flint": settings(num_experts=6),
    "axk1": settings(n_routed_experts=6, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
                     kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
                     num_key_value_heads=4, head_dim=8),
    "aria_text": settings(moe_num_experts=6, moe_topk=2, moe_num_shared_experts=1),
}  # fmt: skip

# likewise: families with a state that pages do not hold
ALONE: dict[str, dict[str, object]] = {
    "jamba": settings(num_experts=6, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
                      expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=6,
                      use_mamba_kernels=False, num_hidden_layers=4),
    "zaya": settings(num_experts=6, num_experts_per_tok=1),
    "hy_v4": settings(num_experts=6),
    "minimax": settings(num_local_experts=6, block_size=8,
                        layer_types=["linear_attention", "full_attention", "linear_attention"]),
}  # fmt: skip
FOREIGN = PAGED | ALONE


class ForeignModels:
    """Model directories by model type, saved on first use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getitem__(self, model_type: str) -> Path:
        path = self._directory / model_type
        if not path.exists():
            save_foreign(model_type, path)
        return path


def save_foreign(model_type: str, path: Path) -> None:
    torch.manual_seed(sum(map(ord, model_type)))
    config = reference_config(model_type, **(COMMON | FOREIGN[model_type]))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.state_dict().items()]:
            if tensor.is_floating_point() and ("norm" in name or "bias" in name or "sink" in name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(torch.bfloat16).float().save_pretrained(path)
    save_tokenizer(path)
