"""Which window a mask of Transformers means, found by asking it about positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FARTHEST = 1 << 18  # tokens: a larger window counts as none
QUERIES = (1 << 22, (1 << 22) + 7, (1 << 22) + 1023)


class MaskReach(NamedTuple):
    """Tokens that a mask lets a token see. window: the last so many, its own included; 0: all. wrong: why neither."""

    window: int
    wrong: str = ""


def seen_through(visible: Callable[[int, int, Tensor, Tensor], Any]) -> MaskReach:
    """visible(batch, head, query position, key position) as Transformers' masks have it."""
    try:
        answers = [_distances(visible, query) for query in QUERIES]
    except Exception as error:  # a mask may look at anything
        return MaskReach(0, f"a mask that cannot be asked ({type(error).__name__}: {error})")
    windows = {_window(each) for each in answers}
    if len(windows) > 1 or -1 in windows:
        return MaskReach(0, "a mask that is neither causal nor a window")
    return MaskReach(windows.pop())


def _distances(visible: Callable[[int, int, Tensor, Tensor], Any], query: int) -> Tensor:
    """Visibility of the keys at distances -1, 0, 1, … from `query`, a bool tensor with one entry for each."""
    keys = torch.arange(query + 1, query - FARTHEST, -1)
    return torch.as_tensor(visible(0, 0, torch.full_like(keys, query), keys)).expand(len(keys)).bool()


def _window(answers: Tensor) -> int:
    """-1: no window."""
    future, past = bool(answers[0]), answers[1:]
    count = int(past.sum())
    if future or not count or not bool(past[:count].all()):
        return -1
    return 0 if count == len(past) else count
