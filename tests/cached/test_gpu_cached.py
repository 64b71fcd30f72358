"""Keys and values in float8: kernels read what they have rounded (on a GPU, or interpreted); an engine serves them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from gpu import AVAILABLE, DEVICE, INTERPRETED, needs_cuda, needs_triton
from paged_batches import Batch, make_batch, random_tables
from tandem import LLM, SamplingParams, _core
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.ops import HeadNorms, Ops, RopeTables
from tandem.kernels.reference import TorchOps

if AVAILABLE:
    from tandem.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.gpu, needs_triton]
PAGE, FP8 = 16, torch.float8_e4m3fn
KEPT = torch.float32 if INTERPRETED else torch.bfloat16  # Triton's interpreter multiplies bfloat16's bits


@pytest.fixture(scope="module")
def ops() -> Ops:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 on this GPU")
    return GpuOps(DEVICE, CpuOps(_core.WorkerPool([-1, -1]), _core.supported_tiers()[-1]))


def there(batch: Batch) -> Batch:
    each = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(
        batch, **{name: part.to(DEVICE) for name, part in each.items() if isinstance(part, torch.Tensor)}
    )


def stored(pages: int, heads: int, dim: int) -> torch.Tensor:
    """Numbers of all sizes that float8 has, subnormal ones too."""
    return (torch.randn(pages, PAGE, heads, dim) * 2.0 ** torch.randint(-9, 3, (pages, 1, heads, 1))).to(FP8)


@pytest.mark.parametrize(("spans", "single"), [([(299, 300), (70, 71)], 0), ([(0, 37), (290, 300)], 0),
                                               ([(299, 300), (0, 37), (250, 300)], 1)])  # fmt: skip
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value"), [(8, 1, 64, 64), (6, 2, 40, 22), (4, 2, 128, 128)]
)
def test_attention_reads_float8(ops: Ops, heads, kv_heads, dim, value, spans, single) -> None:
    """As over the same numbers in float32: float8 becomes bfloat16 without loss."""
    torch.manual_seed(0)
    tables, pages = random_tables(len(spans), 300)
    k, v = stored(pages, kv_heads, dim), stored(pages, kv_heads, value)
    batch = replace(make_batch(spans, tables), single_rows=single)
    q = torch.randn(len(batch.positions), heads, dim).to(KEPT)
    expected = TorchOps().attention(q.float(), k.float(), v.float(), batch, dim**-0.5, 0)
    got = ops.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), there(batch), dim**-0.5, 0).float().cpu()
    largest = float(v.float().abs().max())  # weights sum to 1, and are rounded to 2^-8 on a GPU
    assert (got - expected).abs().max() <= largest * (2.0**-15 if INTERPRETED else 2.0**-6)


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter cuts bits off where a GPU rounds")
@pytest.mark.parametrize("norm", [False, True])
def test_keys_and_values_are_rounded_to_the_nearest(ops: Ops, norm: bool) -> None:
    """What bfloat16 pages would have, rounded once more; what is too large becomes the largest."""
    torch.manual_seed(0)
    heads, kv_heads, dim, value = 4, 2, 40, 24
    tables, pages = random_tables(2, 50)
    batch, angles = there(make_batch([(0, 5), (49, 50)], tables)), torch.rand(50, 6).to(DEVICE) * 6.3
    qkv = torch.randn(6, (heads + kv_heads) * dim + kv_heads * value).to(torch.bfloat16)
    qkv[3, -1], qkv[4, -2] = 1000.0, -1000.0
    norms = (
        tuple((1 + 0.1 * torch.randn(dim)).bfloat16().to(DEVICE) for _ in range(2)) if norm else (None, None)
    )
    found = []
    for dtype in (torch.bfloat16, FP8):
        k, v = (torch.zeros(pages, PAGE, kv_heads, n, device=DEVICE).to(dtype) for n in (dim, value))
        q = ops.rope_store(
            qkv.to(DEVICE), RopeTables(angles.cos(), angles.sin()), batch, k, v, heads, HeadNorms(*norms),
        )  # fmt: skip
        found.append([q.float().cpu(), k.float().cpu(), v.float().cpu()])
    (q, k, v), (q8, k8, v8) = found
    assert torch.equal(q, q8) and k8.isfinite().all()
    assert torch.equal(k8, k.clamp(-448, 448).to(FP8).float())
    assert torch.equal(v8, v.clamp(-448, 448).to(FP8).float())


@needs_cuda
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_an_engine_keeps_float8_and_finds_it_again(tiny_models, ops, share) -> None:
    """A cached prefix gives the tokens that it gave at first; probabilities are near those of bfloat16."""
    flags = {"kt_gpu_experts_ratio": share, "kt_cpuinfer": 2, "max_total_tokens": 1024}
    flags["disable_dynamic_expert_update"] = True  # answers of two runs are compared
    prompt = torch.randint(256, (48,), generator=torch.Generator().manual_seed(4)).tolist()
    scored = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    usual = LLM(str(tiny_models["qwen3_moe-gpu"]), **flags).generate([prompt], scored, progress=False)[0]
    llm = LLM(str(tiny_models["qwen3_moe-gpu"]), kv_cache_dtype="fp8_e4m3", **flags)
    states = llm.engine._runner._states
    assert {array.dtype for arrays in states for array in arrays} == {FP8}
    first, again = (llm.generate([prompt], scored, progress=False)[0] for _ in range(2))
    assert first.token_ids == again.token_ids and len(first.token_ids) == 8
    differences = [abs(a.logprob - b.logprob) for a, b in zip(usual.logprobs, first.logprobs, strict=True)][
        :1
    ]
    assert 0 < differences[0] < 0.5
