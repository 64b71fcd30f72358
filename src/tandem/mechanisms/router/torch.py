"""From gate logits to experts and weights in plain torch; nothing here waits for a GPU."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tandem.kernels.expert_counts import count_choices
from tandem.kernels.ops import ExpertCounts, Routing
from tandem.mechanisms.router.scores import SCORES, Side
from tandem.mechanisms.router.shape import Router


class Route(Protocol):
    """A router, bound to its rules."""

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor | None = None,
        shared: int = 0,
        tally: ExpertCounts | None = None,
        slot_of: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Routing:
        """Logits [T, E], float32 or bfloat16, of which rows may lie apart (and score bias [E]) -> the top-k experts
        and their weights in float32.

        `shared` experts, ids E … E + shared - 1, are appended to every row's choice with weight 1; `tally` does not
        count them. places int32 [E + shared]: something about every expert that is looked up for the chosen ones.
        chosen [T, k]: of a router with a table: who that names; only weights are computed.
        """
        ...


def in_torch(router: Router, side: Side) -> bool:
    """Whether a side's kernels leave this router to torch. Those of the CPU read no table."""
    return side not in SCORES[router.score].kernels or (router.table and side == "cpu")


def route(
    router: Router,
    logits: Tensor,
    bias: Tensor | None = None,
    shared: int = 0,
    tally: ExpertCounts | None = None,
    slot_of: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Routing:
    """As `Route`."""
    scores = SCORES[router.score].of(logits.float())
    ids = _best(scores if bias is None else scores + bias, router) if chosen is None else chosen.long()
    weights = scores.gather(-1, ids)
    if router.normalize:
        # One after the other: a sum's order, and so its last bits, would depend on the number of rows.
        sums = weights.cumsum(-1)[:, -1:] + router.epsilon
        weights = weights / sums.clamp(min=router.least_sum)
    ids, weights = ids.int(), weights * router.scale
    if tally is not None:
        count_choices(tally, ids)
    if shared:
        shared_ids = torch.arange(
            router.num_experts, router.num_experts + shared, dtype=torch.int32, device=ids.device
        )
        ids = torch.cat((ids, shared_ids.expand(len(ids), shared)), dim=1)
        weights = torch.cat((weights, weights.new_ones(len(ids), shared)), dim=1)
    return Routing(ids, weights, None if slot_of is None else slot_of[ids])


def _best(ranks: Tensor, router: Router) -> Tensor:
    if router.num_groups > 1:
        ranks = _keep_top_groups(ranks, router)
    return _descending(ranks)[:, : router.top_k]


def _descending(ranks: Tensor) -> Tensor:
    """Indices of ranks [T, n] from the best; a stable sort, not topk, so that equal ranks give the lower id first."""
    return torch.sort(ranks, stable=True, dim=-1, descending=True).indices


def _keep_top_groups(ranks: Tensor, router: Router) -> Tensor:
    """ranks [T, E] with -inf outside each token's best groups."""
    groups = ranks.view(len(ranks), router.num_groups, -1)
    group_ranks = groups.topk(2 if router.group_score == "top2" else 1, dim=-1).values.sum(-1)
    best = _descending(group_ranks)[:, : router.top_groups]
    dropped = torch.ones_like(group_ranks, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)


def bound(ops: object, router: Router) -> Route:
    return partial(route, router)
