"""`TravelOrder`: who travels first; and `Copies`, whose rows workers may begin with before the host has time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tandem import _core
from tandem.experts.handoff import Copies, HandoffSizes
from tandem.experts.streams.travel_order import TravelOrder
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import Routing
from tandem.kernels.packed.experts import PackedExperts

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 6, 32, 32, 4, 2


@dataclass
class Layer:
    """Expert e lies in place places_of[e]."""

    places_of: list[int]
    places: int
    first_key: int = 0

    def found(self) -> list[int]:
        return self.places_of


def test_places_of_who_had_most_rows_come_first() -> None:
    order = TravelOrder([None, Layer([2, 0, -1, 1], 4)])
    assert order.places[1].tolist() == order.ranks(1).tolist() == [0, 1, 2, 3]
    order.renew(torch.tensor([[0, 0, 0, 0], [5, 1, 9, 4]]))
    assert order.places[1].tolist() == [2, 1, 0, 3]  # place 3 is nobody's
    assert order.ranks(1).tolist() == [2, 1, 0, 3]


def test_it_is_due_whenever_rows_have_doubled() -> None:
    order = TravelOrder([Layer([0, 1], 2)])
    assert [order.is_due(10) for _ in range(9)] == [False, True, True, False, True, *[False] * 3, True]


def packed(loaded: int = EXPERTS) -> PackedExperts:
    torch.manual_seed(0)
    made = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]).experts(EXPERTS, HIDDEN, WIDTH, "bf16")
    shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    made.load_all(0, [tuple(torch.randn(*shape).bfloat16() for shape in shapes) for _ in range(loaded)])
    return made


def sent(copies: Copies, to: PackedExperts) -> tuple[torch.Tensor, Routing]:
    """Rows, none of whose experts is on a GPU."""
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    x, routing = torch.randn(TOKENS, HIDDEN).bfloat16(), Routing(ids, torch.rand(TOKENS, TOP_K))
    copies.send(x, routing, torch.full_like(ids, -1))
    copies.sent(to)
    return x, routing


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_workers_may_begin_before_the_host_has_time(looks: int) -> None:
    copies, experts = Copies(HandoffSizes(1, TOKENS, HIDDEN, TOP_K), torch.device("cpu")), packed()
    for step in range(3):
        x, routing = sent(copies, experts)
        expected = experts.forward(x, routing.ids, routing.weights, torch.empty(TOKENS, HIDDEN))
        for _ in range(looks):
            copies.look(TOKENS)
        copies.compute(TOKENS)
        assert torch.equal(copies.result(TOKENS), expected)
        assert copies.times.posts == step + 1 and copies.times.serve_seconds > 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_failure_ends_its_own_step_alone(waits: bool) -> None:
    """Another step begins, whether that one was waited for or not."""
    copies, broken, experts = Copies(HandoffSizes(1, TOKENS, HIDDEN, TOP_K), torch.device("cpu")), packed(1), packed()
    sent(copies, broken)
    copies.look(TOKENS)
    if waits:
        with pytest.raises(ValueError, match="before it was loaded"):
            copies.compute(TOKENS)
    x, routing = sent(copies, experts)
    copies.look(TOKENS)
    copies.compute(TOKENS)
    expected = experts.forward(x, routing.ids, routing.weights, torch.empty(TOKENS, HIDDEN))
    assert torch.equal(copies.result(TOKENS), expected)
