"""A GGUF file's metadata as the `config.json` and `generation_config.json` that Hugging Face would have beside it.

Keys are those of gguf-py's constants.py; what llama.cpp fixes per architecture instead of storing it (whether weights
of chosen experts are normalised, the router's scores) is taken from its model files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from tandem.architectures import GGUF
from tandem.architectures.family import DerivedTensor
from tandem.checkpoint.gguf_model import GGUFModel
from tandem.checkpoint.gguf_names import layer_of
from tandem.errors import CheckpointError
from tandem.spec.json_keys import outside

SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# Tokens that end an answer whatever else does, where a vocabulary has them; a file names only one or two of them.
END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
    "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<turn|>", "<|tool_response>", "[EOT]",
    "[EOS]", "<|return|>", "<|call|>", "<|role_end|>",
)  # fmt: skip
CONTINUES = {"<|end|>": "<|return|>"}
"""Tokens that end a message, where an answer has several: in vocabularies with the second one (gpt-oss)."""
AS_SAFETENSORS = {
    "jamba": "jamba", "phimoe": "phimoe",
}  # fmt: skip
"""Architectures that are not read, by the model types of their families, which run."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of token_type
CONTROL_LOOK = re.compile(r"<[|｜][^|｜<>]+[|｜]>|<(fim|file)[-_][a-z]+>")
"""Texts that are control tokens wherever they are one token, besides `END_TOKENS`."""
NO_MODELS = {
    "adapter": "an adapter (LoRA), which is not served before it is merged into its model",
    "mmproj": "what makes embeddings of images or sound", "imatrix": "statistics for quantisation",
}  # fmt: skip
"""By general.type."""

Config = dict[str, Any]


class _GgufMetadata:
    """`{architecture}.{key}` of a model's metadata."""

    def __init__(self, model: GGUFModel) -> None:
        self.model, self.prefix = model, model.architecture + "."

    def need(self, key: str) -> int:
        is_list = isinstance(self.model.metadata.get(self.prefix + key), list)
        return _bounded(self, key, _first(self, key) if is_list else self.model.need(self.prefix + key, int))

    def size(self, key: str) -> int:
        value = self.need(key)
        if value < 1:
            raise self.refuse(key, f"is {value}, and must be at least 1")
        return value

    def optional(self, key: str, default: int) -> int:
        return self.need(key) if self.prefix + key in self.model.metadata else default

    def number(self, key: str, default: float) -> float:
        return self.model.optional(self.prefix + key, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.model.optional(self.prefix + key, default)

    def flags(self, key: str) -> list[bool]:
        values = self.model.metadata.get(self.prefix + key, [])
        if not isinstance(values, list) or not all(isinstance(v, int) and v in (0, 1) for v in values):
            raise self.refuse(key, "is not an array of bools")
        return [bool(value) for value in values]

    def numbers(self, key: str) -> list[float]:
        values = self.model.metadata.get(self.prefix + key, [])
        listed = values if isinstance(values, list) else [values]
        if not all(type(value) in (int, float, bool) and math.isfinite(value) for value in listed):
            raise self.refuse(key, "is not an array of numbers")
        return [float(value) for value in listed]

    def wholes(self, key: str) -> list[int]:
        values = self.model.metadata.get(self.prefix + key, [])
        listed = values if isinstance(values, list) else [values]
        if not all(type(value) is int and 0 <= value < 1 << 63 for value in listed):
            raise self.refuse(key, "is not an array of whole numbers")
        return listed[:]

    def layers(self, key: str, count: int) -> list[int]:
        values = self.numbers(key)
        each = values * count if len(values) == 1 else values
        if len(each) < count:
            raise self.refuse(key, f"has {len(each)} values for {count} layers")
        return [_bounded(self, key, int(value)) for value in each[:count]]

    def vector(self, name: str) -> list[float]:
        tensor = self.model.tensors.get(name)
        if tensor is None:
            return []
        if tensor.kind != "F32":
            raise CheckpointError(f"{self.model.where(tensor)} is stored as {tensor.kind}; it is read as F32")
        numbers: list[float] = self.model.rows(tensor).contiguous().view(torch.float32).flatten().tolist()
        return numbers

    def has(self, key: str) -> bool:
        return self.prefix + key in self.model.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.model.tensors

    def rows(self, ending: str) -> int:
        """Output rows of the first tensor whose name ends so."""
        for name, tensor in self.model.tensors.items():
            if f".{name}".endswith(f".{ending}") and len(tensor.shape) >= 2:
                return tensor.shape[-2]
        raise CheckpointError(f"{self.model.path} has no matrix {ending}")

    def only(self, key: str, value: int, means: str) -> None:
        """Raises CheckpointError where the file says something else."""
        if self.optional(key, value) != value:
            raise self.refuse(key, f"is not {value} ({means})")

    def refuse(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.model.path}: {self.prefix}{key} {why}")

    @property
    def depth(self) -> int:
        """Layers of the model itself. Files count draft layers among their blocks or do not, and may lack them."""
        count, drafts = self.need("block_count"), self.optional("nextn_predict_layers", 0)
        last = _last_block(self.model)
        drafts_inside = drafts and last == count and not _is_draft_block(self.model, count - drafts)
        own = count if drafts_inside else count - max(drafts, 0)
        if own < 1:
            raise self.refuse("block_count", f"is {count}, of which {drafts} are draft layers: no layer is left")
        if last < own:
            raise self.refuse(
                "block_count",
                f"is {count}, but the last block with tensors is blk.{last - 1}: fetch the file again; where its draft "
                f"layer (MTP) was taken away, take a file that keeps it, or one whose block_count is {last}",
            )
        return own

    @property
    def drafts(self) -> int:
        """Draft layers whose tensors are there."""
        drafts = self.optional("nextn_predict_layers", 0)
        return drafts if drafts > 0 and _is_draft_block(self.model, self.depth) else 0

    @property
    def has_bias(self) -> bool:
        return self.has_tensor("blk.0.attn_q.bias")

    @property
    def expert_width(self) -> int:
        """Neurons of an expert: the key, or in files that lack it the rows of the experts themselves."""
        return self.optional("expert_feed_forward_length", 0) or self.rows("ffn_gate_exps.weight")

    def rope(self) -> Config:
        """`rope_parameters` of Transformers 5. Llama 3's scaling is a tensor of what frequencies are divided by."""
        kind = self.model.optional(f"{self.prefix}rope.scaling.type", "none")
        rope: Config = {"rope_theta": self.number("rope.freq_base", 10000.0), "rope_type": "default"}
        if kind != "none":
            original = self.optional("rope.scaling.original_context_length", 0)
            rope |= {"rope_type": kind, "factor": self.number("rope.scaling.factor", 1.0)}
            rope |= {"original_max_position_embeddings": original} if original else {}
        if divisors := self.vector("rope_freqs.weight"):
            rope |= {"rope_type": "divided", "divisors": divisors}
        return rope

def _first(keys: _GgufMetadata, key: str) -> int:
    """Some writers repeat a number for every layer."""
    values = keys.model.array(keys.prefix + key, int)
    if len(set(values)) != 1:
        raise keys.refuse(key, "differs between layers, which is not supported")
    return values[0]


def _bounded(keys: _GgufMetadata, key: str, value: int) -> int:
    if why := outside(key, value):
        raise keys.refuse(key, why)
    return value


def _last_block(model: GGUFModel) -> int:
    """The number behind that of the last block with tensors."""
    numbers = (layer_of(each) for each in model.tensors.values())
    return 1 + max((number for number in numbers if number is not None), default=-1)


def _is_draft_block(model: GGUFModel, block: int) -> bool:
    """Whether a block has a draft layer's own tensors."""
    return any(name.startswith(f"blk.{block}.nextn.") for name in model.tensors)


def supported(model: GGUFModel) -> str:
    """Its architecture. Raises CheckpointError where that is not read, saying what runs instead."""
    if (what := NO_MODELS.get(str(model.metadata.get("general.type")))) is not None:
        raise CheckpointError(f"{model.path} is {what}, and no model: give the model's own file")
    if (architecture := model.architecture) in GGUF:
        return architecture
    other = AS_SAFETENSORS.get(architecture)
    way = f". Its safetensors run (kt models {other}): take those" if other else ""
    names = ", ".join(sorted(GGUF))
    raise CheckpointError(
        f"{model.path}: architecture {architecture!r} is not supported; these are: {names}{way}"
    )


def parts_of(model: GGUFModel) -> Mapping[str, DerivedTensor]:
    """Tensors that its architecture has otherwise than Hugging Face."""
    return GGUF[model.architecture].parts(_GgufMetadata(model))


def wholes_of(model: GGUFModel) -> Mapping[str, list[int]]:
    """Tensors of whole numbers that are arrays of the metadata."""
    return GGUF[model.architecture].wholes(_GgufMetadata(model))


def config_json(model: GGUFModel) -> Config:
    """Content of `config.json`. CheckpointError for an architecture that is not supported, or a missing key."""
    architecture = supported(model)
    keys = _GgufMetadata(model)
    own = GGUF[architecture].config(keys)
    return _shared(keys, own) | own


def generation_json(model: GGUFModel) -> Config:
    """Content of `generation_config.json`: tokens that end an answer, sampling where its authors recommend one."""
    generation: Config = {"eos_token_id": end_ids(model)}
    for key, name in SAMPLING.items():
        value = model.metadata.get(f"general.sampling.{key}")
        if type(value) in (int, float):
            generation[name] = value
    return generation


def token_kinds(model: GGUFModel, tokens: list[str]) -> list[int]:
    """`token_type` of each token, repaired. Raises CheckpointError."""
    kinds = _stored_kinds(model, tokens)
    for i in untyped_control(model, tokens):
        kinds[i] = CONTROL
    return kinds


def untyped_control(model: GGUFModel, tokens: list[str]) -> list[int]:
    """Ids of control tokens that a file has as normal ones, having lost their types: a chat's turns would be cut to
    pieces. They look so, or the file names them by their ids. Raises CheckpointError."""
    ids = {model.optional(f"tokenizer.ggml.{key}_token_id", -1) for key in ("bos", "eos", "eot", "eom", "padding")}
    return [
        i
        for i, (token, kind) in enumerate(zip(tokens, _stored_kinds(model, tokens), strict=True))
        if kind == NORMAL and len(token) > 1
        if i in ids or token in END_TOKENS or CONTROL_LOOK.fullmatch(token)
    ]


def _stored_kinds(model: GGUFModel, tokens: list[str]) -> list[int]:
    kinds = model.array("tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{model.path}: {len(tokens)} tokens have {len(kinds)} types")
    return kinds[:]


def end_ids(model: GGUFModel) -> list[int]:
    """Ids of all tokens that end an answer, those that the file names first."""
    file_ids = [model.optional(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot", "eom")]
    tokens = model.array("tokenizer.ggml.tokens", str)
    kinds = token_kinds(model, tokens)
    special = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    }
    ends = [token for token in END_TOKENS if CONTINUES.get(token) not in special]
    known_ids = sorted(special[token] for token in ends if token in special)
    return list(dict.fromkeys(i for i in (*file_ids, *known_ids) if i >= 0))


def _shared(keys: _GgufMetadata, own: Config) -> Config:
    """own: what the architecture says itself, of heads that differ between layers, for example."""
    model, heads = keys.model, own.get("num_attention_heads") or keys.need("attention.head_count")
    hidden = keys.need("embedding_length")
    config: Config = {
        "vocab_size": keys.rows("token_embd.weight"),
        "hidden_size": hidden,
        "num_hidden_layers": keys.depth,
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or keys.optional("attention.head_count_kv", heads),
        "head_dim": keys.optional("attention.key_length", hidden // max(heads, 1)),
        "intermediate_size": own.get("intermediate_size")
        or keys.optional("feed_forward_length", 0)
        or keys.optional("expert_feed_forward_length", 0),
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": keys.rope(),
        "hidden_act": "silu",
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return config
