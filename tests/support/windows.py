"""Windows of random tokens, as `kt quality` cuts them from a text."""

from __future__ import annotations

import torch

from tandem.quality.text import Windows
from tiny import VOCAB


def some_windows(lengths: tuple[int, ...] = (40, 17, 2)) -> Windows:
    generator = torch.Generator().manual_seed(3)
    return Windows(tuple(tuple(torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in lengths))
