"""Writes a random bf16 checkpoint of Qwen3-30B-A3B's layers, and its vocabulary's size, for measurements of an engine.

Example: python benchmarks/random_qwen3.py OUT --layers 24 --experts 16      # 5 GB

An expert is read by as many tokens as in the real model; there are only fewer of them. The vocabulary is made up: all
bytes, then words of two to four letters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, VOCAB, TOP_K = 2048, 768, 32, 4, 128, 151_936, 8
LETTERS = string.ascii_lowercase


def weight(*shape: int) -> Tensor:
    return torch.empty(shape).normal_(0, 0.02).to(torch.bfloat16)


def layer(name: str, experts: int) -> Iterator[tuple[str, Tensor]]:
    for norm, width in (
        ("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN), ("self_attn.q_norm", HEAD),
        ("self_attn.k_norm", HEAD),
    ):  # fmt: skip
        yield f"{name}.{norm}.weight", torch.ones(width, dtype=torch.bfloat16)
    for matrix, out in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
        yield f"{name}.self_attn.{matrix}.weight", weight(out * HEAD, HIDDEN)
    yield f"{name}.self_attn.o_proj.weight", weight(HIDDEN, HEADS * HEAD)
    yield f"{name}.mlp.gate.weight", weight(experts, HIDDEN)
    for expert in range(experts):
        for matrix in ("gate_proj", "up_proj"):
            yield f"{name}.mlp.experts.{expert}.{matrix}.weight", weight(WIDTH, HIDDEN)
        yield f"{name}.mlp.experts.{expert}.down_proj.weight", weight(HIDDEN, WIDTH)


def words() -> Iterator[tuple[str, str]]:
    """Pairs that merge into words of two, three and four letters, each pair made of words before it."""
    twos = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
    yield from itertools.product(LETTERS, repeat=2)
    yield from itertools.product(twos, LETTERS)
    yield from itertools.product(twos, twos)


def tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(words(), VOCAB - 2 - len(letters)))
    tokens = [*letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>"])
    return made


def documents(layers: int, experts: int) -> dict[str, dict[str, object]]:
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": HIDDEN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "num_experts": experts, "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDTH,
        "intermediate_size": 3 * HIDDEN, "norm_topk_prob": True, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 2,
    }  # fmt: skip
    return {
        "config.json": config,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"},
    }


def write(folder: Path, layers: int, experts: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in documents(layers, experts).items():
        (folder / name).write_text(json.dumps(content, indent=1))
    tokenizer().save(str(folder / "tokenizer.json"))
    ends = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "lm_head.weight": weight(VOCAB, HIDDEN)}
    ends["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    parts = [ends, *(dict(layer(f"model.layers.{i}", experts)) for i in range(layers))]
    where: dict[str, str] = {}
    for i, tensors in enumerate(parts):
        file = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=16)
    options = parser.parse_args()
    write(options.folder, options.layers, options.experts)


if __name__ == "__main__":
    main()
