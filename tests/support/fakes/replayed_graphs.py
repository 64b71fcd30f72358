"""A GPU's runner without a GPU: what is captured is run again at each replay, on streams that are only noted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event
from typing import Any

import pytest
import torch

from fake_model import FakeTokenizer, fake_config, fake_plan
from pausing_model import PausingFake
from plans import gpu_plan
from tandem.engine import gpu_runner
from tandem.engine.engine import Engine
from tandem.engine.graphs.decode_graphs import DecodeCapture, DecodeGraph
from tandem.engine.graphs.prefill_graphs import GraphPiece, PrefillGraphs
from tandem.engine.sampling.logits import best_of
from tandem.engine.speculation.draft import Drafter
from tandem.engine.start import parts
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.prefill import LayerPieces, PrefillTask
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes

CPU = torch.device("cpu")


class ReplayedModel(PausingFake):
    """Rows that only fill a graph up write nothing; before any chunk there is nothing to read."""

    def forward(self, batch: Any, kv: Any) -> torch.Tensor:
        kept = [tuple(array.clone() for array in layer) for layer in kv]
        idle = not batch.seq_lens.any()
        logits = torch.zeros(len(batch.logits_rows), 64) if idle else super().forward(batch, kv)
        copies = batch.cache_slots < 0  # the fake's store has put them into the last place
        if copies.any():
            for layer, before in zip(kv, kept, strict=True):
                for array, old in zip(layer, before, strict=True):
                    array.view(-1)[-1] = old.view(-1)[-1]
        return logits


class NotedStart:
    """`StepHooks`. alone: the GPU computes passes without the CPU. shares: bus and CPU share experts."""

    def __init__(self, calls: list[str], alone: bool, shares: bool) -> None:
        self.calls, self.alone, self.shares, self.held = calls, alone, shares, False

    def __call__(self, batch: Any, captured: bool) -> None:
        self.calls.append(f"begin {'graph' if captured else 'kernels'} of {len(batch.input_ids)}")

    def load_kernels(self, batch: Any, streamed: Any) -> None:
        self.calls.append(f"load kernels {len(batch.input_ids)}")

    def pausable(self) -> bool:
        return True

    def begin_task(self, batch: Any, split: bool = False) -> bool:
        assert not self.held, "one pass at a time"
        self.held = True
        self.calls.append("hold split" if split else "hold")
        return self.alone or split

    def end_task(self) -> None:
        self.held = False
        self.calls.append("release")

    def replayable(self, split: bool = False) -> bool:
        return True

    def may_split(self, rows: int) -> bool:
        return self.shares

    def splits(self, rows: int) -> bool:
        return self.shares

    def recording(self, recorder: object) -> Any:
        return nullcontext()


class NotedStreams:
    """`Streams` of a GPU, by name."""

    calls: list[str]

    def __init__(self, device: torch.device, apart: bool, reserved_sms: int = 0) -> None:
        self.steps, self.reserved_sms = object() if apart else None, reserved_sms

    def enter(self) -> None:
        self.calls.append("enter")

    @contextmanager
    def side_stream(self, after: bool = True, reserve_sms: bool = False) -> Iterator[None]:
        self.calls.append(f"aside{' after' if after else ''}{' sparing' if reserve_sms and self.reserved_sms else ''}")
        yield
        self.calls.append("back")

    def cut(self, reserve_sms: bool) -> Any:
        return nullcontext()

    def finish(self) -> None:
        self.calls.append("streams end")

    def join(self) -> None:
        self.calls.append("join")


class NotedHandoff(Handoff):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(HandoffSizes(8, 64, 1, 1), CPU, 20.0)
        self.calls = calls

    def begin(self, posts: int) -> None:
        self.calls.append("posts begin")

    def finish(self) -> None:
        self.calls.append("posts end")

    def cancel(self) -> None:
        self.calls.append("posts cancelled")

    def check(self) -> None:
        self.calls.append("check")


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None: ...

    def pool(self) -> str:
        return "memory"

    def replay(self) -> None: ...


class FakeEvent:
    """`torch.cuda.Event` that has come."""

    def __init__(self, **_: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def without_gpu(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """From now on runners of GPUs are made so, in this process."""
    captured, of_prompts = DecodeCapture.captured, PrefillGraphs._captured

    def replaying(self: DecodeCapture, inputs: Any, *how: Any, plain: bool = False) -> DecodeGraph:
        graph = captured(self, inputs, *how, plain=plain)

        def replay() -> None:
            calls.append(f"replay {len(graph.logits)}{' plain' if plain else ''}")
            inputs.send()
            graph.logits.copy_(self.forward(inputs.batch, inputs.counted))
            graph.best.copy_(best_of(graph.logits, graph.masks))

        graph.graph.replay = replay  # type: ignore[method-assign]
        return graph

    def replaying_piece(self: PrefillGraphs, work: LayerPieces, index: int) -> GraphPiece:
        of_prompts(self, work, index)
        last = index == work.count - 1
        logits = work.result()[0] if last else torch.empty(0)

        def give() -> None:
            calls.append(f"piece {index}")
            work.give(index)
            if last:
                logits.copy_(work.result()[0])

        return GraphPiece([give])

    patch.setattr(DecodeCapture, "captured", replaying)
    patch.setattr(PrefillGraphs, "_captured", replaying_piece)
    patch.setattr(NotedStreams, "calls", calls, raising=False)
    patch.setattr(gpu_runner, "Streams", NotedStreams)
    patch.setattr(parts, "split_sizes", lambda sizes: sizes)  # shorter chunks than any that pays
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.cuda, "Event", FakeEvent)


def replayed_engine(
    patch: pytest.MonkeyPatch, *, alone: bool = True, shares: bool = False, sizes: tuple[int, ...] = (1, 2, 4),
    prompts: tuple[int, ...] = (16,), ring: int = 0, shared_tokens: int = 0, reserved_sms: int = 0,
    plain: tuple[int, ...] = (), drafter: Drafter | None = None, leader: Any = None, group: Any = None, **plan: Any,
) -> tuple[Engine, list[str]]:  # fmt: skip
    """An engine, and what its runner does, in order. alone, shares: as `NotedStart`; ring: whether experts are
    streamed. plain: rows that have a graph of steps without drafts, too. leader, group: of several ranks."""
    calls: list[str] = []
    without_gpu(patch, calls)
    gpu = gpu_plan(
        graph_sizes=sizes, prompt_sizes=prompts, ring_bytes=ring, shared_tokens=shared_tokens,
        reserved_sms=reserved_sms, plain_graph_sizes=plain,
    )  # fmt: skip
    made = fake_plan(gpu=gpu, **{"max_step_tokens": 64} | plan)
    own = EngineParts(
        made, fake_config(), ReplayedModel(), FakeTokenizer(), handoff=NotedHandoff(calls),
        begin_step=NotedStart(calls, alone, shares), drafter=drafter, leader=leader, group=group,
    )  # fmt: skip
    engine = Engine.from_parts(own)
    engine._scheduler.pace.slice_seconds = lambda: 0.0  # a piece, whatever it takes
    return engine, calls


def hold_last_piece(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """The launch thread stays before a task's last piece until it is stopped. Without this the thread may give all of
    them within one step: how many depends on the machine's load."""
    launcher, released = engine.gpu_runner._launcher, Event()
    if launcher is None:
        return
    wait, stop = PrefillTask.wait_for_room, launcher.stop

    def wait_for_room(task: PrefillTask) -> None:
        wait(task)
        if task.pieces_left() == 1:
            assert released.wait(60), "nobody stopped the launch thread"

    patch.setattr(PrefillTask, "wait_for_room", wait_for_room)
    patch.setattr(launcher, "stop", lambda: [released.set(), stop()])
