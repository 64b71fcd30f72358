"""`TransferOrder`: those that had most rows lately are streamed first, and who asks knows what rows are left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tandem.experts.streaming.transfer_order import GRID, TransferOrder
from tandem.experts.streaming.transfers import Transfers
from tandem.spec.gpu_scratch import StagingRing


@dataclass
class Layer:
    """Of four experts, some of whom are in CPU memory."""

    cpu_slots: int
    first_key: int = 0

    def expert_cpu_slots(self, moving: bool = False) -> list[int]:
        return list(range(self.cpu_slots))


PLACES = np.array([[-1, -1, -1, -1], [2, 0, -1, 1]], np.int32)  # of each layer's experts; place 3 is nobody's


def tokens(*of_second_layer: int) -> np.ndarray:
    return np.array([[0, 0, 0, 0], of_second_layer], np.int32)


def test_places_of_who_had_most_rows_come_first() -> None:
    """Both those that are streamed and the others ascend, so that neighbours are one copy."""
    order = TransferOrder([None, Layer(4)])
    assert arranged(order, 2) == [0, 1, 2, 3] and order.left is None
    order.learn(tokens(5, 1, 9, 4), PLACES)
    assert arranged(order, 1) == [2, 0, 1, 3] and arranged(order, 2) == [1, 2, 0, 3]
    assert arranged(order, 4) == [0, 1, 2, 3]
    assert order.left is not None and len(order.left) == GRID + 1
    assert [order.left[i * GRID // 4] for i in range(5)] == pytest.approx([1.0, 0.5, 0.1, 0.0, 0.0])


def test_only_new_rows_count_and_old_ones_fade() -> None:
    """Counts are of the start, and may have passed 2^31."""
    order, start = TransferOrder([None, Layer(4)]), np.array([[0] * 4, [1, 2, 3, 4]], np.int64)
    order.learn(start.astype(np.int32), PLACES)
    order.learn(start.astype(np.int32), PLACES)
    for step in range(1, 4):
        later = start + step * np.array([[0] * 4, [0, 1 << 30, 0, 0]])
        order.learn(later.astype(np.int32), PLACES)
    assert arranged(order, 1) == [0, 1, 2, 3] and order.left is not None
    assert order.left[GRID // 4] == pytest.approx(0.5 / 8 / (0.7 / 8 + 7 / 8))


def test_an_order_that_is_good_enough_stays() -> None:
    """Else copies would be listed anew in each step."""
    order = TransferOrder([None, Layer(4)])
    order.learn(tokens(1000, 500, 0, 200), PLACES)
    assert arranged(order, 2) == [0, 2, 1, 3]
    order.learn(tokens(2000, 1000, 0, 1201), PLACES)  # expert 3 had a few more rows than 1
    assert order.arranged(1, 2) is None
    order.learn(tokens(3000, 1500, 0, 4201), PLACES)
    assert arranged(order, 2) == [1, 2, 0, 3]


def test_a_layer_without_rows_keeps_its_order() -> None:
    order = TransferOrder([Layer(4), Layer(4)])
    places = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.int32)
    assert arranged(order, 2, 0) == [0, 1, 2, 3]
    order.learn(tokens(1, 2, 3, 4), places)
    assert order.arranged(0, 2) is None


def arranged(order: TransferOrder, count: int, layer: int = 1) -> list[int]:
    places = order.arranged(layer, count)
    assert places is not None
    return places.tolist()


class NoBus:
    """Copies that nobody makes."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def test_copies_are_listed_anew_only_for_another_order() -> None:
    """Exchanges of experts change which experts are streamed in each step, and seldom which slots are."""
    listed: list[list[int]] = []

    class Listing(Layer):
        def runs(self, cpu_slots: list[int]) -> list[tuple[int, int, int]]:
            listed.append(list(cpu_slots))
            return []

    layers: list[Layer | None] = [Listing(4)]
    transfers = Transfers(layers, StagingRing(2, 2, 256), NoBus(), torch.device("cpu"))  # type: ignore[arg-type]
    for order in (None, [0, 1, 2, 3], [2, 3, 0, 1], [2, 3, 0, 1]):
        if order is not None:
            transfers.reorder(0, np.array(order, np.int32))
        transfers.begin({0: 4}, whole=True)
    assert listed == [[0, 1], [2, 3], [2, 3], [0, 1]]
