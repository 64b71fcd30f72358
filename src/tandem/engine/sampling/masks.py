"""Masks of tokens: which of them a row may choose. Rows without one may choose any."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Bit i % 32 of word i // 32 says whether token i may come next.
TokenMask = npt.NDArray[np.int32]  # [ceil(vocab / 32)]
RowMasks = Rows[TokenMask | None]  # of rows of logits


def mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def new_mask(words: int) -> TokenMask:
    """Nothing may come. Where this process uses a GPU, it can read the mask where it is."""
    mask: TokenMask = torch.zeros(words, dtype=torch.int32, pin_memory=torch.cuda.is_initialized()).numpy()
    return mask


def bits_of(token_ids: Collection[int], vocab: int) -> TokenMask:
    mask = np.zeros(mask_words(vocab), dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return mask.view(np.int32)


def bits_but(token_ids: Collection[int], vocab: int) -> TokenMask:
    """All tokens but these; bits behind the last token stay 0."""
    mask = ~bits_of(token_ids, vocab)
    if vocab % 32:
        mask[-1] &= np.int32((1 << (vocab % 32)) - 1)
    return mask


def allows(mask: TokenMask, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)


def without_forbidden(row: npt.NDArray[np.float32], mask: TokenMask) -> npt.NDArray[np.float32]:
    """A copy of one row in which tokens that may not come have no probability."""
    bits = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little")
    return np.where(bits.view(np.bool_), row, np.float32(-np.inf))


def without_forbidden_rows(logits: Tensor, masks: Tensor) -> Tensor:
    """The same of logits [R, vocab] and masks int32 [R, words], on any device. NaN stays where it is."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (masks[:, :, None] >> shifts) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    return torch.where(allowed | logits.isnan(), logits, float("-inf"))


def masked_rows(logits: Tensor, masks: RowMasks) -> Tensor:
    """The same where only some of the first rows have a mask."""
    held = {row: torch.from_numpy(mask) for row, mask in enumerate(masks) if mask is not None}
    if not held:
        return logits
    rows = torch.tensor(list(held), device=logits.device)
    bits = torch.stack(list(held.values())).to(logits.device)
    return logits.index_copy(0, rows, without_forbidden_rows(logits[rows], bits))
