"""The text that quality is measured on, cut into windows of tokens that start afresh."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.text.tokenizer import Tokenizer

LEAST_TOKENS = 2  # of a window: one to start from and one to predict


@dataclass(frozen=True)
class Windows:
    """Token sequences that do not see each other; each token but a window's first is predicted from those before it.

    Rows are tokens, counted through all windows.
    """

    ids: tuple[tuple[int, ...], ...]

    @cached_property
    def tokens(self) -> Tensor:
        """int64 [rows]."""
        return torch.tensor([token for window in self.ids for token in window])

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """Rows of each window."""
        ends = np.cumsum([len(window) for window in self.ids]).tolist()
        return tuple(slice(end - len(w), end) for w, end in zip(self.ids, ends, strict=True))

    @cached_property
    def predicting(self) -> Tensor:
        """int64 [predictions]: rows whose following token is known. Row r predicts tokens[r + 1]."""
        return torch.cat([torch.arange(span.start, span.stop - 1) for span in self.spans])

    @cached_property
    def digest(self) -> str:
        """Digest of all tokens and of where windows begin: saved logits belong to one digest."""
        text = ";".join(",".join(map(str, window)) for window in self.ids)
        return hashlib.sha256(text.encode()).hexdigest()


def default_text() -> str:
    """Prose, dialogue, code and four languages, a little over 4000 tokens; written for this purpose."""
    return (files("tandem") / "data" / "quality.txt").read_text(encoding="utf-8")


def read_text(path: Path, flag: str = "--text") -> str:
    """flag: what named the file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no UTF-8 ({error})"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from error


def cut(tokenizer: Tokenizer, text: str, window: int, limit: int) -> Windows:
    """The first `limit` tokens of `text` in windows of `window`; each begins with begin-of-text where the model
    wants one. Raises ConfigError when nothing can be predicted."""
    start = tokenizer.encode("")
    room = window - len(start)
    ids = tokenizer.encode(text, add_special_tokens=False)[:limit]
    pieces = [ids[i : i + room] for i in range(0, len(ids), max(1, room))] if room > 0 else []
    windows = [tuple(start + piece) for piece in pieces]
    usable = tuple(w for w in windows if len(w) >= LEAST_TOKENS)
    if not usable:
        raise ConfigError(
            f"{len(ids)} tokens in windows of {window} predict nothing: give a longer text or window"
        )
    return Windows(usable)
