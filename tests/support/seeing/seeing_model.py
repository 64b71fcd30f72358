"""A tiny random Qwen3-VL with a tokenizer and a chat template, as a server loads it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from seeing_server import END, PAD, SEES_ALL, START
from tiny_seeing import save_seeing


def save_chatting(path: Path) -> None:
    """A token for each byte, and those of images at the ids that the model has for them."""
    save_seeing("qwen3_vl_moe", path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    controls = (PAD, "<|video_pad|>", START, END)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in controls])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": SEES_ALL}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1024
    (path / "config.json").write_text(json.dumps(config))
