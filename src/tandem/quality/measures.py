"""How far one distribution over tokens is from another, and how well either predicts a text. All sums in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class KeptRows(NamedTuple):
    """The likeliest tokens of each row, and what all logits of the row add up to.

    ids int64 [n, K]; None: all of the vocabulary, in order. logits float32 [n, K]. log_total float64 [n]: logsumexp of
    the whole row. target float32 [n]: the logit of the token that came.
    """

    ids: Tensor | None
    logits: Tensor
    log_total: Tensor
    target: Tensor


def kept_rows(logits: Tensor, targets: Tensor, keep: int = 0) -> KeptRows:
    """float32 logits [n, V] → the `keep` largest of each row (0: all)."""
    total, target = logits.double().logsumexp(-1), logits.gather(1, targets[:, None])[:, 0]
    if keep == 0 or keep >= logits.shape[1]:
        return KeptRows(None, logits, total, target)
    values, ids = logits.topk(keep, dim=-1)
    return KeptRows(ids, values, total, target)


def divergences(reference: KeptRows, logits: Tensor) -> Tensor:
    """KL(reference ‖ logits) of each row in nats, float64 [n]. Where the reference is cut, its other tokens count as
    one: the result is then at most the true divergence (data processing inequality)."""
    total = logits.double().logsumexp(-1, keepdim=True)
    same = logits if reference.ids is None else logits.gather(1, reference.ids)
    theirs, ours = reference.logits.double() - reference.log_total[:, None], same.double() - total
    kl = (theirs.exp() * (theirs - ours)).nan_to_num(nan=0.0).sum(-1)  # 0 * -inf: a token that cannot come
    if reference.ids is None:
        return kl
    return kl + _rest(theirs, ours)


def _rest(theirs: Tensor, ours: Tensor) -> Tensor:
    """The term of all tokens that were not kept, as one."""
    p, q = (1 - theirs.exp().sum(-1)).clamp(min=0), (1 - ours.exp().sum(-1)).clamp(min=0)
    tiny = torch.finfo(torch.float64).tiny
    return torch.where(p > 0, p * (p.clamp(min=tiny).log() - q.clamp(min=tiny).log()), 0.0)


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log probability of each row's target, nats, float64 [n]."""
    return logits.double().logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0].double()


def top_tokens(reference: KeptRows) -> Tensor:
    """The likeliest token of each row, int64 [n]; of equal ones the first."""
    best = reference.logits.argmax(-1)
    return best if reference.ids is None else reference.ids.gather(1, best[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(reference ‖ measured) over all predictions, nats; `error` is the standard error of the mean."""

    mean: float
    error: float
    median: float
    percentile_99: float
    largest: float
    same_top: float  # share of predictions with the same likeliest token

    @classmethod
    def of(cls, kl: Tensor, same_top: Tensor) -> Divergence:
        """kl float64 [n], same_top bool [n]."""
        spread = float(kl.std()) if len(kl) > 1 else 0.0
        return cls(
            mean=float(kl.mean()),
            error=spread / math.sqrt(len(kl)),
            median=float(kl.median()),
            percentile_99=float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]),
            largest=float(kl.max()),
            same_top=float(same_top.double().mean()),
        )


def perplexity(loss: Tensor) -> float:
    """exp of the mean loss; infinite where that overflows."""
    mean = float(loss.mean())
    return math.exp(mean) if mean < 700 else math.inf
