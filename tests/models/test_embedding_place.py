"""Where the embedding is: the plan's word for it reaches the operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plans import MODEL, plan, with_gpu
from tandem.models.model import embedding_of

STORED = SimpleNamespace(has_matrix=lambda name: True)


@pytest.mark.parametrize(("scale", "in_ram"), [(1.0, False), (1.0, True), (3.0, True)])
def test_the_plan_says_where_the_embedding_is(scale: float, in_ram: bool) -> None:
    asked = list[tuple[str, int, int, bool]]()
    made = plan(with_gpu())
    assert made.gpu is not None
    made = replace(made, gpu=replace(made.gpu, embedding_in_ram=in_ram))

    def lookup(name: str, rows: int, columns: int, in_ram: bool = False) -> Callable[[Tensor], Tensor]:
        asked.append((name, rows, columns, in_ram))
        return lambda ids: ids[:, None].float()

    model = replace(MODEL, embedding_scale=scale)
    builder: Any = SimpleNamespace(plan=made, config=model, dtype=torch.bfloat16, lookup=lookup, checkpoint=STORED)
    rows = embedding_of(builder)(torch.tensor([2, 5]))
    assert rows.flatten().tolist() == [2 * scale, 5 * scale]
    assert asked == [("model.embed_tokens.weight", MODEL.vocab, MODEL.hidden, in_ram)]


def test_without_a_gpu_it_stays_in_the_mapped_file() -> None:
    asked = list[bool]()
    builder: Any = SimpleNamespace(
        plan=replace(plan(with_gpu()), gpu=None), config=MODEL, dtype=torch.bfloat16, checkpoint=STORED,
        lookup=lambda name, rows, columns, in_ram=False: asked.append(in_ram),
    )  # fmt: skip
    embedding_of(builder)
    assert asked == [False]
