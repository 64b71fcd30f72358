"""Prompts that leave some multiprocessors to those who decode."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from gpu import needs_cuda
from gpu_sessions import DECODED, PROMPT, Session, batch_of, on_the_cpu, rms
from tandem.engine.step import streams as gpu_pass
from tandem.engine.step.streams import reserved_stream
from tandem.errors import EngineError

pytestmark = [pytest.mark.gpu, needs_cuda]
SIX = list(range(6))
SPARED = 8


@triton.jit
def _where(out):
    i = tl.program_id(0) + tl.arange(0, 1)
    at = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + i, at)


def used(stream: torch.cuda.Stream) -> set[int]:
    """The multiprocessors that blocks of a kernel had, which is captured and replayed there."""
    out, graph = torch.zeros(20_000, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    _where[(len(out),)](out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        _where[(len(out),)](out)
    with torch.cuda.stream(stream):
        graph.replay()
    torch.cuda.synchronize()
    return set(out.tolist())


def test_a_stream_leaves_multiprocessors_alone() -> None:
    device = torch.device("cuda")
    everywhere, some = used(torch.cuda.Stream()), used(reserved_stream(device, SPARED))
    assert some < everywhere and len(everywhere) - len(some) >= SPARED


def test_more_than_there_are_cannot_be_spared() -> None:
    with pytest.raises(EngineError, match="--prefill-reserved-sms 10000: this GPU has"):
        reserved_stream(torch.device("cuda"), 10_000)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_prompt_is_what_it_is_with_all(tiny_models, monkeypatch, beside, cut) -> None:
    """In a pass beside those who decode, and in one alone, whose graphs are others. Libraries may add a product that is
    cut for fewer multiprocessors in another order; else the bits are the same. Those who decode have all."""
    if not cut:
        monkeypatch.setattr(gpu_pass, "products_leave", lambda count: nullcontext())
    path = tiny_models["qwen3_moe-gpu"]
    plain, session = Session(path, 1.0, (1, 8)), Session(path, 1.0, (1, 8), prompts=(PROMPT,), reserved_sms=SPARED)
    for each in (plain, session):
        each.step(SIX, 0, PROMPT)
    batch, decoded = batch_of([7], 0, PROMPT), []
    batch = replace(batch, logits_rows=batch.logits_rows[-1:])
    runner = session.runner
    assert runner._passes is not runner._prompts and runner._prompts.graph_of(batch) is not None
    if beside:
        paused = runner.paused(batch)
        with torch.inference_mode():
            while not paused.go_on(0.0, whole=len(decoded) == DECODED):
                if len(decoded) < DECODED:
                    decoded.append(session.step(SIX, PROMPT + len(decoded), 1))
        found = paused.logits().logits.cpu().clone()
    else:
        with torch.inference_mode():
            found = runner.logits(batch).logits.cpu().clone()
    assert bool(decoded) == beside
    for i, logits in enumerate(decoded):
        assert torch.equal(logits, plain.step(SIX, PROMPT + i, 1))
    whole, last = plain.step([7], 0, PROMPT)[0, -1:], plain.step([7], PROMPT, 1)
    after = session.step([7], PROMPT, 1)
    if not (cut and beside):
        assert torch.equal(found, whole) and torch.equal(after, last)
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    assert rms(found[0], exact[7, PROMPT - 1]) < 2 * rms(theirs, exact)
    assert rms(after[0, 0], exact[7, PROMPT]) < 2 * rms(theirs, exact)
