"""A step's logits, in host memory or on the device that made them, and the tokens chosen from them."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Rows
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.sampling.graph_masks import GraphMasks
from tandem.engine.sampling.masks import RowMasks, TokenMask, without_forbidden_rows
from tandem.engine.sampling.on_device import LogitsOf, choose, needs_more
from tandem.engine.sampling.penalties import FloatRows, adjusts, changes_logits
from tandem.engine.sampling.sampler import Sampled, best_token, is_greedy, sample
from tandem.engine.sequence import Sequence


class Logits(Protocol):
    """float32 [R, vocab]; valid until the model runs again."""

    def fetched(self, rows: slice) -> FloatRows:
        """In host memory."""
        ...

    def chosen(
        self, rows: Rows[int], sequences: Rows[Sequence], eos_ids: Collection[int], masks: RowMasks = ()
    ) -> list[Sampled]:
        """rows[i] belongs to sequences[i]; masks[i] says which tokens it may choose. No masks: any, in all rows."""
        ...


class HostLogits:
    """`Logits` in host memory."""

    def __init__(self, array: FloatRows) -> None:
        self._array = array

    def fetched(self, rows: slice) -> FloatRows:
        return self._array[rows]

    def chosen(
        self, rows: Rows[int], sequences: Rows[Sequence], eos_ids: Collection[int], masks: RowMasks = ()
    ) -> list[Sampled]:
        selected = self._array if len(rows) == len(self._array) else self._array[list(rows)]
        return sample(selected, sequences, eos_ids, masks)


def best_of(logits: Tensor, masks: GraphMasks | None = None, out: Tensor | None = None) -> Tensor:
    """float64 [R, 2]: every row's best id and its logit; NaN if there is one. Both are exact in float64.

    masks: of these rows; the best is then among the tokens that a row may choose. out: where they are written, for
    logits on a GPU, in memory that it reaches; filled when it has done so.
    """
    if logits.is_cuda:
        from tandem.kernels.gpu import best  # Triton is there only where a GPU is used

        return best.best_of(logits, None if masks is None else masks.device_addresses, out)
    if masks is not None and masks.sent:
        logits = masks.applied(logits)
    ids = logits.argmax(1, keepdim=True)
    return torch.cat((ids.double(), logits.gather(1, ids).double()), 1)


class HostRows:
    """Host memory that rows are fetched into, kept from step to step: pinned where the device is a GPU, since a copy
    there is several times as fast."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, torch.empty(0)

    def copy_of(self, rows: Tensor) -> FloatRows:
        """Valid until the next copy."""
        pinned = self._device.type == "cuda"
        if self._memory.numel() < rows.numel():
            self._memory = torch.empty(rows.numel(), pin_memory=pinned)
        out = self._memory[: rows.numel()].view(rows.shape)
        out.copy_(rows, non_blocking=True)
        if pinned:
            torch.cuda.current_stream(self._device).synchronize()
        array: FloatRows = out.numpy()
        return array


class BestRows:
    """Host memory for the `best_of` of every step that computes up to so many rows: a graph's kernel writes into
    it. Valid until the next step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._memory = torch.zeros(rows, 2, dtype=torch.float64, pin_memory=device.type == "cuda")

    def fetch(self, logits: Tensor, masks: GraphMasks | None = None) -> Tensor:
        """Waits for nothing: what is returned is filled when the device has done it."""
        memory = self._memory[: len(logits)]
        return best_of(logits, masks, memory) if logits.is_cuda else memory.copy_(best_of(logits, masks))


class StepEnd:
    """The point in the device's work at which a step has ended, whatever it is given afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """With what the device was given until now."""
        if self._event is not None:
            self._event.record()

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class DeviceLogits:
    """`Logits` that stay where they are: only what decides is fetched, and rows that penalties and biases change."""

    def __init__(self, logits: Tensor, best: Tensor, host: HostRows, *, masked: Rows[bool] = ()) -> None:
        """best: of the same rows, see `best_of`, in host memory, where it may still be on its way; masked: of the first
        rows, whether it is among the tokens that the row may choose."""
        self.logits, self._host, self._masked = logits, host, masked
        self.best: npt.NDArray[np.float64] = best.numpy()  # PyTorch takes ten times as long to look at so few numbers

    def fetched(self, rows: slice) -> FloatRows:
        return self._host.copy_of(self.logits[rows])

    def chosen(
        self, rows: Rows[int], sequences: Rows[Sequence], eos_ids: Collection[int], masks: RowMasks = ()
    ) -> list[Sampled]:
        if not masks and _all_take_best(sequences):  # most rows, at a fraction of what the rest takes
            best = self.best.tolist()
            return [best_token(*best[row]) for row in rows]
        masks = masks or [None] * len(rows)
        best_rows = [i for i, s in enumerate(sequences) if not _needs_whole_row(s, masks[i])]
        logits_of, best = self._among(best_rows, rows, sequences, masks)
        chosen = zip(best_rows, choose(logits_of, best, [sequences[i] for i in best_rows]), strict=True)
        by_row = {i: sampled for i, sampled in chosen if sampled is not None}
        rest = [i for i in range(len(rows)) if i not in by_row]
        if rest:
            whole = self._host.copy_of(_part(self.logits, [rows[i] for i in rest]))
            samples = sample(whole, [sequences[i] for i in rest], eos_ids, [masks[i] for i in rest])
            by_row |= zip(rest, samples, strict=True)
        return [by_row[i] for i in range(len(rows))]

    def _among(
        self, best_rows: list[int], rows: Rows[int], sequences: Rows[Sequence], masks: RowMasks
    ) -> tuple[LogitsOf, npt.NDArray[np.float64]]:
        """Logits and best of these rows, among the tokens that each may choose."""
        free = [rows[i] for i in best_rows]
        best = self.best[free]
        limited = [k for k, i in enumerate(best_rows) if masks[i] is not None]
        unknown = [k for k in limited if free[k] >= len(self._masked) or not self._masked[free[k]]]
        if not unknown and all(is_greedy(sequences[best_rows[k]].sampling) for k in limited):
            return (lambda numbers: _part(self.logits, [free[k] for k in numbers])), best
        logits = _part(self.logits, free)
        places = torch.tensor(limited, dtype=torch.int64, device=logits.device)
        bits = np.stack([mask for i in best_rows if (mask := masks[i]) is not None])
        some = without_forbidden_rows(logits[places], torch.from_numpy(bits).to(logits.device))
        if unknown:
            best[limited] = best_of(some).cpu().numpy()
        allowed = logits.index_copy(0, places, some)
        return partial(_part, allowed), best


def _needs_whole_row(sequence: Sequence, mask: TokenMask | None) -> bool:
    """Log-probabilities are those of the row as it is, so a masked copy does not do."""
    return changes_logits(sequence) or (mask is not None and sequence.sampling.logprobs is not None)


def _all_take_best(sequences: Rows[Sequence]) -> bool:
    """Whether the best of its row is the next token of each, where no mask limits it. Asked for each token: what is
    known of most sequences is not asked again."""
    return all(_takes_best(sequence) for sequence in sequences if not sequence.takes_best)


def _takes_best(sequence: Sequence) -> bool:
    params = sequence.sampling
    if sequence.takes_best is None and sequence.answer_len >= params.min_tokens:
        sequence.takes_best = not (needs_more(params) or adjusts(params))
    return bool(sequence.takes_best)


def _part(tensor: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(len(tensor))):
        return tensor
    return tensor[torch.tensor(rows, dtype=torch.int64, device=tensor.device)]
