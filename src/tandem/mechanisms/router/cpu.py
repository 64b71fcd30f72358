"""Routers on the C++ core; those that it does not know are torch's."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tandem import _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import ExpertCounts, Routing
from tandem.mechanisms.router.shape import Router
from tandem.mechanisms.router.torch import Route, in_torch, route


class CpuRoute:
    """`Route`. Rules are made once, for each number of shared experts."""

    def __init__(self, ops: CpuOps, router: Router) -> None:
        self._dense, self._router = ops.dense, router
        self._rules: dict[int, _core.Route] = {}

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor | None = None,
        shared: int = 0,
        tally: ExpertCounts | None = None,
        slot_of: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Routing:
        logits = logits.float().contiguous()
        if shared not in self._rules:
            self._rules[shared] = _rule(self._router, shared)
        shape = (logits.shape[0], self._router.top_k + shared)
        ids, weights = logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
        counted = () if tally is None else (tally.tokens, tally.used, tally.chosen)
        self._dense.route(self._rules[shared], logits, bias, ids, weights, *counted)
        return Routing(ids, weights, None if slot_of is None else slot_of[ids])


def bound(ops: CpuOps, router: Router) -> Route:
    return partial(route, router) if in_torch(router, "cpu") else CpuRoute(ops, router)


def _rule(router: Router, shared: int) -> _core.Route:
    rule = _core.Route(
        experts=router.num_experts,
        top_k=router.top_k,
        groups=router.num_groups,
        top_groups=router.top_groups,
        shared=shared,
        sigmoid=router.score == "sigmoid",
        normalize=router.normalize,
        group_by_top2=router.group_score == "top2",
        scale=router.scale,
        epsilon=router.epsilon,
    )
    if router.least_sum:
        rule.least_sum = router.least_sum
    return rule
