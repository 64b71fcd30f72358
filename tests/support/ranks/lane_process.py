"""A rank in a process of its own: `python lane_process.py RANK RANKS PATH SUMS MOST SECONDS`. It says
that it is here, sums what `Message` makes, says how many were wrong, and waits until it is ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 1 << 20  # bytes
TYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = 97  # of messages, one after the other


class Message(NamedTuple):
    """Numbers that ranks sum in call number `call`: other numbers in each, of 2 bytes to `most`."""

    call: int
    most: int

    @property
    def type(self) -> torch.dtype:
        return TYPES[0] if self.call % 8 else TYPES[self.call // 8 % 3]

    def cut(self, numbers: Tensor) -> Tensor:
        bytes = int(2 * (self.most / 2) ** ((self.call * 31 % SIZES) / (SIZES - 1)))
        first = self.call * 37 % 1009
        return numbers[first : first + max(1, bytes // self.type.itemsize)]


class Numbers:
    """Of all ranks what they send, and their sum in float32 in the order of ranks, rounded."""

    def __init__(self, ranks: int) -> None:
        self.of_rank = [[_numbers(rank, dtype) for dtype in TYPES] for rank in range(ranks)]
        self.sums = [_sum(list(each)) for each in zip(*self.of_rank, strict=True)]

    def own(self, rank: int, message: Message) -> Tensor:
        return message.cut(self.of_rank[rank][TYPES.index(message.type)]).clone()[None]

    def sum(self, message: Message) -> Tensor:
        return message.cut(self.sums[TYPES.index(message.type)])[None]


def _numbers(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    made = torch.randn(MOST // dtype.itemsize + 1009, generator=generator)
    made[6::4003], made[7::4007] = torch.inf, 3e38 if dtype != torch.float16 else 6e4
    return (made * 10.0 ** (rank - 1)).to(dtype)


def _sum(all_ranks: list[Tensor]) -> Tensor:
    total = all_ranks[0].float()
    for each in all_ranks[1:]:
        total = total + each.float()
    return total.to(all_ranks[0].dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


@contextlib.contextmanager
def lane_process(
    rank: int, ranks: int, path: str, sums: int, most: int = 64 << 10, seconds: float = 60.0
) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, __file__, *map(str, (rank, ranks, path, sums, most, seconds))]
    env = dict(os.environ, PYTHONPATH=":".join(sys.path))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


def main(rank: int, ranks: int, path: str, sums: int, most: int, seconds: float) -> None:
    from tandem.kernels.ranks.shm import ShmGroup

    torch.set_num_threads(1)
    group, numbers = ShmGroup(rank, ranks, path, seconds), Numbers(ranks)
    print("here", flush=True)
    different = 0
    for call in range(sums):
        message = Message(call, most)
        different += not torch.equal(
            bits(group.sum(numbers.own(rank, message))), bits(numbers.sum(message))
        )
    print(different, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    rank, ranks, path, sums, most, seconds = sys.argv[1:]
    main(int(rank), int(ranks), path, int(sums), int(most), float(seconds))
