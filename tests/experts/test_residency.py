"""Where experts are: three values, four transitions, one owner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import EngineError
from tandem.experts.residency import (
    NO_SLOT,
    NOBODY,
    Location,
    Residency,
    count_on,
    experts_on,
    left_to_host,
    packed_slots,
    slots_in_use,
)

LAYERS, EXPERTS, SLOTS = 2, 5, 3
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["load", "drop", "rise", "sink"]), st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1),
        st.integers(-1, SLOTS),
    ),
    max_size=60,
)  # fmt: skip


@given(moves=MOVES)
def test_an_expert_is_in_one_place_whatever_is_asked(moves: list[tuple[str, int, int, int]]) -> None:
    """Against a table of our own: what may not be is refused, and changes nothing."""
    slots = torch.tensor([[0, -1, -1, 1, -1], [-1, -1, -1, -1, -1]])
    filed = torch.tensor([[False, True, False, False, False], [True] * EXPERTS])
    places = Residency(slots, filed)
    known = {(layer, e): (Location.FILE if filed[layer, e] else Location.CPU, NO_SLOT) if slots[layer, e] < 0
             else (Location.GPU, int(slots[layer, e])) for layer in range(LAYERS) for e in range(EXPERTS)}  # fmt: skip
    for what, layer, expert, slot in moves:
        location, _ = known[layer, expert]
        taken = {s for (where, _), (_, s) in known.items() if where == layer}
        becomes = {
            "load": (Location.FILE, (Location.CPU, NO_SLOT)), "drop": (Location.CPU, (Location.FILE, NO_SLOT)),
            "rise": (Location.CPU, (Location.GPU, slot)), "sink": (Location.GPU, (Location.CPU, NO_SLOT)),
        }  # fmt: skip
        given_slot = (slot,) if what == "rise" else ()
        if location is becomes[what][0] and (what != "rise" or (slot >= 0 and slot not in taken)):
            getattr(places, what)(layer, expert, *given_slot)
            known[layer, expert] = becomes[what][1]
        else:
            with pytest.raises(EngineError):
                getattr(places, what)(layer, expert, *given_slot)
        for (at, e), (where, number) in known.items():
            assert places.location(at, e) is where and places.slots[at, e] == number
            assert [bool(places.on(each)[at, e]) for each in Location] == [each is where for each in Location]


def test_an_expert_in_two_places_is_refused() -> None:
    with pytest.raises(EngineError, match="said to be in its file alone"):
        Residency(torch.tensor([[0]]), torch.tensor([[True]]))


def test_what_a_slot_means() -> None:
    slots = packed_slots(torch.tensor([True, False, True, False]))
    assert slots.tolist() == [0, NO_SLOT, 1, NO_SLOT] and slots.dtype == torch.int32 and slots_in_use(slots) == 2
    assert experts_on(Location.GPU, slots) == [0, 2] and experts_on(Location.CPU, slots) == [1, 3]
    assert count_on(Location.GPU, slots) == count_on(Location.CPU, slots) == 2
    ids = torch.tensor([[3, 0], [2, 1]])
    assert left_to_host(ids, slots[ids]).tolist() == [[3, NOBODY], [NOBODY, 1]]
