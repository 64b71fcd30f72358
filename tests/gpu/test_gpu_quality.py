"""`kt quality` of a placement: a model whose layers run on a GPU, one at a time, against the same on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu import needs_cuda
from tandem.cli.quality_run import QualityFlags, measure
from tandem.quality import text as texts
from tandem.quality.compare import OutputHead
from tandem.quality.stream import LayerStream, Variant
from windows import some_windows

SHARES = (0.0, 0.5, 1.0)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(texts.default_text()[:400], encoding="utf-8")
    return path


def logits_of(variant: Variant) -> torch.Tensor:
    stream = LayerStream(variant, some_windows())
    for index in range(len(stream.config.layers)):
        stream.advance(stream.layer(index), stream.hidden)
    return OutputHead(stream).logits(stream.hidden)


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).pow(2).mean().sqrt())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("share", SHARES)
def test_layers_on_a_gpu_give_the_logits_of_the_cpu(tiny_models, share: float) -> None:
    """As far from float32 as bfloat16 is on the CPU, half as much again: rounding points differ."""
    path = tiny_models["qwen3_moe-gpu"]
    exact = logits_of(Variant(path, dtype="float32", threads=1))
    cpu = logits_of(Variant(path, dtype="bfloat16", threads=1))
    gpu = logits_of(Variant(path, threads=1, gpu_share=share))
    assert not torch.equal(gpu, cpu)
    assert rms(gpu, exact) < 1.5 * rms(cpu, exact)


@pytest.mark.gpu
@needs_cuda
def test_the_divergence_of_placements_is_measured(tiny_models, text_file: Path) -> None:
    shared = {"text": text_file, "window": 64, "threads": 1}
    path = str(tiny_models["qwen3_moe-gpu"])
    report = measure(QualityFlags(path, gpu_shares=SHARES, **shared))
    assert [each.label for each in report.measured] == [
        "as stored, 0% on the GPU", "as stored, 50% on the GPU", "as stored, 100% on the GPU",
    ]  # fmt: skip
    rounded = measure(QualityFlags(path, dtype="bfloat16", reference_dtype="float32", **shared)).measured[0]
    assert rounded.divergence is not None
    for each in report.measured:
        assert each.divergence is not None and 0 < each.divergence.mean < 4 * rounded.divergence.mean


@pytest.mark.gpu
@needs_cuda
def test_layers_that_are_let_go_take_no_memory(tiny_models) -> None:
    stream = LayerStream(Variant(tiny_models["qwen3_moe-gpu"], threads=1, gpu_share=1.0), some_windows())
    used = []
    for _ in range(3):
        stream.advance(stream.layer(0), stream.hidden)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[2] == used[1]
