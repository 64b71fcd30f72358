"""The hand-off's Python side without a GPU: when the mailbox is made, and what a GPU that gave up does to a step. The
CUDA kernels are played by the test, which writes what they would write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem import _core
from tandem.errors import EngineError
from tandem.experts import mailbox as module
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes, PrefetchCounts
from tandem.experts.mailbox_kernels import GAVE_UP, HEADER, SOURCE, WORDS
from tandem.kernels.cpu import PackedExperts
from tandem.kernels.ops import Routing

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 4, 48, 32, 6, 3
SIZES = HandoffSizes(TOKENS, TOKENS, HIDDEN, TOP_K)
POSTED, LAYER, COUNT, DONE = (WORDS[name] for name in ("Posted", "Layer", "Tokens", "Done"))
HINTED, HINT_LAYER, HINT_IDS = (WORDS[name] for name in ("Hinted", "HintLayer", "HintIds"))


class Replay:
    """One layer behind a hand-off whose `launch` records what a graph would run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[int | None] = []
        self.launched: list[Any] = []
        monkeypatch.setattr(module, "kernels", self._kernels)
        monkeypatch.setattr(module, "launch", lambda kernel, *rest: self.launched.append((kernel, rest)))
        monkeypatch.setattr(module.Mailbox, "_stream", lambda _self: 0)
        monkeypatch.setattr(module.torch, "zeros", aligned_zeros(torch.zeros))
        self.handoff = Handoff(SIZES, torch.device("cpu"), 20.0)

    def _kernels(self, device_index: int | None) -> tuple[str, str, str]:
        self.compiled.append(device_index)
        return "post", "collect", "prefetch"

    def layer(self) -> PackedExperts:
        layer = PackedExperts(
            _core.Workspace(_core.WorkerPool([-1, -1]), "scalar"), EXPERTS, HIDDEN, WIDTH, "bf16"
        )
        for expert in range(EXPERTS):
            layer.load(
                expert, torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH)
            )
        return layer

    @property
    def mailbox(self) -> module.Mailbox:
        assert self.handoff._mailbox is not None
        return self.handoff._mailbox

    def post(self, number: int, x: Tensor, routing: Routing) -> None:
        """As the kernel does it."""
        at_x, at_ids, at_weights, *_ = self.mailbox._at
        for at, values in ((at_x, x.view(torch.int16)), (at_ids, routing.ids), (at_weights, routing.weights)):
            size = values.numel() * values.element_size()
            self.mailbox._memory[at : at + size].view(values.dtype).copy_(values.flatten())
        words = self.mailbox._words
        words[LAYER], words[COUNT], words[POSTED] = 0, len(x), number


def answer(handoff: Handoff, posts: int) -> None:
    handoff.begin(posts)
    handoff.finish()


def aligned_zeros(zeros: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Pinned memory begins at a page; the mailbox wants 128 bytes at least."""

    def made(*shape: Any, pin_memory: bool | None = None, **options: Any) -> Tensor:
        if pin_memory is None:
            return zeros(*shape, **options)
        assert not pin_memory
        room = np.zeros(shape[0] + 128, dtype=np.uint8)
        first = -room.ctypes.data % 128
        return torch.from_numpy(room[first : first + shape[0]])

    return made


def batch(tokens: int) -> tuple[Tensor, Routing]:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    return torch.randn(tokens, HIDDEN).bfloat16(), Routing(ids, torch.rand(tokens, TOP_K))


def test_kernels_are_compiled_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(monkeypatch)
    number = replay.handoff.add(replay.layer())
    x, routing = batch(2)
    with replay.handoff.recording() as posted:
        assert replay.compiled == [None] and not replay.launched
        replay.handoff.post(number, x, routing, torch.full_like(routing.ids, -1))
        replay.handoff.collect(2)
        assert posted == [number]
    assert replay.compiled == [None] and [kernel for kernel, _ in replay.launched] == ["post", "collect"]


def test_a_post_says_its_half_and_whether_it_is_its_step_s_last(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(monkeypatch)
    numbers = [replay.handoff.add(replay.layer()) for _ in range(3)]
    replay.handoff.last = numbers[-1]
    x, routing = batch(2)
    for _ in range(2):  # each recording begins with the first half
        with replay.handoff.recording():
            for number in numbers:
                replay.handoff.post(number, x, routing, torch.full_like(routing.ids, -1))
    flags = [int(rest[-1]) for _, rest in replay.launched]
    assert flags == [0, _core.SECOND_HALF, _core.LAST_POST] * 2


def test_without_experts_in_cpu_memory_no_mailbox_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-core need not be installed then."""
    replay = Replay(monkeypatch)
    with replay.handoff.recording() as posted:
        pass
    assert posted == [] and replay.compiled == []
    answer(replay.handoff, 0)
    replay.handoff.check()


def test_a_gpu_that_gave_up_while_the_cpu_computed_fails_this_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = Replay(monkeypatch)
    replay.handoff.add(replay.layer())
    with replay.handoff.recording():
        pass
    mailbox, (x, routing) = replay.mailbox, batch(3)
    replay.post(1, x, routing)
    answer(replay.handoff, 1)  # answers: it looks at GAVE_UP only while nothing is posted
    mailbox._state[1], mailbox._words[GAVE_UP] = 1, 1  # what `collect` does when its patience ends
    with pytest.raises(EngineError, match="took longer than 20 s: the GPU has given up"):
        replay.handoff.check()
    assert mailbox._state.eq(0).all() and not mailbox._words[:128].any()
    replay.handoff.check()
    replay.post(1, x, routing)  # numbers begin anew on both sides
    answer(replay.handoff, 1)
    assert mailbox._words[DONE] == 1
    replay.handoff.check()


def test_only_small_graphs_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups run what a graph will run, but nobody would hear them."""
    replay = Replay(monkeypatch)
    handoff, number, (_, routing) = replay.handoff, replay.handoff.add(replay.layer()), batch(2)
    routing = routing._replace(slots=torch.full_like(routing.ids, -1))
    assert not handoff.takes_predictions(1)
    handoff.prefetch(number, routing)
    with handoff.rehearsing():
        assert handoff.takes_predictions(1)
        handoff.prefetch(number, routing)
    assert not replay.launched
    with handoff.recording() as posted:
        most = _core.MOST_HINTED_TOKENS
        assert handoff.takes_predictions(most) and not handoff.takes_predictions(most + 1)
        handoff.prefetch(number, routing)
        assert posted == []  # nobody answers a hint
    (kernel, (blocks, _, _, header, _, ids, _, to, count, each, layer)), *others = replay.launched
    assert not others and (kernel, blocks, count, each, layer) == ("prefetch", 1, 2 * TOP_K, TOP_K, number)
    assert ids == routing.ids.data_ptr() and to == header + replay.mailbox._at[4]
    assert not handoff.takes_predictions(1)


def test_without_foresight_nothing_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(monkeypatch)
    replay.handoff.add(replay.layer())
    replay.handoff.foresight = False
    with replay.handoff.recording():
        assert not replay.handoff.takes_predictions(1)
    with replay.handoff.rehearsing():
        assert not replay.handoff.takes_predictions(1)
    assert replay.handoff.hints() == PrefetchCounts()


def test_a_failed_step_s_hint_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(monkeypatch)
    replay.handoff.add(replay.layer())
    with replay.handoff.recording():
        pass
    mailbox, (x, routing) = replay.mailbox, batch(1)
    mailbox._words[HINT_LAYER], mailbox._words[HINT_IDS], mailbox._words[HINTED] = 0, TOP_K, 1
    replay.post(1, x, routing)
    answer(replay.handoff, 1)
    mailbox._state[1], mailbox._words[GAVE_UP] = 1, 1
    with pytest.raises(EngineError):
        replay.handoff.check()
    for number in (1, 2):
        replay.post(number, x, routing)
        answer(replay.handoff, 1)
    assert replay.handoff.hints() == PrefetchCounts()


def test_both_ends_mean_the_same_word() -> None:
    """One file has the words: the GPU's source begins with it, and the CPU's includes it."""
    assert SOURCE.startswith(HEADER) and len(WORDS) == len(set(WORDS.values())) == 10
    assert f"kGaveUp = {GAVE_UP}," in HEADER
    csrc = Path(__file__).parents[2] / "csrc" / "experts" / "handoff" / "mailbox.cc"
    text = csrc.read_text(encoding="utf-8")
    assert '#include "experts/mailbox_words.h"' in text and "enum" not in text
    for name in WORDS:
        assert re.search(rf"\bk{name}\b", SOURCE.removeprefix(HEADER) + text), name


@pytest.mark.parametrize("is_open", [False, True])
def test_work_is_taken_only_while_posts_are_answered(is_open: bool) -> None:
    """What a step without posts leaves would be done beside a later one, while a prompt may read what it changes."""
    handoff, works = Handoff(SIZES, torch.device("cpu"), 20.0), list[Any]()
    core = SimpleNamespace(is_open=is_open, meanwhile=works.append)
    handoff._mailbox = SimpleNamespace(core=core)  # type: ignore[assignment]
    handoff.between_answers("an exchange")  # type: ignore[arg-type]
    assert works == ["an exchange"] * is_open
