"""Which attention kernels are chosen, what is said where they cannot run; PyTorch's and FlashInfer's over our pages.

Both run on GPUs only; elsewhere stand-ins compute what their documentation says, in float64, and PyTorch's own shape
function (for tensors without memory) checks how it is called.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from gpu import DEVICE, READS_PAGES
from paged_batches import Batch
from plans import ATTENTION, MODEL, MOE, NORM, machine, plan, reason, with_gpu
from tandem.errors import ConfigError, KernelError
from tandem.kernels.gpu.attention_backends import attention_of
from tandem.kernels.gpu.attention_flashinfer import AttentionShape, FlashInferAttention
from tandem.kernels.gpu.attention_torch import TorchAttention
from tandem.kernels.reference import TorchOps
from tandem.mechanisms.grouped_query.shape import Gqa
from tandem.planner.attention_backend import release
from tandem.spec.layers import pre_norm
from tandem.spec.model_config import ModelConfig

PAGE = 256


def with_attention(*mixers: Gqa) -> ModelConfig:
    """The made-up model with layers of these in turn."""
    layers = tuple(pre_norm(mixers[i % len(mixers)], MOE, NORM) for i in range(30))
    return replace(MODEL, layers=layers)


@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_tritons_kernels_are_the_default(asked: str) -> None:
    p = plan(with_gpu(), attention_backend=asked)
    assert p.gpu is not None and p.gpu.attention == "triton"
    assert ("--attention-backend" in reason(p, "attention")) == (asked != "auto")


@pytest.mark.parametrize("asked", ["torch", "torch_native", "TORCH"])
def test_pytorchs_kernels_are_taken_when_asked_for(asked: str) -> None:
    p = plan(replace(with_gpu(), torch="2.13.1+cu130"), attention_backend=asked, page_size=512)
    assert p.gpu is not None and p.gpu.attention == "torch"


@pytest.mark.parametrize(
    ("version", "flags", "says"),
    [
        ("2.11.0+cu130", {"page_size": 256}, r"this is 2\.11\.0\+cu130; pip install 'torch>=2\.13'"),
        ("", {"page_size": 256}, "this is an unknown version"),
        ("2.13.0", {}, "a multiple of 256 tokens, not 16; give --page-size 256"),
    ],
)  # fmt: skip
def test_what_pytorchs_kernels_lack_is_named(version: str, flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(replace(with_gpu(), torch=version), attention_backend="torch", **flags)


def test_heads_that_pytorchs_kernels_do_not_have() -> None:
    model = with_attention(replace(ATTENTION, head_dim=100))
    with pytest.raises(ConfigError, match="multiple of 8 and at most 256 channels, not 100; take --attention"):
        plan(replace(with_gpu(), torch="2.14.0"), model, attention_backend="torch", page_size=256)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("", r"which is not installed; pip install 'flashinfer-python>=0\.5'"),
        ("0.2.5", r"this is 0\.2\.5; pip"),
    ],
)
def test_a_missing_flashinfer_is_named(version: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(replace(with_gpu(), flashinfer=version), attention_backend="flashinfer")


def test_flashinfer_is_taken_when_asked_for() -> None:
    there = replace(with_gpu(), flashinfer="0.6.0")
    p = plan(there, attention_backend="flashinfer")
    assert p.gpu is not None and p.gpu.attention == "flashinfer"
    for wrong in ((replace(ATTENTION, head_dim=48),), (ATTENTION, replace(ATTENTION, window=128))):
        with pytest.raises(ConfigError, match="take --attention-backend triton"):
            plan(there, with_attention(*wrong), attention_backend="flashinfer")


@pytest.mark.parametrize("asked", ["triton", "torch", "flashinfer"])
def test_a_cpu_has_kernels_of_its_own(asked: str) -> None:
    made = plan(machine(), attention_backend=asked)
    assert made.gpu is None
    assert [note for note in made.notices if f"--attention-backend {asked} changes nothing" in note]
    assert not plan(machine(), attention_backend="auto").notices


def test_a_small_gpu_is_not_given_up_silently() -> None:
    made = plan(with_gpu(free=7 << 27), attention_backend="triton")
    assert made.gpu is None
    assert [note for note in made.notices if "--attention-backend triton changes nothing" in note]
    assert "H100 is too small" in reason(made, "device")


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0a0+git1", (2, 13)), ("10.2", (10, 2)), ("", (0, 0)), ("git", (0, 0))]
)
def test_releases(version: str, numbers: tuple[int, int]) -> None:
    assert release(version) == numbers


def test_a_pytorch_without_pages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: query)
    with pytest.raises(ConfigError, match=r"reads no pages; pip install 'torch>=2\.13'"):
        attention_of("torch")
    with pytest.raises(ConfigError, match="unknown attention backend 'other'"):
        attention_of("other")


def test_a_flashinfer_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="--attention-backend flashinfer: .*pip install flashinfer-python"):
        attention_of("flashinfer", SHAPE, torch.device("cpu"))


def paged(spans: list[tuple[int, int]], single: int) -> tuple[Batch, int]:
    """As `paged_batches.make_batch`, with pages of PAGE tokens."""
    width = -(-max(end for _, end in spans) // PAGE)
    tables = torch.randperm(len(spans) * width).view(len(spans), width).int()
    positions = torch.cat([torch.arange(*span) for span in spans])
    starts = torch.tensor([0, *(end - begin for begin, end in spans)]).cumsum(0).int()
    lens = torch.tensor([end for _, end in spans]).int()
    return replace(
        Batch(positions, positions, starts, lens, tables, lens), single_rows=single
    ), tables.numel()


def documented(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """`varlen_attn` with pages, after its documentation; causal windows end at the last key."""
    left, right = options["window_size"]
    assert options["num_splits"] == 1 and options["enable_gqa"] and k.shape[1] % PAGE == 0
    assert cu_q[0] == 0 and cu_q[-1] == len(q) and cu_k.shape == cu_q.shape
    rows = cu_q.diff()
    assert (
        max_q >= rows.max()
        and max_k >= options["seqused_k"].max()
        and len(rows) == len(options["block_table"])
    )
    out = torch.empty_like(q)
    for s, (table, used) in enumerate(
        zip(options["block_table"], options["seqused_k"].tolist(), strict=True)
    ):
        mine = slice(int(cu_q[s]), int(cu_q[s + 1]))
        keys, values = (pages[table.long()].flatten(0, 1)[:used].double() for pages in (k, v))
        x = q[mine].double().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("tgrd,ngd->tgrn", x, keys) * options["scale"]
        offset = torch.arange(used) - (torch.arange(len(x)) + used - len(x))[:, None]  # key - its row's own
        least, most = (-left if left >= 0 else -used), (right if right >= 0 else used)
        hidden = ((offset < least) | (offset > most))[:, None, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        out[mine] = torch.einsum("tgrn,ngd->tgrd", scores.softmax(-1), values).flatten(1, 2).to(q.dtype)
    return out


SPANS = [
    ([(599, 600), (0, 1), (70, 71)], 0),
    ([(0, 37), (590, 600), (128, 129)], 0),
    ([(599, 600), (70, 71), (0, 37), (590, 600), (5, 6)], 2),
]


@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize(("spans", "single"), SPANS)
def test_pytorchs_function_is_called_as_documented(
    spans: list[tuple[int, int]], single: int, window: int
) -> None:
    torch.manual_seed(0)
    batch, pages = paged(spans, single)
    k, v = torch.randn(2, pages, PAGE, 2, 16).unbind()
    q = torch.randn(len(batch.positions), 6, 16)
    got = TorchAttention(documented)(q, k, v, batch, 0.25, window)
    expected = TorchOps().attention(q, k, v, batch, 0.25, window)
    torch.testing.assert_close(got, expected, rtol=2.0**-15, atol=2.0**-15)  # at most 600 terms of size 1


@pytest.mark.skipif(not READS_PAGES, reason="PyTorch before 2.13: no block tables")
def test_pytorchs_function_takes_these_arguments() -> None:
    batch, pages = paged(*SPANS[2])
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    there = {name: each.to("meta") for name, each in tensors.items() if torch.is_tensor(each)}
    k = torch.empty(pages, PAGE, 2, 64, dtype=torch.bfloat16, device="meta")
    q = torch.empty(len(batch.positions), 8, 64, dtype=torch.bfloat16, device="meta")
    assert TorchAttention()(q, k, k, replace(batch, **there), 0.1, 40).shape == (len(q), 8 * 64)


class Paged:
    """FlashInfer's wrapper for chunks, after its documentation: plans in CPU memory, or in the buffers of a graph."""

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        use_cuda_graph: bool = False,
        backend: str = "auto",
        **kept: Tensor,
    ) -> None:
        assert layout == "NHD" and len(kept) == (4 if use_cuda_graph else 0)
        self.kept, self.plans = kept, 0

    def plan(
        self, starts: Tensor, first: Tensor, pages: Tensor, last: Tensor, *shape: int, **options: Any
    ) -> None:
        self.plans += 1
        assert all(t.dtype is torch.int32 and t.device.type == "cpu" for t in (starts, first, pages, last))
        assert shape == (SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, SHAPE.page_size) and options["causal"]
        assert len(pages) == first[-1] and len(last) == len(first) - 1
        self.options = options
        self.arrays = [starts, first, pages, last]
        if self.kept:
            assert starts.diff().eq(1).all(), "a graph has one row of each sequence"
            for buffer, values in zip(self.kept.values(), self.arrays, strict=True):
                buffer[: len(values)] = values
            self.arrays = list(self.kept.values())

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        starts, first, indices, last = self.arrays
        lens = (first.diff() - 1) * SHAPE.page_size + last
        tables = torch.zeros(len(lens), int(first.diff().max()), dtype=torch.int32)
        for s in range(len(lens)):
            tables[s, : first[s + 1] - first[s]] = indices[first[s] : first[s + 1]]
        positions = torch.cat(
            [torch.arange(n - rows, n) for n, rows in zip(lens, starts.diff(), strict=True)]
        )
        batch = Batch(positions, positions, starts, lens, tables, lens)
        assert self.options["window_left"] == SHAPE.window - 1
        return TorchOps().attention(q, *pages, batch, self.options["sm_scale"], SHAPE.window).view(q.shape)


SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=16, scale=0.25, window=40, page_size=PAGE, pages=3)


@pytest.mark.parametrize(("spans", "single"), SPANS)
def test_flashinfer_plans_before_a_step(spans: list[tuple[int, int]], single: int) -> None:
    torch.manual_seed(0)
    batch, pages = paged(spans, single)
    k, v = torch.randn(2, pages, PAGE, 2, 16).unbind()
    q = torch.randn(len(batch.positions), 6, 16)
    attend = FlashInferAttention(SHAPE, torch.device("cpu"), Paged)
    attend.begin(batch, False)
    assert torch.equal(attend(q, k, v, batch, 0.25, 40), TorchOps().attention(q, k, v, batch, 0.25, 40))
    with pytest.raises(KernelError, match="not 0.25, 0"):
        attend(q, k, v, batch, 0.25, 0)


def test_a_graphs_plan_is_made_anew_in_the_same_memory() -> None:
    torch.manual_seed(0)
    made: list[Paged] = []

    def wrapper(*arguments: Any, **options: Any) -> Paged:
        made.append(Paged(*arguments, **options))
        return made[-1]

    attend = FlashInferAttention(SHAPE, torch.device("cpu"), wrapper)
    for lens in ((1, 1, 1), (600, 3, 257), (2, 768, 5)):
        batch, pages = paged([(n - 1, n) for n in lens], 3)
        k, v = torch.randn(2, pages, PAGE, 2, 16).unbind()
        q = torch.randn(3, 6, 16)
        attend.begin(batch, True)
        assert torch.equal(attend(q, k, v, batch, 0.25, 40), TorchOps().attention(q, k, v, batch, 0.25, 40))
    attend.begin(paged([(4, 5)], 1)[0], True)
    assert [each.plans for each in made] == [0, 3, 1]  # outside graphs, of three rows, of one


@pytest.mark.gpu
@pytest.mark.skipif(
    not READS_PAGES or not torch.cuda.is_available(), reason="no NVIDIA GPU, or PyTorch before 2.13"
)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("spans", "single"), SPANS)
def test_pytorchs_kernels(spans: list[tuple[int, int]], single: int, window: int) -> None:
    torch.manual_seed(0)
    batch, pages = paged(spans, single)
    k, v = torch.randn(2, pages, PAGE, 2, 64).to(torch.bfloat16).unbind()
    q = torch.randn(len(batch.positions), 8, 64).to(torch.bfloat16)
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved = {name: each.to(DEVICE) for name, each in tensors.items() if torch.is_tensor(each)}
    got = TorchAttention()(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), replace(batch, **moved), 0.125, window)
    expected = TorchOps().attention(q.double(), k.double(), v.double(), batch, 0.125, window)
    # weights are rounded to bfloat16 and sum to 1 over values of size 1; so is the result
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2.0**-6, atol=2.0**-7)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None or not torch.cuda.is_available(),
    reason="no NVIDIA GPU, or FlashInfer is not installed",
)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("spans", "single"), SPANS)
def test_flashinfers_kernels(spans: list[tuple[int, int]], single: int, window: int) -> None:
    torch.manual_seed(0)
    batch, pages = paged(spans, single)
    k, v = torch.randn(2, pages, PAGE, 2, 64).to(torch.bfloat16).unbind()
    q = torch.randn(len(batch.positions), 8, 64).to(torch.bfloat16)
    attend = attention_of("flashinfer", AttentionShape(8, 2, 64, 0.125, window, PAGE, 3), DEVICE)
    expected = TorchOps().attention(q.double(), k.double(), v.double(), batch, 0.125, window)
    for captured in [False, True] if len(q) == len(spans) else [False]:
        attend.begin(batch, captured)
        got = attend(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), batch, 0.125, window)
        torch.testing.assert_close(got.cpu().double(), expected, rtol=2.0**-6, atol=2.0**-7)  # as above
