"""`TokenBits`: a matcher's own bits. `SharedBits`: sets of tokens that all matchers of a vocabulary read.

Shared memory stays in a core's cache: reading it costs nearly nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import torch

from tandem.engine.grammar.utf8 import never_behind, no_texts
from tandem.engine.sampling.masks import TokenMask, bits_but, bits_of, mask_words, new_mask

MOST_SETS = 64  # 19 KB each with 150,000 tokens


class TokenBits:
    """A row of xgrammar's. Behind the vocabulary's `size` tokens one more says whether the answer may end."""

    def __init__(self, size: int) -> None:
        self.words = new_mask(mask_words(size + 1))
        self.rows = torch.from_numpy(self.words[None])  # the same memory, as xgrammar takes it
        self.tokens = self.words[: mask_words(size)]
        self._word, self._bit = size // 32, 1 << (size % 32)

    @property
    def says_complete(self) -> bool:
        return bool(int(self.words[self._word]) & self._bit)


class SharedBits:
    """`behind`: by the last byte of an answer so far, tokens that may come; where it is not there, any may."""

    def __init__(self, pieces: Sequence[bytes], special: Collection[int]) -> None:
        """pieces: each token's bytes. special: control tokens."""
        self._size, self._special, self._no_texts = len(pieces), frozenset(special), no_texts(pieces)
        self.of = lru_cache(MOST_SETS)(self._masks)
        self.behind: Mapping[bytes, TokenMask] = {
            last: bits_but(never, self._size) for last, never in never_behind(pieces).items() if never
        }

    def _masks(self, shown: tuple[int, ...], ends: frozenset[int]) -> tuple[TokenMask, TokenMask]:
        """Tokens that are text in a grammar that spells the control tokens `shown`; and `ends`, which never are."""
        hidden = (self._special - set(shown)) | ends | self._no_texts
        masks = bits_but(hidden, self._size), bits_of(ends, self._size)
        for each in masks:
            each.flags.writeable = False
        return masks
