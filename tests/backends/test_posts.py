"""Posts that nobody counts, as beside a GPU. The kernels are played on the CPU; the thread that answers is real."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.backends import Host, ModelExperts, experts_config, gpu_side
from tandem.experts import mailbox as module
from tandem.experts.handoff_counts import HandoffSizes
from tiny import TinyModels

SKIPPED, ROWS, PATIENCE = 4, 8, 20.0
POSTED, LAYER, COUNT, FLAGS, DONE = 0, 1, 2, 3, 32
CPU = torch.device("cpu")


def numbers(address: int, count: int, kind: type) -> Any:
    """Memory at an address as an array."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), (count,))


class PlayedKernels:
    """What csrc and mailbox_kernels.cu agree on; posts and answers have one number."""

    def __init__(self) -> None:
        self.posts = 0

    def launch(
        self, kernel: str, _blocks: int, _threads: int, _stream: int, base: int, _state: int, *rest: Any
    ) -> None:
        words = numbers(base, 160, ctypes.c_uint32)
        self.post(words, *rest) if kernel == "post" else self.collect(words, *rest)

    def post(self, words: Any, *given: Any) -> None:
        x, ids, slots, weights, mail_x, mail_ids, mail_weights, rows, tokens, units, k, layer, flags = map(int, given)
        assert not rows and not flags
        pairs = tokens * k
        ctypes.memmove(mail_x, x, tokens * units * 16)
        ctypes.memmove(mail_weights, weights, pairs * 4)
        here = numbers(slots, pairs, ctypes.c_int32) == -1
        numbers(mail_ids, pairs, ctypes.c_int32)[:] = np.where(here, numbers(ids, pairs, ctypes.c_int32), -1)
        self.posts += 1
        words[LAYER], words[COUNT], words[FLAGS] = layer, tokens, flags
        words[POSTED] = self.posts

    def collect(self, words: Any, result: int, out: int, _rows: int, tokens: Any, units: Any, _patience: Any) -> None:
        until = time.monotonic() + PATIENCE
        while words[DONE] != self.posts:
            assert time.monotonic() < until, "no answer came"
            time.sleep(1e-4)
        ctypes.memmove(out, int(result), int(tokens) * int(units) * 16)


def aligned_zeros(*shape: Any, pin_memory: bool | None = None, **options: Any) -> Tensor:
    if pin_memory is None:
        return torch.empty(*shape, **options).zero_()
    room = np.zeros(shape[0] + 128, dtype=np.uint8)
    first = -room.ctypes.data % 128
    return torch.from_numpy(room[first : first + shape[0]])


@pytest.fixture
def handoffs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[gpu_side.PostingHandoff]]:
    """Those that models are made with from now on, instead of batches that are computed at once."""
    played, made = PlayedKernels(), list[gpu_side.PostingHandoff]()
    monkeypatch.setattr(module, "kernels", lambda _device: ("post", "collect", "hint"))
    monkeypatch.setattr(module, "launch", played.launch)
    monkeypatch.setattr(module.Mailbox, "_stream", lambda _self: 0)
    monkeypatch.setattr(module, "torch", SimpleNamespace(**vars(torch) | {"zeros": aligned_zeros}))

    def store(model: ModelExperts, _config: object) -> gpu_side.OwnHybrids:
        hidden, top_k = model.config.expert_channels, model.config.moe.router.top_k
        made.append(gpu_side.PostingHandoff(HandoffSizes(ROWS, ROWS, hidden, top_k), CPU, PATIENCE))
        return gpu_side.OwnHybrids(model.ops, hidden, model.host.skipped, made[-1])

    monkeypatch.setattr(ModelExperts, "_store", store)
    yield made
    for handoff in made:
        if handoff._mailbox is not None:
            handoff._mailbox.thread.stop()


def opened(tiny_models: TinyModels) -> ModelExperts:
    config = experts_config(str(tiny_models["qwen3_moe"]), {"kt_cpuinfer": 2}, "bfloat16", "a test")
    return ModelExperts(config, Host(skipped=SKIPPED))


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    ids = torch.stack([torch.randperm(12)[:3] for _ in range(rows)])
    return torch.randn(rows, 72).bfloat16(), ids, torch.rand(rows, 3)


def test_answers_come_until_they_are_stopped(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    plain = opened(tiny_models)
    right = {number: plain.layer(number) for number in plain.config.moe_layers}
    (handoffs, posting) = request.getfixturevalue("handoffs"), opened(tiny_models)
    layers = {number: posting.layer(number) for number in right}
    assert handoffs[0]._mailbox is None, "nothing is begun before a batch comes"
    own = torch.arange(12) == 7
    for rows in (1, 8, 3):  # of no known number
        for number in layers:
            x, ids, weights = batch(rows)
            ids[0, 0] = -1  # a row that fills up
            for elsewhere in (None, own):
                got, wanted = (
                    each[number].wait(each[number].submit(x, ids, weights, elsewhere)) for each in (layers, right)
                )
                assert got.dtype == x.dtype
                torch.testing.assert_close(got, wanted, rtol=2**-7, atol=2**-7)  # one is rounded a step earlier
    assert handoffs[0].used()[0] == 2 * 3 * len(layers)


def test_a_failure_ends_the_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("a layer threw")

    statuses = list[int]()
    monkeypatch.setattr(gpu_side.os, "_exit", statuses.append)
    with caplog.at_level(logging.ERROR):
        gpu_side._watch(SimpleNamespace(thread=SimpleNamespace(finish=fails)))
    assert statuses == [gpu_side.FAILED] and "a layer threw" in caplog.text
    gpu_side._watch(SimpleNamespace(thread=SimpleNamespace(finish=lambda: None)))  # stopped: nothing ends
    assert len(statuses) == 1
