"""`GpuLinks`: what lies between two GPUs each, by nvidia-smi's matrices: links, and access to memory of the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations

from tandem.machine.gpus import ask_nvidia_smi

Ask = Callable[..., str]
Pair = tuple[int, int]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"NV\d+")
PEERS_WORK, PEERS_UNKNOWN = "OK", "U"
# nvidia-smi's words, nearest first. A word that is not among them is as far as can be.
NVLINK_HOPS = 0
HOPS = {"PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5}


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """Words of each pair of GPUs, by their numbers: of `topo -m`, and of `topo -p2p r`. Pairs may be missing: then
    nothing is known of them."""

    ways: Mapping[Pair, str] = field(default_factory=dict, hash=False)
    peers: Mapping[Pair, str] = field(default_factory=dict, hash=False)

    def no_nvlink(self, numbers: Iterable[int]) -> bool:
        """True where the driver says of two of these GPUs that no NVLink joins them, or that one cannot reach the
        other's memory, as in some virtual machines."""
        return any(self._no_nvlink(pair) for pair in combinations(numbers, 2))

    def hops(self, one: int, other: int) -> int:
        """How far one GPU is from another, in no unit: less is nearer. Equal for all where nothing is known."""
        word = self.ways.get((one, other), "")
        if _NVLINK.fullmatch(word):
            return HOPS["PHB"] if self._no_nvlink((one, other)) else NVLINK_HOPS
        return HOPS.get(word, len(HOPS) + 1)

    def _no_nvlink(self, pair: Pair) -> bool:
        return self._denied(pair) or self._denied(pair[::-1])

    def _denied(self, pair: Pair) -> bool:
        """True where the driver says it of this direction; ranks need both."""
        word, state = self.ways.get(pair, ""), self.peers.get(pair, PEERS_UNKNOWN)
        no_link = word not in ("", "X") and not _NVLINK.fullmatch(word)
        return no_link or state not in (PEERS_WORK, PEERS_UNKNOWN, "X")


def gpu_links(ask: Ask = ask_nvidia_smi) -> GpuLinks:
    """Asks the driver for both matrices at the same time; empty where it does not answer."""
    with ThreadPoolExecutor(2) as asking:
        ways, peers = asking.map(lambda words: topology(ask("topo", *words)), (("-m",), ("-p2p", "r")))
    return GpuLinks(ways, peers)


def topology(text: str) -> dict[Pair, str]:
    """The word of each pair of GPUs in nvidia-smi's matrix."""
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    words_of: dict[Pair, str] = {}
    for words in lines:
        if len(words) > len(columns) and re.fullmatch(r"GPU\d+", words[0]) and words != header:
            row = int(words[0][3:])
            words_of |= {(row, column): word for column, word in zip(columns, words[1:], strict=False)}
    return words_of
