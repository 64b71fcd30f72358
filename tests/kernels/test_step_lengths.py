"""Lengths of a step's sequences: the host knows them before the device does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.engine.step.batch import moved
from tandem.engine.step.host_batch import SequenceRows, host_batch
from tandem.kernels.step_lengths import NOTED, lengths_of
from tandem.models.batch import ForwardBatch

CPU = torch.device("cpu")


def batch_of(*spans: tuple[int, int]) -> ForwardBatch:
    """Sequences with so many rows after so many tokens."""
    table = np.arange(8, dtype=np.int32)
    return host_batch([SequenceRows([1] * rows, first, table, slot=1) for rows, first in spans], 16)


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors whose numbers were asked for."""
    asked, tolist = list[torch.Tensor](), torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> object:
        asked.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    return asked


def test_a_copied_batch_asks_the_device_nothing(asks: list[torch.Tensor]) -> None:
    """Neither does one in between, nor after the host's memory has the next chunk."""
    batch = batch_of((3, 0), (2, 7))
    copies = [moved(batch, CPU), moved(batch, CPU)]
    batch.seq_lens[:] = 99
    asks.clear()
    for copy in copies * 2:
        lengths = lengths_of(copy)
        assert (lengths.starts, lengths.ends) == ([0, 3, 5], [3, 9])
    assert not asks


def test_another_batch_is_asked_once(asks: list[torch.Tensor]) -> None:
    copy = moved(batch_of((3, 0)), CPU)
    part = replace(copy, seq_lens=copy.seq_lens + 1)
    asks.clear()
    assert lengths_of(part).ends == lengths_of(part).ends == [4]
    assert len(asks) == 2  # first rows and lengths
    assert lengths_of(copy).ends == [3]


def test_a_batch_that_many_followed_is_asked_again() -> None:
    """Memory is bounded, and a tensor at the same address is not taken for an old one."""
    first = moved(batch_of((3, 4)), CPU)
    for rows in range(1, 2 * NOTED):
        assert lengths_of(moved(batch_of((rows, 0)), CPU)).ends == [rows]
    assert lengths_of(first).ends == [7]
