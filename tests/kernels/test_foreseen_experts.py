"""Layers whose experts were foreseen: tasks belong to the workers that fetched their weights, and no bit changes."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from tandem import _core
from tandem.formats.reference import STORED
from tandem.kernels.cpu import PackedExperts, WorkerPool, Workspace

EXPERTS, HIDDEN, WIDTH, TOP_K = 12, 352, 160, 4  # 10 pairs of panels of gate and up, 11 of down
POSTED, LAYER, COUNT, DONE, HINTED, HINT_LAYER, HINT_IDS = 0, 1, 2, 32, 128, 129, 130
PATIENCE = [0.005 * 4**i for i in range(5)]  # seconds in which a hint is seen, if the machine is not too busy
Batch = tuple[Tensor, Tensor, Tensor]


def layer_of(
    nodes: list[int], tier: str, fmt: str = "int4", group: int = 32, **choices: bool
) -> PackedExperts:
    torch.manual_seed(0)
    workspace = Workspace(WorkerPool([-1] * len(nodes), 20, nodes), tier)
    make = partial(PackedExperts, workspace, EXPERTS, HIDDEN, WIDTH)
    layer = make(**choices) if fmt in STORED else make(fmt, group=group, **choices)
    for expert in range(EXPERTS):
        gate, up, down = (torch.randn(s).bfloat16() / 16 for s in (*[(WIDTH, HIDDEN)] * 2, (HIDDEN, WIDTH)))
        cases.load_expert(layer, expert, (gate, up, down), fmt, group)
    return layer


def batch(tokens: int) -> Batch:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    ids[0, 0] = -1  # lives elsewhere
    return torch.randn(tokens, HIDDEN).bfloat16(), ids, torch.rand(tokens, TOP_K)


def answers(
    layer: PackedExperts, posts: list[Batch], hints: list[list[int]], seconds: float
) -> tuple[list[Tensor], int]:
    """What a mailbox answers to these posts, with hints before the second and later ones, which it has some time to
    see; and what was foreseen. Post after post, by a thread that writes as the GPU's kernels do."""
    tokens = len(posts[0][0])
    *at, size = _core.mailbox_offsets(4, HIDDEN, TOP_K)
    room = np.zeros(size + 128, dtype=np.uint8)
    memory = torch.from_numpy(room)[-room.ctypes.data % 128 :][:size]
    words, got = memory[:640].view(torch.int32), list[Tensor]()
    mailbox = _core.Mailbox(memory, 4, HIDDEN, TOP_K)
    mailbox.add(layer.core)

    def part(index: int, count: int, dtype: torch.dtype) -> Tensor:
        return memory[at[index] : at[index] + count * dtype.itemsize].view(dtype)

    def gpu() -> None:
        for number, (post, hint) in enumerate(zip(posts, [*hints, []], strict=True), 1):
            for index, values in enumerate(post):
                part(index, values.numel(), values.dtype).copy_(values.flatten())
            words[LAYER], words[COUNT] = 0, tokens
            words[POSTED] = number
            while int(words[DONE]) != number:
                time.sleep(1e-4)
            got.append(part(3, tokens * HIDDEN, torch.float32).view(tokens, HIDDEN).clone())
            part(4, len(hint), torch.int32).copy_(torch.tensor(hint, dtype=torch.int32))
            words[HINT_LAYER], words[HINT_IDS] = 0, len(hint)
            words[HINTED] = number
            time.sleep(seconds)

    thread = threading.Thread(target=gpu)
    thread.start()
    posts_thread = _core.PostThread(mailbox)
    posts_thread.begin(len(posts), 20.0)
    posts_thread.finish()
    thread.join()
    return got, mailbox.hits


def check(layer: PackedExperts, tokens: int) -> None:
    posts = [batch(tokens) for _ in range(5)]
    chosen = [sorted({e for e in ids.flatten().tolist() if e >= 0}) for _, ids, _ in posts]
    others = [e for e in range(EXPERTS) if e not in chosen[2]]
    hints = [
        chosen[1],
        [*chosen[2][1:], *others][: 4 * TOP_K],  # some of them, and wrong ones
        [*others[:2], *reversed(chosen[3])],  # wrong ones before
        [e for e in range(EXPERTS) if e not in chosen[4]],  # none of them
    ]
    expected = [layer.forward(x, ids, weights, torch.empty(tokens, HIDDEN)) for x, ids, weights in posts]
    for seconds in PATIENCE:
        got, hits = answers(layer, posts, hints, seconds)
        assert all(map(torch.equal, got, expected))
        if hits == sum(len({*hint} & {*ids}) for hint, ids in zip(hints, chosen[1:], strict=True)):
            return
    raise AssertionError("hints were not seen")


@pytest.mark.parametrize("tier", cases.TIERS)
@pytest.mark.parametrize(
    ("fmt", "group"), [("bf16", 0), ("int4", 32), ("int8", 0), ("fp8", 128), ("int4_zeros", 32)]
)
def test_bits_are_those_of_experts_that_were_not_foreseen(fmt: str, group: int, tier: str) -> None:
    cases.require_tier(tier)
    check(layer_of([0, 0, 0], tier, fmt, group), tokens=1)


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0] * 7, [0, 0, 1], [0, 1, 1, 2, 2, 2]], ids=str)
def test_any_number_of_workers_and_memory_nodes(nodes: list[int], tokens: int) -> None:
    check(layer_of(nodes, cases.PLAIN_TIER), tokens)


def test_more_workers_than_pairs_of_panels() -> None:
    check(layer_of([0] * 14, cases.PLAIN_TIER, "bf16", 0), tokens=2)


def test_experts_that_are_used_in_place() -> None:
    layer = layer_of([0, 0, 1], cases.PLAIN_TIER, "bf16", 0, in_place=True)
    assert layer.in_place
    check(layer, tokens=2)


def test_integers() -> None:
    check(layer_of([0, 0], cases.PLAIN_TIER, int8_activations=True), tokens=2)
