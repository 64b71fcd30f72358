"""`GpuGroup`: ranks of one host, a GPU each. Sums and gathered columns are kernels, in CUDA graphs, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.errors import EngineError, RankLost
from tandem.kernels.gpu.ranks.lane import BF16, COPY, F32, SHORT_BYTES, TWO_SHOT_BYTES, Lane, graph_seconds
from tandem.kernels.gpu.ranks.lane_memory import LANES
from tandem.kernels.ranks.meeting import Meeting

_log = logging.getLogger(__name__)

TRIES, TRIED_BYTES = 50, 14336  # of the sums that choose a lane
TRY_SECONDS = 5.0  # of patience then: memory of peers that loses what is written would cost a whole start's
START_SECONDS = 300.0  # until graphs are captured: one rank may compile kernels that another finds in a cache
STEP_SECONDS = 60.0  # in steps: by so much one rank may compute longer than another, compilers included


class GpuGroup:
    """`Group` through the faster lane of those that this machine has, which is found by trying."""

    def __init__(self, meeting: Meeting, device: torch.device, lanes: tuple[str, ...] = LANES) -> None:
        """Raises EngineError where there is none."""
        self._rank, self._ranks, self._device = meeting.rank, meeting.ranks, device
        self.seconds: dict[str, float] = {}  # of a sum of TRIED_BYTES, by lane
        lane_by_name = dict(self._usable_lanes(meeting, lanes))
        if not lane_by_name:
            raise EngineError(f"no way between GPUs works: {'; '.join(self.failures)}")
        best = min(self.seconds, key=lambda name: self.seconds[name])
        self.lane = lane_by_name[meeting.share("lane", best.encode())[0].decode()]  # rank 0's choice
        _log.info("sums of %d ranks go through %s: %s", self._ranks, self.lane.name, self.text())

    def text(self) -> str:
        times = [f"{name} {seconds * 1e6:.1f} us" for name, seconds in self.seconds.items()]
        return ", ".join([*times, *self.failures])

    def _usable_lanes(self, meeting: Meeting, lanes: tuple[str, ...]) -> Iterator[tuple[str, Lane]]:
        """Those that work and are right on all ranks."""
        self.failures: list[str] = []
        for name in lanes:
            try:
                lane = Lane(name, meeting, self._device)
            except RankLost:
                raise
            except EngineError as error:
                self.failures.append(f"{name}: {error}")
                continue
            lane.be_patient(TRY_SECONDS)
            right = self._is_right(lane)
            if not meeting.agree(f"{name}-right", right):
                self.failures.append(f"{name}: wrong sums")
                continue
            self.seconds[name] = self._tried(lane)
            lane.be_patient(START_SECONDS)
            yield name, lane

    def _is_right(self, lane: Lane) -> bool:
        """Whether sums of all kinds of messages are. Memory of peers may be reachable and not be what was written."""
        for nbytes in (16, TRIED_BYTES, SHORT_BYTES[lane.name], (1 << 20) + 16, self._two_shots()):
            each = [self._example(rank, nbytes) for rank in range(self._ranks)]
            expected = self._example(0, nbytes).float()
            for other in each[1:]:
                expected = expected + other.float()
            for _ in range(3):
                own = each[self._rank].clone()
                lane.send(own, own, BF16)
                if not torch.equal(own, expected.to(torch.bfloat16)):
                    return False
        return True

    def _two_shots(self) -> int:
        """Bytes of a sum in two shots, where there are such."""
        return -(-TWO_SHOT_BYTES // (16 * self._ranks)) * 16 * self._ranks

    def _example(self, rank: int, nbytes: int) -> Tensor:
        values = torch.arange(nbytes // 2, device=self._device) * (2 * rank + 1) % 251
        return (values * (rank + 1) / 64).to(torch.bfloat16)

    def _tried(self, lane: Lane) -> float:
        x = torch.zeros(TRIED_BYTES // 2, dtype=torch.bfloat16, device=self._device)
        return graph_seconds(lambda: lane.send(x, x, BF16), TRIES)

    def sum(self, rows: Tensor) -> Tensor:
        if not rows.numel():  # no kernel wants to run for nothing
            return rows
        rows = rows.contiguous()
        kind = {torch.bfloat16: BF16, torch.float32: F32}[rows.dtype]
        self.lane.send(rows, rows, kind)
        return rows

    def gather(self, columns: Tensor, whole: int) -> Tensor:
        rows, own = columns.shape
        if not rows:  # of a chunk that is not its prompt's last
            return columns.new_empty(0, whole)
        multiple = 16 // columns.element_size()
        each = -(-whole // self._ranks)
        padded = -(-each // multiple) * multiple
        # `pad` copies what needs no padding, too: the logits of 128 rows are 40 MB.
        x = columns.contiguous() if own == padded else torch.nn.functional.pad(columns, (0, padded - own)).contiguous()
        out = x.new_empty(rows, self._ranks, padded)
        self.lane.send(x, out, COPY)
        return out[:, :, :each].reshape(rows, -1)[:, :whole]

    def be_patient(self, seconds: float) -> None:
        self.lane.be_patient(seconds)

    def check(self) -> None:
        """After a step. Raises RankLost."""
        self.lane.check()
