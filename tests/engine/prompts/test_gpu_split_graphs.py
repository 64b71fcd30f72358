"""Chunks whose experts bus and CPU share, as CUDA graphs: logits as without them, for every share, and after errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu import AVAILABLE, DEVICE, needs_cuda
from gpu_sessions import PROMPT, Session, batch_of, on_the_cpu, rms
from tandem.errors import EngineError
from tandem.kernels.packed.experts import PackedExperts
from tandem.models import ForwardBatch
from tandem.planner.forecast.stream_rates import StreamRates
from tandem.spec.gpu_scratch import StagingRing

if AVAILABLE:
    from tandem.engine.start.gpu_side import begin_step
    from tandem.experts.live.copies import CudaCopies, hold_all
    from tandem.experts.streaming.copy_stream import CudaCopyStream
    from tandem.experts.streaming.stream import ExpertStream, StreamReadings, streamed_layer

pytestmark = [pytest.mark.gpu, needs_cuda]
VARIANT, ROWS = "qwen3_moe-gpu", 32


def rates(share: float) -> StreamRates:
    return StreamRates(1000 * (1 - share) / share, 1000.0, 0.0, least_rows=9)


def shared(path: object, on_gpu: float, streamed: float, parts: int = 0) -> tuple[Session, ExpertStream]:
    """A session with a graph of 32 rows of which the CPU has a part. parts: of the ring; 0: so many that it holds two
    layers."""
    session = Session(path, on_gpu, (1, 8))
    hybrids = session.side.hybrids
    layers = [streamed_layer(each.cpu, each.gpu, session.side.ops) for each in hybrids]
    held = CudaCopies(DEVICE)
    assert hold_all([layer.cpu for layer in layers if layer], held)
    nbytes = max(layer.cpu.bytes_per_expert for layer in layers if layer)
    most = max(layer.cpu_slots for layer in layers if layer)
    ring = StagingRing(parts or 2 * -(-most // 2), 2, -(-2 * nbytes // 256) * 256)
    followed = StreamReadings(ask=session.usage.ask)
    stream = ExpertStream(layers, ring, CudaCopyStream(DEVICE, held), rates(streamed), DEVICE, followed)
    assert stream.holds_layers == (parts == 0)
    for index, each in enumerate(hybrids):
        each.stream, each.index = stream, index
    runner = session.runner
    runner._start = runner._begin_step = begin_step(session.side, stream)
    runner._plan = replace(runner._plan, no_decodes=False, splits=(ROWS,))
    with torch.inference_mode():
        runner._capture_prompts()
    assert ROWS in runner._splits._graphs
    return session, stream


def chunk(first: int, count: int, rows: int = 7) -> ForwardBatch:
    """Of one sequence; its last row's logits are wanted."""
    return replace(batch_of([rows], first, count), logits_rows=torch.tensor([count - 1]))


def last_row(session: Session, batch: ForwardBatch) -> torch.Tensor:
    with torch.inference_mode():
        return session.runner.logits(batch).logits.cpu().clone()[-1]


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("on_gpu", [0.0, 0.5])
def test_logits_are_those_of_the_cpu_whatever_is_streamed(tiny_models, on_gpu: float, parts: int) -> None:
    """One graph for every share, or one for each part; rows that fill it up change nothing, and decoding goes on from
    what it kept."""
    path = tiny_models[VARIANT]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    session, stream = shared(path, on_gpu, 0.5, parts)
    allowed, posts = 2 * rms(theirs, exact), session.side.handoff.times().posts
    for streamed in (0.5, 0.2, 0.75, 0.5):
        stream.rates, before = rates(streamed), stream.deliveries.bytes
        assert rms(last_row(session, chunk(0, PROMPT)), exact[7, PROMPT - 1]) < allowed
        assert stream.deliveries.bytes > before
        assert rms(session.step([7], PROMPT, 1)[0, 0], exact[7, PROMPT]) < allowed
    assert session.side.handoff.times().posts > posts + 4
    total = session.usage.read()
    assert (total.tokens.sum(1) == 4 * 3 * (PROMPT + 1)).all()


@pytest.mark.parametrize("parts", [0, 2])
def test_the_same_bits_each_time_and_after_errors(tiny_models, monkeypatch, parts: int) -> None:
    """An error of the CPU or of the bus fails its step alone."""
    session, stream = shared(tiny_models[VARIANT], 0.5, 0.5, parts)
    stream._followed = StreamReadings()  # so that the same ones are streamed
    right = last_row(session, chunk(0, PROMPT))
    assert all(torch.equal(last_row(session, chunk(0, PROMPT)), right) for _ in range(3))

    def fails(*_: object, **__: object) -> None:
        raise EngineError("on purpose")

    bus = stream.deliveries._bus
    for owner, name in ((PackedExperts, "forward"), (bus, "copy"), (bus, "compute_after")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, fails)
            with pytest.raises(EngineError, match="on purpose"):
                last_row(session, chunk(0, PROMPT))
        session.runner.after_failure()
        stream.rates = rates(0.5)
        assert torch.equal(last_row(session, chunk(0, PROMPT)), right)


def test_a_prompt_in_chunks_that_fit_a_graph_and_chunks_that_do_not(tiny_models) -> None:
    path = tiny_models[VARIANT]
    exact, theirs = on_the_cpu(path, "float32"), on_the_cpu(path, "bfloat16")
    session, _ = shared(path, 0.5, 0.5)
    given = []
    graph_of = session.runner._splits.graph_of
    session.runner._splits.graph_of = lambda batch, **how: given.append(graph_of(batch, **how)) or given[-1]
    last_row(session, chunk(0, 17))
    found = last_row(session, chunk(17, PROMPT - 17))
    assert [graph is not None for graph in given] == [True, False]
    assert rms(found, exact[7, PROMPT - 1]) < 2 * rms(theirs, exact)
