"""Tensor names as stored → Hugging Face's names, which are the ones that the rest of the program knows.

Two spellings are known beside Hugging Face's own: DeepSeek's inference names (`layers.3.ffn.experts.7.w1.weight`; the
renaming of DeepSeek-V3's inference/convert.py, backwards) and language models inside multimodal ones. Where all heads
share one key (`attn.wkv`), DeepSeek's names have other meanings; Transformers saves such models with some of them.
What else a family calls otherwise is in its own file (`Family.renames`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tandem.architectures import FAMILIES

DRAFT = "mtp."
"""Beginning of the names of layers that only draft: their numbers are their own."""

_NUMBERED_DRAFT = re.compile(r"(?:model\.)?layers\.(\d+)\.e_proj\.")
"""Name of a matrix that only such a layer has, where it is counted with the others."""
_DRAFTS_OWN = {"shared_head.norm.": "norm.", "hc_head.hc_": "hc_head_"}

_DEEPSEEK_ROOTS = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
_DEEPSEEK_BLOCKS = {
    "attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_DEEPSEEK_ATTENTION = {
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "wq_a": "q_a_proj", "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa", "wkv_b": "kv_b_proj", "kv_norm": "kv_a_layernorm",
}  # fmt: skip
_DEEPSEEK_MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_DEEPSEEK_LAYER = re.compile(r"layers\.\d+\.(attn|ffn)\.")
_SHARED_KEYS = {
    "attn_sink": "sinks", "wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wo_a": "o_a_proj",
    "wo_b": "o_b_proj", "q_norm": "q_a_norm", "norm": "kv_norm", "wgate": "gate_proj", "ape": "position_bias",
    "weights_proj": "scorer.weights_proj",
}  # fmt: skip
_INDEX = {"indexer.compressor": "compressor.indexer", "indexer": "compressor.indexer"}
_STREAMS = re.compile(r"hc_(attn|ffn)_(fn|base|scale)")
_RENAMES = tuple({id(f.renames): f.renames for f in FAMILIES.values() if f.renames is not None}.values())
_NESTED = ("language_model.model.", "model.language_model.", "language_model.", "thinker.", "language.")


def hugging_face_names(stored: Iterable[str]) -> dict[str, str]:
    """{Hugging Face name: stored name} of every tensor."""
    names = tuple(stored)
    rename = _renaming(names)
    return {rename(name): name for name in names}


def _renaming(names: tuple[str, ...]) -> Callable[[str], str]:
    drafts = sorted({int(match[1]) for name in names if (match := _NUMBERED_DRAFT.match(name))})
    if drafts:
        return lambda name: _from_shared_keys(_as_draft(name, drafts))
    if any(".attn.wkv." in name for name in names):
        return _from_shared_keys
    if any(_DEEPSEEK_LAYER.match(name) for name in names):
        latent = any(".attn.wq_a." in name for name in names)
        return lambda name: _from_deepseek(name, latent)
    pieces = _pieces(names)
    if "model.embed_tokens.weight" not in names:
        for prefix in _NESTED:
            if f"{prefix}embed_tokens.weight" in names or f"{prefix}model.embed_tokens.weight" in names:
                return lambda name: _with_pieces(_unnested(name, prefix), pieces)
    return lambda name: _with_pieces(name, pieces)


def _pieces(names: tuple[str, ...]) -> dict[str, str]:
    """Pieces of these names that families spell otherwise: {theirs: ours}."""
    fitting = (renames for renames in _RENAMES if renames.fits(names))
    return {theirs: ours for renames in fitting for theirs, ours in renames.pieces.items()}


def _with_pieces(name: str, pieces: dict[str, str]) -> str:
    for theirs, ours in pieces.items():
        name = name.replace(theirs, ours)
    return name


def _unnested(name: str, prefix: str) -> str:
    """`language_model.model.layers.0…` → `model.layers.0…`; `language_model.lm_head.weight` → `lm_head.weight`."""
    old_prefix = "language_model." if prefix.startswith("language_model.") else prefix
    new_prefix = "model." if prefix == "model.language_model." else ""
    return new_prefix + name.removeprefix(old_prefix) if name.startswith(old_prefix) else name


def _from_deepseek(name: str, latent: bool) -> str:
    root, _, rest = name.partition(".")
    if root in _DEEPSEEK_ROOTS:
        return f"{_DEEPSEEK_ROOTS[root]}.{rest}"
    parts = name.split(".")
    if root != "layers" or len(parts) < 4:
        return name
    block, names = parts[2], parts[3:]
    if block == "attn":
        names = _attention(names, latent)
    elif block == "ffn":
        names = _mlp(names)
    return ".".join(["model", "layers", parts[1], _DEEPSEEK_BLOCKS.get(block, block), *names])


def _as_draft(name: str, drafts: list[int]) -> str:
    """`model.layers.43.e_proj…` → `mtp.0.e_proj…`, where that is the first of the draft layers."""
    parts = name.removeprefix("model.").split(".", 2)
    if parts[0] != "layers" or int(parts[1]) not in drafts:
        return name
    return f"{DRAFT}{drafts.index(int(parts[1]))}.{parts[2]}"


def _from_shared_keys(name: str) -> str:
    """With or without `model.` in front."""
    if name.startswith(DRAFT):
        return _draft(name)
    plain = name.removeprefix("model.")
    if plain.startswith("hc_head_"):
        return f"model.hc_head.hc_{plain.removeprefix('hc_head_')}"
    parts = plain.split(".")
    if parts[0] != "layers" or len(parts) < 3:
        return _from_deepseek(plain if parts[0] in _DEEPSEEK_ROOTS else name, latent=True)
    if streams := _STREAMS.fullmatch(parts[2]):
        return f"model.layers.{parts[1]}.{streams[1]}_hc.{streams[2]}"
    if parts[2] != "attn":
        return _from_deepseek(plain, latent=True)
    return ".".join(["model", "layers", parts[1], "self_attn", *_shared_keys(parts[3:])])


def _draft(name: str) -> str:
    """As a layer's, but below `mtp.0.`."""
    number, _, rest = name.removeprefix(DRAFT).partition(".")
    for theirs, ours in _DRAFTS_OWN.items():
        rest = ours + rest.removeprefix(theirs) if rest.startswith(theirs) else rest
    renamed = _from_shared_keys(f"layers.{number}.{rest}").removeprefix("model.")
    return f"{DRAFT}{number}.{renamed.removeprefix(f'layers.{number}.')}"


def _shared_keys(parts: list[str]) -> list[str]:
    submodule = ".".join(part for part in parts if part in ("indexer", "compressor"))
    rest = [_SHARED_KEYS.get(part, part) for part in parts if part not in ("indexer", "compressor")]
    return [_INDEX.get(submodule, submodule), *rest] if submodule else rest


def _attention(parts: list[str], latent: bool) -> list[str]:
    """With latent queries `q_norm` is the norm inside them; without, it is a norm of each head."""
    module = (
        "q_a_layernorm" if latent and parts[0] == "q_norm" else _DEEPSEEK_ATTENTION.get(parts[0], parts[0])
    )
    return [module, *parts[1:]]


def _mlp(parts: list[str]) -> list[str]:
    if parts == ["gate", "bias"]:
        return ["gate", "e_score_correction_bias"]
    return [_DEEPSEEK_MLP.get(part, part) for part in parts]
