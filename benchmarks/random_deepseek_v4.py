"""Writes a random checkpoint of DeepSeek-V4-Flash's layers in the hub's own names and formats: fp8 in blocks with
scales of powers of two, experts in MXFP4, tables of experts. It has fewer layers and experts, and a small vocabulary.

Example: python benchmarks/random_deepseek_v4.py OUT --layers 6 --experts 16      # 2 GB
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from random_deepseek import save_tokenizer

HIDDEN, WIDTH, HEADS, HEAD, VOCAB = 4096, 2048, 64, 512, 16384
Q_RANK, OUT_RANK, GROUPS, TOP_K = 1024, 1024, 8, 6
INDEX_HEADS, INDEX_HEAD, STREAMS = 64, 128, 4
BLOCK, GROUP = 128, 32
EXPONENT = 127  # of 1 in e8m0


class Pool:
    """Codes of one pool, cut at random; scales as a trained model of this size has them."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        numbers = torch.randn(48 << 20, generator=self.random).mul_(100)
        self.fp8 = numbers.clamp_(-448, 448).to(torch.float8_e4m3fn)
        self.fp4 = torch.randint(-128, 128, (16 << 20,), generator=self.random).to(torch.int8)

    def _cut(self, codes: Tensor, *shape: int) -> Tensor:
        size = shape[0] * shape[1]
        start = int(torch.randint(codes.numel() - size, (1,), generator=self.random))
        return codes[start : start + size].view(shape)

    def linear(self, name: str, n: int, k: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self._cut(self.fp8, n, k)
        yield f"{name}.scale", _powers(-(-n // BLOCK), -(-k // BLOCK), EXPONENT - 13)

    def expert(self, name: str, n: int, k: int) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self._cut(self.fp4, n, k // 2)
        yield f"{name}.scale", _powers(n, k // GROUP, EXPONENT - 7)

    def plain(
        self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[tuple[str, Tensor]]:
        yield name, torch.randn(shape, generator=self.random).mul_(0.02).to(dtype)

    def norm(self, name: str, width: int) -> Iterator[tuple[str, Tensor]]:
        numbers = torch.randn(width, generator=self.random).mul_(0.1).add_(1)
        yield f"{name}.weight", numbers.to(torch.bfloat16)


def _powers(rows: int, columns: int, exponent: int) -> Tensor:
    return torch.full((rows, columns), exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def pooled(pool: Pool, name: str, stride: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """What makes entries of `width` channels of every `stride` tokens."""
    rows = 2 * width if stride == 4 else width
    yield from pool.plain(f"{name}.wkv.weight", rows, HIDDEN)
    yield from pool.plain(f"{name}.wgate.weight", rows, HIDDEN)
    yield from pool.plain(f"{name}.ape", stride, rows, dtype=torch.float32)
    yield from pool.norm(f"{name}.norm", width)


def attention(pool: Pool, name: str, stride: int) -> Iterator[tuple[str, Tensor]]:
    yield from pool.linear(f"{name}.wq_a", Q_RANK, HIDDEN)
    yield from pool.norm(f"{name}.q_norm", Q_RANK)
    yield from pool.linear(f"{name}.wq_b", HEADS * HEAD, Q_RANK)
    yield from pool.linear(f"{name}.wkv", HEAD, HIDDEN)
    yield from pool.norm(f"{name}.kv_norm", HEAD)
    yield from pool.linear(f"{name}.wo_a", GROUPS * OUT_RANK, HEADS * HEAD // GROUPS)
    yield from pool.linear(f"{name}.wo_b", HIDDEN, GROUPS * OUT_RANK)
    yield f"{name}.attn_sink", torch.randn(HEADS, generator=pool.random)
    if stride:
        yield from pooled(pool, f"{name}.compressor", stride, HEAD)
    if stride == 4:
        yield from pooled(pool, f"{name}.indexer.compressor", stride, INDEX_HEAD)
        yield from pool.linear(f"{name}.indexer.wq_b", INDEX_HEADS * INDEX_HEAD, Q_RANK)
        yield from pool.plain(f"{name}.indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)


def experts(pool: Pool, name: str, count: int, hashed: bool) -> Iterator[tuple[str, Tensor]]:
    yield from pool.plain(f"{name}.gate.weight", count, HIDDEN)
    if hashed:
        choices = torch.rand(VOCAB, count, generator=pool.random).argsort(1)[:, :TOP_K]
        yield f"{name}.gate.tid2eid", choices.contiguous()
    else:
        yield f"{name}.gate.bias", torch.zeros(count)
    for matrix, n, k in (("w1", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH), ("w3", WIDTH, HIDDEN)):
        yield from pool.linear(f"{name}.shared_experts.{matrix}", n, k)
        for expert in range(count):
            yield from pool.expert(f"{name}.experts.{expert}.{matrix}", n, k)


def layer(pool: Pool, index: int, stride: int, count: int) -> Iterator[tuple[str, Tensor]]:
    name, width = f"layers.{index}", (2 + STREAMS) * STREAMS
    yield from pool.norm(f"{name}.attn_norm", HIDDEN)
    yield from pool.norm(f"{name}.ffn_norm", HIDDEN)
    for block in ("attn", "ffn"):
        yield from pool.plain(f"{name}.hc_{block}_fn", width, STREAMS * HIDDEN, dtype=torch.float32)
        yield f"{name}.hc_{block}_base", torch.zeros(width)
        yield f"{name}.hc_{block}_scale", torch.ones(3)
    yield from attention(pool, f"{name}.attn", stride)
    yield from experts(pool, f"{name}.ffn", count, hashed=index < 3)


def outer(pool: Pool) -> Iterator[tuple[str, Tensor]]:
    for name in ("embed", "head"):
        yield from pool.plain(f"{name}.weight", VOCAB, HIDDEN)
    yield from pool.norm("norm", HIDDEN)
    yield from pool.plain("hc_head_fn", STREAMS, STREAMS * HIDDEN, dtype=torch.float32)
    yield "hc_head_base", torch.zeros(STREAMS)
    yield "hc_head_scale", torch.ones(1)


def strides(layers: int) -> list[int]:
    """Flash's: two layers with a window alone, then 4 and 128 in turn."""
    return [0 if i < 2 else 4 if i % 2 == 0 else 128 for i in range(layers)]


def config(layers: int, count: int) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH, "num_hidden_layers": layers, "n_routed_experts": count, "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K, "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD,
        "q_lora_rank": Q_RANK, "qk_rope_head_dim": 64, "o_groups": GROUPS, "o_lora_rank": OUT_RANK,
        "sliding_window": 128, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_HEAD, "index_topk": 512,
        "hc_mult": STREAMS, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": 3, "swiglu_limit": 10.0,
        "compress_ratios": [*strides(layers), 0], "num_nextn_predict_layers": 1, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000, "max_position_embeddings": 1048576,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                         "beta_slow": 1},
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "expert_dtype": "fp4",
        "bos_token_id": 0, "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    pool, weight_map = Pool(asked.seed), {}

    def write(name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        held = {key: tensor.clone() for key, tensor in tensors}
        save_file(held, asked.out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, name))
        print(name, flush=True)

    write("outer.safetensors", outer(pool))
    for index, stride in enumerate(strides(asked.layers)):
        write(f"layer-{index:03}.safetensors", layer(pool, index, stride, asked.experts))
    index_json = {"metadata": {}, "weight_map": weight_map}
    (asked.out / "model.safetensors.index.json").write_text(json.dumps(index_json))
    save_tokenizer(asked.out)
    (asked.out / "config.json").write_text(json.dumps(config(asked.layers, asked.experts), indent=2))


if __name__ == "__main__":
    main()
