"""Writes a random checkpoint with a real model's layers, in the hub's own names and formats: a large input for `kt`.

Examples: python benchmarks/random_model.py qwen3-next-80b OUT --layers 12 --experts 64
          python benchmarks/random_model.py --list

Sizes of layers and experts are the model's own. Cut are the numbers of layers, of dense ones among them (to one), of
experts, of their groups (to one), and the vocabulary, which is made up: all bytes, then words of two to four letters.
Weights are cut from one pool at random offsets, so that writing is as fast as the disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import string
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from hub_models import HUB, HubModel

Config = dict[str, Any]
Named = Iterator[tuple[str, Tensor]]

EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
PER_LAYER = (
    "layer_types", "mlp_layer_types", "indexer_types", "attn_type_list", "hybrid_layer_pattern", "moe_layer_freq",
    "num_attention_heads_per_layer", "compress_ratios",
)  # fmt: skip
BLOCK, GROUP = 128, 32
ONE = 127  # the exponent of 1 in e8m0
DEVIATION = 0.02
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def text_of(config: Config) -> Config:
    found: Config = config.get("text_config", config)
    return found


def cut(hub: HubModel, layers: int, experts: int, vocab: int) -> Config:
    """The hub's config.json with fewer layers and experts, and another vocabulary."""
    config: Config = json.loads(json.dumps(hub.config))
    text = text_of(config)
    for key in PER_LAYER:
        if isinstance(text.get(key), list):
            text[key] = text[key][:layers]
    text["num_hidden_layers"], text["vocab_size"] = layers, vocab
    text[expert_key(text)] = min(experts, text[expert_key(text)])
    text |= {key: 1 for key in ("n_group", "topk_group", "first_k_dense_replace") if key in text}
    text["bos_token_id"], text["eos_token_id"] = vocab - 2, vocab - 1
    return config


def expert_key(text: Config) -> str:
    return next(key for key in EXPERT_COUNTS if text.get(key))


def shapes(hub: HubModel, config: Config) -> dict[str, Tensor]:
    """Tensors without data by the hub's names."""
    text = {key: value for key, value in text_of(config).items() if key != "quantization_config"}
    text |= hub.made | ({"model_type": hub.text} if hub.text else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(text))
        made = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    held = model.state_dict()
    if text.get("tie_word_embeddings"):
        held.pop("lm_head.weight", None)
    found = held if hub.fused else revert_weight_conversion(model, held)
    return {renamed(name, hub): tensor for name, tensor in found.items()}


def renamed(name: str, hub: HubModel) -> str:
    for old, new in hub.renames:
        name = name.replace(old, new, 1) if old else new + name
    return name


class Pool:
    """Random numbers of which tensors are cut, and codes of them."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        numbers = torch.randn(48 << 20, generator=self.random)
        self.numbers = (numbers * DEVIATION).to(torch.bfloat16)
        self.fp8 = numbers.mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        self.bytes = torch.randint(0, 256, (16 << 20,), generator=self.random, dtype=torch.uint8)

    def cut(self, pool: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if size >= len(pool):
            pool = pool.repeat(size // len(pool) + 1)
        start = int(torch.randint(len(pool) - size, (1,), generator=self.random))
        return pool[start : start + size].view(shape)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)


def plain(pool: Pool, name: str, like: Tensor) -> Named:
    """A tensor that no format stores as codes."""
    shape = tuple(like.shape)
    if name.endswith("A_log"):
        yield name, (pool.uniform(*shape) * 15 + 1).log().to(torch.bfloat16)
    elif ("norm" in name and name.endswith("weight")) or name.endswith(("scale", "scalar")):
        yield name, (pool.normal(*shape) * 0.1 + 1).to(torch.bfloat16)
    elif "bias" in name and ("score" in name or "expert" in name or name.endswith("gate.bias")):
        yield name, torch.zeros(shape)
    elif any(part in name for part in ("hc_", "attn_sink", ".ape")):
        yield name, pool.normal(*shape) * DEVIATION
    else:
        yield name, pool.cut(pool.numbers, *shape)


def fp8(pool: Pool, name: str, like: Tensor) -> Named:
    n, k = like.shape
    yield name, pool.cut(pool.fp8, n, k)
    yield f"{name}_scale_inv", pool.uniform(-(-n // BLOCK), -(-k // BLOCK)) * 1e-4 + 1e-4


def fp8_channels(pool: Pool, name: str, like: Tensor) -> Named:
    yield name, pool.cut(pool.fp8, *like.shape)
    yield f"{name}_scale", (pool.uniform(like.shape[0], 1) * 1e-4 + 1e-4).to(torch.bfloat16)


def int4(pool: Pool, name: str, like: Tensor) -> Named:
    n, k = like.shape
    yield f"{name}_packed", pool.cut(pool.bytes, n, k // 2).contiguous().clone().view(torch.int32)
    yield f"{name}_scale", (pool.uniform(n, k // GROUP) * 2e-3 + 4e-3).to(torch.bfloat16)
    yield f"{name}_shape", torch.tensor([n, k], dtype=torch.int32)


def mxfp4(pool: Pool, name: str, like: Tensor) -> Named:
    """Codes of all experts [E, K, N], as gpt-oss stores them."""
    count, k, n = like.shape
    yield f"{name}_blocks", pool.cut(pool.bytes, count, n, k // GROUP, GROUP // 2)
    yield f"{name}_scales", torch.full((count, n, k // GROUP), ONE - 7, dtype=torch.uint8)


def deepseek_v4(pool: Pool, name: str, like: Tensor) -> Named:
    n, k = like.shape
    scale = name.replace(".weight", ".scale")
    if ".experts." in name:
        yield name, pool.cut(pool.bytes, n, k // 2).view(torch.int8)
        yield scale, powers(ONE - 7, n, k // GROUP)
    else:
        yield name, pool.cut(pool.fp8, n, k)
        yield scale, powers(ONE - 13, -(-n // BLOCK), -(-k // BLOCK))


def powers(exponent: int, *shape: int) -> Tensor:
    return torch.full(shape, exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def is_matrix(name: str, like: Tensor) -> bool:
    return like.dim() == 2 and name.endswith(".weight")


Write = Callable[[Pool, str, Tensor], Named]
FORMATS: dict[str, tuple[Write, Callable[[str, Tensor], bool]]] = {
    "bf16": (plain, lambda name, like: False),
    "fp8": (fp8, is_matrix),
    "fp8-channels": (fp8_channels, is_matrix),
    "int4": (int4, lambda name, like: ".experts." in name and is_matrix(name, like)),
    "mxfp4": (mxfp4, lambda name, like: "experts" in name and like.dim() == 3),
    "deepseek-v4": (deepseek_v4, is_matrix),
}


def tensors(hub: HubModel, pool: Pool, config: Config, part: dict[str, Tensor]) -> Named:
    write, codes = FORMATS[hub.stored]
    for name, like in part.items():
        if name.endswith("tid2eid"):
            experts = text_of(config)[expert_key(text_of(config))]
            yield name, pool.uniform(like.shape[0], experts).argsort(1)[:, : like.shape[1]]
        elif codes(name, like) and not any(each in name for each in hub.plain):
            yield from write(pool, name, like)
        else:
            yield from plain(pool, name, like)


def parts(found: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors outside layers, then those of each layer."""
    by_layer: dict[int, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        behind = name.partition("layers.")[2].partition(".")[0]
        by_layer.setdefault(int(behind) if behind.isdecimal() else -1, {})[name] = tensor
    return [by_layer[layer] for layer in sorted(by_layer)]


def words() -> Iterator[tuple[str, str]]:
    """Pairs that merge into words of two, three and four letters, each pair made of words before it."""
    letters = string.ascii_lowercase
    twos = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    yield from itertools.product(letters, repeat=2)
    yield from itertools.product(twos, letters)
    yield from itertools.product(twos, twos)


def save_tokenizer(out: Path, vocab: int = 258) -> None:
    """The last two of `vocab` tokens begin and end a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(words(), vocab - 2 - len(letters)))
    tokens = [*letters, *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<bos>", "<eos>")])
    made.save(str(out / "tokenizer.json"))
    saved = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (out / "tokenizer_config.json").write_text(json.dumps(saved | {"chat_template": TEMPLATE}))


def write(name: str, out: Path, layers: int | None, experts: int, vocab: int, seed: int = 1) -> None:
    """layers None: as many as it takes to have each kind."""
    hub = HUB[name]
    config = cut(hub, layers or hub.layers, experts, vocab)
    found = shapes(hub, config) | {each: torch.empty(shape, device="meta") for each, shape in hub.extra}
    out.mkdir(parents=True)
    pool, divided, where = Pool(seed), parts(found), dict[str, str]()
    for i, part in enumerate(divided):
        file = f"model-{i + 1:05}-of-{len(divided):05}.safetensors"
        held = {key: tensor.clone() for key, tensor in tensors(hub, pool, config, part)}
        save_file(held, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(held, file)
        print(file, flush=True)
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    save_tokenizer(out, vocab)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=HUB, metavar="NAME", nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if asked.list or asked.out is None:
        print("\n".join(HUB))
    else:
        write(asked.name, asked.out, asked.layers, asked.experts, asked.vocab, asked.seed)


if __name__ == "__main__":
    main()
