"""A rank's process in tests on GPUs: `python gpu_rank.py FOLDER RANK RANKS MODEL [MODEL …]`.

Of each tiny model it writes the logits of teacher-forced sequences, for shares of the experts on the GPU, in graphs and
kernel by kernel: FOLDER/MODEL-SHARE-GRAPHS.RANK.pt, with the counts of the experts that it chose.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gpu_sessions import Session
from tandem.kernels.ranks.meeting import Meeting

CASES = [(0.0, (1, 8), False), (0.5, (1, 8), False), (0.5, (), False), (1.0, (1, 8), False), (0.5, (1, 8), True)]
"""Shares, rows of graphs, and whether experts move at every step."""


def case_name(path: Path, share: float, graphs: tuple[int, ...], moving: bool) -> str:
    return f"{path.name}-{share:.0%}-{'graphs' if graphs else 'kernels'}{'-moving' * moving}"


def main(folder: Path, rank: int, ranks: int, paths: list[Path]) -> None:
    for path in paths:
        for share, graphs, moving in CASES:
            name = case_name(path, share, graphs, moving)
            meeting = Meeting(rank, ranks, f"{folder}/{name}", 60.0)
            session = Session(path, share, graphs, moving=moving, meeting=meeting)
            logits = session.logits(together=True)
            session.group.check()
            torch.save((logits, session.usage.tokens), folder / f"{name}.{rank}.pt")
            meeting.share("computed", b"-")
            print(name, "rank", rank, session.group.text(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(each) for each in sys.argv[4:]])
