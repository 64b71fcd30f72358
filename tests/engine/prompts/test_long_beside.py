"""Long chunks beside those who decode: who has them, and kernels whose blocks a step need not wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fake_model import request
from layered_engine import GPU, engine_of
from tandem.config.cuda_graphs import LONG_SIZES, PROMPT_SIZES
from tandem.engine.engine import _pace
from tandem.engine.pace import PrefillPace
from tandem.engine.prompt_graphs import ChunkInputs, PromptGraph, PromptGraphs
from tandem.models import ForwardBatch


def test_a_chunk_is_as_long_as_the_prompt_fills_a_graph() -> None:
    pace = PrefillPace(8192, beside=2048, shared=2048, longer=(4096, 8192))
    lengths = {16000: 8192 - 1, 6144: 8192 - 1, 6143: 4096, 3072: 4096, 3071: 2048, 100: 2048}
    assert {left: pace.step_tokens(1, left=left) - 1 for left in lengths} == lengths
    assert pace.step_tokens(1, alone=False, left=16000) == 1 + 2048  # several prompts have short ones
    assert pace.step_tokens(0, left=16000) == 8192


def test_the_pace_knows_the_graphs() -> None:
    plan = SimpleNamespace(max_step_tokens=8192, gpu=GPU)
    parts = cast(Any, SimpleNamespace(plan=plan, stream_seconds=None, model=None, handoff=object()))
    assert _pace(parts).step_tokens(1, left=8000) == 1 + max(GPU.prompt_sizes)
    plan.gpu = SimpleNamespace(ring_bytes=0, prompt_sizes=(*PROMPT_SIZES, *LONG_SIZES), shared_tokens=2048)
    assert _pace(parts).step_tokens(1, left=4000) == 1 + 4096
    plan.gpu.ring_bytes = 1
    assert _pace(parts).step_tokens(1, left=4000) < 1 + 4096


def test_the_scheduler_says_what_is_left_of_a_prompt_that_is_alone() -> None:
    engine, asked = engine_of(), []
    step_tokens = engine._scheduler.pace.step_tokens
    engine._scheduler.pace.step_tokens = lambda *how: asked.append(how) or step_tokens(*how)  # type: ignore[method-assign]
    engine.add(request("a", [5] * 90))
    engine.step()
    engine.step()
    engine.add(request("b", [6] * 20))
    engine.add(request("c", [7] * 30))
    engine.step()
    assert asked[:2] == [(0, True, True, 90), (0, True, True, 26)]
    assert asked[2] == (1, True, False, 50)


def graphs(*sizes: int) -> PromptGraphs:
    made, found = PromptGraphs(None), (torch.zeros(8, 7), torch.zeros(8, 2))
    made._graphs = {size: PromptGraph(ChunkInputs(size, 5, torch.device("cpu")), (), found) for size in sizes}
    return made


@pytest.mark.parametrize(("rows", "beside", "alone"), [(64, 64, 64), (3000, 4096, 0), (8191, 8192, 0)])
def test_long_graphs_are_for_chunks_beside_others(rows: int, beside: int, alone: int) -> None:
    """Alone, kernels one by one are as soon ready, and their products are faster."""
    made, all_rows = graphs(64, *LONG_SIZES), torch.arange(rows)
    chunk = ForwardBatch(
        all_rows, all_rows, all_rows, torch.tensor([0, rows]).int(), torch.tensor([rows]).int(),
        torch.zeros(1, 5).int(), torch.tensor([rows - 1]), torch.ones(1).int(),
    )  # fmt: skip
    assert made.graph_of(chunk) is made._graphs[beside]
    assert made.graph_of(chunk, alone=True) is made._graphs.get(alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_products_beside_steps_are_cut_by_rows(monkeypatch, dtype: torch.dtype, biased: bool) -> None:
    pytest.importorskip("triton")
    from tandem.kernels.gpu import linear

    monkeypatch.setattr(linear, "AT_ONCE", 8)
    monkeypatch.setattr(linear, "WIDE", 16)
    step, seen = linear.StepKind(), []
    weight, bias = torch.randn(16, 24), torch.randn(16) if biased else None
    made = linear.GpuLinear(weight, bias, "bf16", torch.device("cpu"), step=step)
    x = torch.randn(21, 24).bfloat16()
    whole = made(x, dtype)
    step.beside = True
    multiplied = linear.multiplied
    monkeypatch.setattr(linear, "multiplied", lambda x, *how: seen.append(len(x)) or multiplied(x, *how))
    monkeypatch.setattr(linear.torch, "mm", watched(torch.mm, seen))
    torch.testing.assert_close(made(x, dtype), whole, rtol=2**-7, atol=2**-6)
    assert seen == [8, 8, 5]
    assert len(made(x[:8], dtype)) == 8 and seen[3:] == [8]
    monkeypatch.setattr(linear, "WIDE", 17)
    made(x, dtype)
    assert seen[4:] == [21]


def watched(mm: Any, seen: list[int]) -> Any:
    """Of those that write into a part."""

    def times(a: torch.Tensor, b: torch.Tensor, **how: Any) -> torch.Tensor:
        if "out" in how:
            seen.append(len(a))
        return cast(torch.Tensor, mm(a, b, **how))

    return times


def test_experts_beside_steps_are_multiplied_in_short_blocks(monkeypatch) -> None:
    pytest.importorskip("triton")
    from tandem.kernels.gpu.prompts import products

    monkeypatch.setattr(products, "has_pytorchs", lambda device: True)
    monkeypatch.setattr(products, "grouped_product", lambda x, m, offs: "PyTorch's")
    monkeypatch.setattr(products.grouped, "grouped_product", lambda *how: "ours")
    x = torch.zeros(products.OURS + 1, 8)
    matrices = torch.zeros(1, 8, 8)
    assert products._product(x, matrices, x, 9.0, False) == "PyTorch's"
    assert products._product(x, matrices, x, 9.0, True) == "ours"
