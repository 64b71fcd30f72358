"""The deterministic mode beside a GPU: the same bits alone, beside others, in chunks and after a prefix hit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from tandem import LLM, SamplingParams, _core
from tandem.formats.reference import stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.which import ExpertPath, Reads, gpu_way
from tiny import VOCAB

if AVAILABLE:
    from tandem.kernels.gpu.fixed_product import fixed_product
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
ROWS = (1, 2, 16, 17, 33)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "depth", "biased"), [(33, 72, True), (128, 384, False), (16, 128, True)])
def test_a_product_s_row_is_the_same_beside_any_others(columns, depth, biased, kept, out) -> None:
    """And near the exact one: float32 sums of `depth` terms, rounded once."""
    torch.manual_seed(0)
    x, weight = torch.randn(max(ROWS), depth).to(kept), torch.randn(columns, depth).to(kept)
    bias = torch.randn(columns) if biased else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    there = weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    whole = fixed_product(x.to(DEVICE), *there, out).cpu()
    terms = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    rounding = 2.0**-8 if out is torch.bfloat16 else 0.0
    assert ((whole.double() - exact).abs() <= terms * depth * 2.0**-24 + exact.abs() * 2 * rounding + 1e-30).all()
    for rows in ROWS if not INTERPRETED else (max(ROWS),):  # NumPy's products may differ by the number of rows
        assert torch.equal(fixed_product(x[:rows].to(DEVICE), *there, out).cpu(), whole[:rows])
        last = fixed_product(x[-rows:].to(DEVICE), *there, out).cpu()
        assert torch.equal(last, whole[-rows:])


@needs_cuda
@pytest.mark.parametrize("fmt", ["bf16", "int4", "fp8"])
def test_matrices_and_experts_have_rows_of_their_own(fmt: str) -> None:
    torch.manual_seed(0)
    cpu = CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1])
    ops = GpuOps(DEVICE, cpu, deterministic=True)
    weight = torch.randn(96, 128) / 11
    linear = ops.linear(weight if fmt == "bf16" else stored(weight, fmt))
    x = torch.randn(200, 128).bfloat16().to(DEVICE)
    whole = linear(x)
    assert all(torch.equal(linear(x[i : i + n]), whole[i : i + n]) for i, n in ((0, 1), (5, 7), (30, 170), (199, 1)))
    experts = ops.experts(8, 128, 64, "bf16" if fmt == "fp8" else fmt)
    (gate, up), down = torch.randn(2, 8, 64, 128) / 11, torch.randn(8, 128, 64) / 8
    experts.load_all(0, list(zip(gate, up, down, strict=True)))
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(200)]).int().to(DEVICE)
    weights = torch.rand(200, 3).to(DEVICE)

    def of(first: int, count: int) -> Tensor:
        part = slice(first, first + count)
        return experts.forward(x[part], ids[part], weights[part])

    together = of(0, 200)
    assert all(torch.equal(of(i, n), together[i : i + n]) for i, n in ((0, 1), (3, 16), (4, 196)))


def test_many_rows_take_the_way_of_few() -> None:
    assert gpu_way(1000, 8000, 8, Reads(True, True, each_row=True)) is ExpertPath.MMA
    assert gpu_way(1000, 8000, 8, Reads(False, True, each_row=True)) is ExpertPath.ROWS


def answers(path, asked: list[list[int]], share: float, calls: int = 1, **flags: Any) -> list[tuple[list[int], Any]]:
    """Tokens and bitwise log-probabilities of the last of so many calls."""
    llm = LLM(
        str(path), kt_cpuinfer=2, page_size=4, max_total_tokens=2048, enable_deterministic_inference=True,
        device="cuda", kt_gpu_experts_ratio=share, **flags,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    for _ in range(calls):
        found = llm.generate(asked, greedy, progress=False)
    if calls > 1:
        assert llm.engine.stats().cached_tokens > 0
    return [(each.token_ids, each.logprobs) for each in found]


@needs_cuda
@pytest.mark.parametrize(("variant", "fmt"), [("qwen3_moe-gpu", None), ("qwen3_moe-gpu", "INT4"), ("glm4_moe", None)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_engine_answers_with_the_same_bits(tiny_models, share, variant, fmt) -> None:
    """Beside 31 others, alone, in chunks of five tokens, and after a prefix hit."""
    generator = torch.Generator().manual_seed(9)
    asked = [torch.randint(VOCAB, (3 + i % 17,), generator=generator).tolist() for i in range(32)]
    path, how = tiny_models[variant], {} if fmt is None else {"kt_method": fmt}
    together = answers(path, asked, share, max_running_requests=32, **how)
    assert [answers(path, [prompt], share, **how)[0] for prompt in asked[::11]] == together[::11]
    assert answers(path, asked[3:9], share, chunked_prefill_size=5, max_running_requests=2, **how) == together[3:9]
    assert answers(path, asked[10:16], share, calls=2, **how) == together[10:16]
