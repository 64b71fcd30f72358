"""One mailbox for the stages of several GPUs, whose kernels are played: one thread answers all posts of a step."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from quiet_clock import PATIENCE
from tandem import _core
from tandem.errors import EngineError
from tandem.experts import mailbox as module
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.mailbox_kernels import GAVE_UP
from tandem.experts.stage_handoffs import StageHandoffs
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import Routing

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 48, 32, 6, 3
SIZES = HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K)
POSTED, LAYER, COUNT, FLAGS, DONE = 0, 1, 2, 3, 32
TWO = [torch.device("cpu"), torch.device("cpu", 0)]  # which PyTorch holds for different ones


def numbers(address: Any, count: int, kind: Any) -> npt.NDArray[Any]:
    return np.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(kind)), (count,))


def run(kernel: str, base: int, state: int, *rest: Any) -> None:
    """As mailbox_kernels.cu does it: posts are counted in `state`, of each GPU."""
    words, count = numbers(base, 160, ctypes.c_uint32), numbers(state, 2, ctypes.c_int32)
    if kernel == "collect":
        result, out, _, tokens, units, _ = rest
        until = time.monotonic() + PATIENCE
        while words[DONE] != count[0]:
            assert time.monotonic() < until, "no answer came"
            time.sleep(1e-4)
        ctypes.memmove(int(out), int(result), int(tokens) * int(units) * 16)
        return
    x, ids, _, weights, mail_x, mail_ids, mail_weights, _, tokens, units, k, layer, flags = map(int, rest)
    for target, source, nbytes in ((mail_x, x, units * 16), (mail_ids, ids, k * 4), (mail_weights, weights, k * 4)):
        ctypes.memmove(target, source, tokens * nbytes)
    count[0] += 1
    words[LAYER], words[COUNT], words[FLAGS] = layer, tokens, flags
    words[POSTED] = count[0]


class Stages:
    """Two layers, each on a stage of its own, whose graphs are lists of launches."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.graphs: list[list[Any]] = [[], []]
        self.handoffs = StageHandoffs(SIZES, devices, PATIENCE)
        workspace = _core.Workspace(_core.WorkerPool([-1, -1]), "scalar")
        self.layers = [PackedExperts(workspace, EXPERTS, HIDDEN, WIDTH, "bf16") for _ in range(2)]
        for layer in self.layers:
            for expert in range(EXPERTS):
                shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
                layer.load(expert, *map(torch.randn, shapes))
        pairs = zip(self.handoffs.stages, self.layers, strict=True)
        self.numbers = [handoff.add(layer) for handoff, layer in pairs]
        ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(2)]).int()
        self.x, self.routing = torch.randn(2, HIDDEN).bfloat16(), Routing(ids, torch.rand(2, TOP_K))
        self.slots = torch.full_like(ids, -1)
        self.results: list[Tensor] = []

    def record(self, launched: list[Any]) -> None:
        for number, handoff in enumerate(self.handoffs.stages):
            with handoff.recording() as posted:
                handoff.post(self.numbers[number], self.x, self.routing, self.slots)
                self.results.append(handoff.collect(2))
            assert posted == [self.numbers[number]]
            self.graphs[number] = list(launched)
            launched.clear()

    def replay(self) -> None:
        first, last = (each.mailbox for each in self.handoffs.stages)
        assert first is not None and last is not None
        self.handoffs.begin(2)
        for number, graph in enumerate(self.graphs):
            if number:
                last.take_over(first)
            for kernel, (_blocks, _threads, _stream, *rest) in graph:
                run(kernel, *rest)
        first.take_over(last)
        self.handoffs.finish()
        self.handoffs.check()

    def expected(self) -> list[Tensor]:
        out = [torch.zeros(2, HIDDEN) for _ in self.layers]
        for layer, result in zip(self.layers, out, strict=True):
            layer.forward(self.x, self.routing.ids, self.routing.weights, result)
        return out


@pytest.fixture(params=[TWO, TWO[:1] * 2], ids=["two", "one"])
def stages(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stages]:
    launched: list[Any] = []
    zeros = torch.zeros

    def aligned(*shape: Any, pin_memory: bool | None = None, **options: Any) -> Tensor:
        if pin_memory is None:
            return zeros(*shape, **options)
        room = np.zeros(shape[0] + 128, dtype=np.uint8)
        first = -room.ctypes.data % 128
        return torch.from_numpy(room[first : first + shape[0]])

    monkeypatch.setattr(module, "kernels", lambda _device: ("post", "collect", "hint"))
    monkeypatch.setattr(module, "launch", lambda kernel, *rest: launched.append((kernel, rest)))
    monkeypatch.setattr(module.Mailbox, "_stream", lambda _self: 0)
    monkeypatch.setattr(module.torch, "zeros", aligned)
    made = Stages(request.param)
    made.record(launched)
    yield made
    assert made.handoffs.mailbox is not None
    made.handoffs.mailbox.thread.stop()


def test_posts_of_all_stages_are_one_sequence(stages: Stages) -> None:
    """Step after step, and the layers have numbers of their own."""
    assert stages.numbers == [0, 1]
    for step in range(3):
        stages.replay()
        assert stages.handoffs.used()[0] == 2 * (step + 1)
        assert all(map(torch.equal, stages.results, stages.expected()))
    assert stages.handoffs.times().posts == 6


def test_a_stage_that_gave_up_fails_its_step_alone(stages: Stages) -> None:
    """All GPUs count from nothing again."""
    stages.replay()
    mailbox = stages.handoffs.mailbox
    assert mailbox is not None
    mailbox._words[GAVE_UP] = 1
    with pytest.raises(EngineError, match="the GPU has given up"):
        stages.handoffs.check()
    assert all(each.mailbox._state.eq(0).all() for each in stages.handoffs.stages)
    stages.replay()
    assert all(map(torch.equal, stages.results, stages.expected()))


def test_what_is_rehearsed_or_not_computed_is_so_for_all_stages() -> None:
    handoffs = StageHandoffs(SIZES, [TWO[0]] * 3, PATIENCE)
    with handoffs.rehearsing(), handoffs.computing_nothing():
        assert all(each.takes_predictions(1) and not each.copies.computes for each in handoffs.stages)
    assert not any(each.takes_predictions(1) for each in handoffs.stages)
    assert all(each.copies.computes for each in handoffs.stages)
