"""From gate logits to the chosen experts and their weights in one kernel."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.errors import KernelError
from tandem.kernels.gpu.dependent_launch import let_next_start, overlapped, wait_for_last
from tandem.kernels.ops import ExpertCounts, Routing
from tandem.mechanisms.router.shape import Router
from tandem.mechanisms.router.torch import Route, in_torch
from tandem.mechanisms.router.torch import route as plain_route
from tandem.mechanisms.token_index.gpu.best import ordered


@triton.jit
def _best_groups(ranks, groups, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, GROUPS: tl.constexpr,
                 EACH: tl.constexpr):  # fmt: skip
    """ranks [GROUPS * EACH], -inf outside the best groups: by their best expert, or their TWO best added."""
    grouped = tl.reshape(ranks, [GROUPS, EACH])
    worth, first = tl.max(grouped, 1, return_indices=True, return_indices_tie_break_left=True)
    if TWO:
        others = tl.where(tl.arange(0, EACH)[None, :] == first[:, None], float("-inf"), grouped)
        worth += tl.max(others, 1)
    g = tl.arange(0, GROUPS)
    worth = tl.where(g < groups, worth, float("-inf"))
    chosen = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(tl.where(chosen != 0, float("-inf"), worth), 0, tie_break_left=True)
        chosen = tl.where(g == best, 1, chosen)
    return tl.reshape(tl.where(chosen[:, None] != 0, grouped, float("-inf")), [GROUPS * EACH])


@triton.jit
def _scores(x, top, total, KIND: tl.constexpr):
    """x float32, -inf where there is no expert. Of a softmax: top, the largest of all x, and total of the rest."""
    if KIND == "sigmoid":
        scores = tl.sigmoid(x)
    elif KIND == "sqrt_softplus":
        small = tl.exp(-tl.abs(x))
        above = 1.0 + small  # its logarithm would lose what the addition has rounded away
        more = tl.where(above == 1.0, small, tl.log(above) * (small / (above - 1.0)))
        scores = tl.sqrt(tl.maximum(x, 0.0) + more)
    else:
        tl.static_assert(KIND == "softmax", "the router kernel computes no such score")
        scores = tl.exp(x - top) / total
    return scores


@triton.jit
def _best(ranks, place, slot, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """Places of the TOP_K largest ranks, int32 [SLOTS]; of equal ones the first. Ranks are compared as integers, of
    which a warp finds the largest with one instruction."""
    key, best = ordered(ranks), tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        most = tl.max(key, 0)
        at = tl.min(tl.where(key == most, place, 1 << 30), 0)
        best = tl.where(slot == i, at, best)
        key = tl.where(place == at, -2147483648, key)
    return best


@triton.jit
def _route(logits, bias, named, ids, weights, slot_of, chosen_slots, tokens, used, rows, width, experts, groups, scale,
           epsilon, least, TOP_K: tl.constexpr, SHARED: tl.constexpr, SCORE: tl.constexpr, BIAS: tl.constexpr,
           NAMED: tl.constexpr, NORMALIZE: tl.constexpr, SLOTTED: tl.constexpr, COUNT: tl.constexpr,
           TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr,
           SLOTS: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Every group has EACH places, a power of two, of which it fills the first ones. What the logits were made of is
    there before the next kernel starts (`overlap.py`)."""
    wait_for_last(OVERLAP)
    let_next_start(OVERLAP)
    t = tl.program_id(0)
    place, slot, each = tl.arange(0, GROUPS * EACH), tl.arange(0, SLOTS), experts // groups
    e = place // EACH * each + place % EACH
    inside = (place % EACH < each) & (place // EACH < groups)
    x = tl.load(logits + t * width + e, inside, other=float("-inf")).to(tl.float32)
    top, total = 0.0, 1.0
    if SCORE == "softmax":
        top = tl.max(x)
        total = tl.sum(tl.exp(x - top))
    routed = slot < TOP_K
    chosen = slot + (experts - TOP_K)  # the shared ones follow the routed
    if NAMED:
        chosen = tl.where(routed, tl.load(named + t * TOP_K + slot, routed, other=0), chosen)
    else:
        ranks = _scores(x, top, total, SCORE)
        if BIAS:
            ranks += tl.load(bias + e, inside, other=0.0)
        ranks = tl.where(inside, ranks, float("-inf"))
        if GROUPS > 1:
            ranks = _best_groups(ranks, groups, TOP_GROUPS, TWO, GROUPS, EACH)
        at = _best(ranks, place, slot, TOP_K, SLOTS)
        best = tl.minimum(at // EACH * each + at % EACH, experts - 1)  # within bounds even for NaN
        chosen = tl.where(routed, best, chosen)
    own = tl.load(logits + t * width + chosen, routed, other=0.0).to(tl.float32)
    weight = tl.where(routed, _scores(own, top, total, SCORE), 1.0)
    if NORMALIZE:
        total = tl.maximum(tl.sum(tl.where(routed, weight, 0.0)) + epsilon, least)
        weight = tl.where(routed, weight / total, weight)
    weight = tl.where(routed, weight * scale, weight)
    out = t * (TOP_K + SHARED) + slot
    tl.store(ids + out, chosen, slot < TOP_K + SHARED)
    tl.store(weights + out, weight, slot < TOP_K + SHARED)
    if SLOTTED:
        tl.store(chosen_slots + out, tl.load(slot_of + chosen, slot < TOP_K + SHARED), slot < TOP_K + SHARED)
    if COUNT:  # no result is waited for
        counted = routed & (t < tl.load(rows))
        tl.atomic_add(tokens + chosen, 1, counted, sem="relaxed")
        tl.store(used + chosen, 1, counted)


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
    rows, slots = logits.shape[0], router.top_k + shared
    ids = logits.new_empty((rows, slots), dtype=torch.int32)
    weights = logits.new_empty((rows, slots), dtype=torch.float32)
    chosen_slots = None if slot_of is None else torch.empty_like(ids)
    _route[(rows,)](
        logits, logits if bias is None else bias, ids if chosen is None else chosen.contiguous(), ids, weights,
        ids if slot_of is None else slot_of,
        ids if chosen_slots is None else chosen_slots, *_counted(tally, ids),
        logits.stride(0), router.num_experts, router.num_groups, router.scale, router.epsilon,
        router.least_sum,
        TOP_K=router.top_k, SHARED=shared, SCORE=router.score, BIAS=bias is not None,
        NAMED=chosen is not None, NORMALIZE=router.normalize, SLOTTED=slot_of is not None,
        COUNT=tally is not None, TOP_GROUPS=router.top_groups, TWO=router.group_score == "top2",
        GROUPS=triton.next_power_of_2(router.num_groups),
        EACH=triton.next_power_of_2(router.num_experts // router.num_groups),
        SLOTS=triton.next_power_of_2(slots), num_warps=1, **overlapped(logits.device),
    )  # fmt: skip
    if tally is not None and tally.chosen is not None:
        tally.chosen[:rows].copy_(ids[:, : router.top_k])
    return Routing(ids, weights, chosen_slots)


def _counted(tally: ExpertCounts | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if tally is None:
        return unused, unused, unused
    if tally.rows is None or tally.tokens.dtype != torch.int32:
        raise KernelError("on a GPU a tally is int32 and says how many rows count")
    return tally.tokens, tally.used, tally.rows


def bound(ops: object, router: Router) -> Route:
    return partial(plain_route if in_torch(router, "gpu") else route, router)
