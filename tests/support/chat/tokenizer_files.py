"""A tokenizer of bytes as files: tokenizer.json, and what stands beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

ONE = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


def written(
    path: Path, framed: bool = False, vocabulary: Sequence[str] = (), **files: dict[str, Any]
) -> Path:
    """files: by name without .json. framed: tokenizer.json puts <bos> in front. vocabulary: tokens that it has as
    pieces, before the added ones."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *vocabulary]
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<bos>", "<eos>")])
    if framed:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    inner.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    files["tokenizer_config"] = config | files.get("tokenizer_config", {})
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path
