"""Writes a random fp8 checkpoint of DeepSeek-V3's shape (hidden 7168, experts of 2048), a large input for
`kt convert` and `kt quality`.

Example: python benchmarks/random_deepseek.py OUT --moe-layers 4 --experts 60      # 12 GB

Weights are gaussian, cut from one pool at random offsets, so that writing is as fast as the disk. Names, types and
config.json are DeepSeek-V3's; the vocabulary and the numbers of layers and experts are smaller.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

HIDDEN, WIDTH, DENSE_WIDTH, HEADS, VOCAB = 7168, 2048, 18432, 128, 16384
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 1536, 512, 128, 64, 128
BLOCK = 128


class Pool:
    """Gaussian weights in fp8, and scales as a trained model of this size has them."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        numbers = torch.randn(128 << 20, generator=self.random).mul_(100)
        self.codes = numbers.clamp_(-448, 448).to(torch.float8_e4m3fn)

    def linear(self, name: str, n: int, k: int) -> Iterator[tuple[str, Tensor]]:
        start = int(torch.randint(self.codes.numel() - n * k, (1,), generator=self.random))
        yield f"{name}.weight", self.codes[start : start + n * k].view(n, k)
        blocks = -(-n // BLOCK), -(-k // BLOCK)
        yield f"{name}.weight_scale_inv", torch.rand(blocks, generator=self.random).mul_(1e-4).add_(1e-4)

    def plain(
        self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", torch.randn(shape, generator=self.random).mul_(0.02).to(dtype)

    def norm(self, name: str, width: int) -> Iterator[tuple[str, Tensor]]:
        """Around 1, so that hidden states have the size they have in a trained model."""
        numbers = torch.randn(width, generator=self.random).mul_(0.1).add_(1)
        yield f"{name}.weight", numbers.to(torch.bfloat16)


def attention(pool: Pool, name: str) -> Iterator[tuple[str, Tensor]]:
    yield from pool.linear(f"{name}.q_a_proj", Q_RANK, HIDDEN)
    yield from pool.linear(f"{name}.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
    yield from pool.linear(f"{name}.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN)
    yield from pool.linear(f"{name}.kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK)
    yield from pool.linear(f"{name}.o_proj", HIDDEN, HEADS * VALUE)
    yield from pool.norm(f"{name}.q_a_layernorm", Q_RANK)
    yield from pool.norm(f"{name}.kv_a_layernorm", KV_RANK)


def mlp(pool: Pool, name: str, width: int) -> Iterator[tuple[str, Tensor]]:
    yield from pool.linear(f"{name}.gate_proj", width, HIDDEN)
    yield from pool.linear(f"{name}.up_proj", width, HIDDEN)
    yield from pool.linear(f"{name}.down_proj", HIDDEN, width)


def layer(pool: Pool, index: int, experts: int) -> Iterator[tuple[str, Tensor]]:
    """Layer 0 is dense, the others have `experts` experts and a shared one."""
    name = f"model.layers.{index}"
    yield from attention(pool, f"{name}.self_attn")
    yield from pool.norm(f"{name}.input_layernorm", HIDDEN)
    yield from pool.norm(f"{name}.post_attention_layernorm", HIDDEN)
    if index == 0:
        yield from mlp(pool, f"{name}.mlp", DENSE_WIDTH)
        return
    yield from pool.plain(f"{name}.mlp.gate", experts, HIDDEN)
    yield f"{name}.mlp.gate.e_score_correction_bias", torch.zeros(experts)
    yield from mlp(pool, f"{name}.mlp.shared_experts", WIDTH)
    for expert in range(experts):
        yield from mlp(pool, f"{name}.mlp.experts.{expert}", WIDTH)


def config(layers: int, experts: int) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH, "intermediate_size": DENSE_WIDTH, "num_hidden_layers": layers,
        "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        },
    }  # fmt: skip


def save_tokenizer(out: Path) -> None:
    """One token per byte, for `kt quality`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(out / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--moe-layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    pool, weight_map = Pool(asked.seed), {}

    def write(name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        held = {key: tensor.clone() for key, tensor in tensors}
        save_file(held, asked.out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, name))
        print(name, flush=True)

    outer = [*pool.plain("model.embed_tokens", VOCAB, HIDDEN), *pool.plain("lm_head", VOCAB, HIDDEN)]
    write("outer.safetensors", iter([*outer, *pool.norm("model.norm", HIDDEN)]))
    for index in range(asked.moe_layers + 1):
        write(f"layer-{index:03}.safetensors", layer(pool, index, asked.experts))
    index_json = {"metadata": {}, "weight_map": weight_map}
    (asked.out / "model.safetensors.index.json").write_text(json.dumps(index_json))
    save_tokenizer(asked.out)
    (asked.out / "config.json").write_text(json.dumps(config(asked.moe_layers + 1, asked.experts), indent=2))


if __name__ == "__main__":
    main()
