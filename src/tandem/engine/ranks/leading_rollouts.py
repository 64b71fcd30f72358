"""`LeadingRollouts`: drafts of a first rank, which tells the other ranks what it makes before it runs its part."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from tandem.engine.ranks.leader import Leader
from tandem.engine.speculation.draft_batch import DraftRows
from tandem.engine.speculation.rollout import Rollouts
from tandem.errors import RanksApart

if TYPE_CHECKING:
    from tandem.kernels.gpu.ranks.gpu_group import GpuGroup


class LeadingRollouts:
    """`Rollouts`. Every rank chooses the same drafts: their logits have the same bits."""

    def __init__(self, rollouts: Rollouts, leader: Leader, group: GpuGroup | None) -> None:
        """group: which its operations use, on a GPU."""
        self._rollouts, self._leader, self._group = rollouts, leader, group

    @property
    def unusual(self) -> bool:
        return self._rollouts.unusual

    @property
    def confidences(self) -> Rows[Rows[float]]:
        return self._rollouts.confidences

    def chains(self, runs: list[DraftRows], widths: Rows[int]) -> list[list[int]]:
        """Raises RanksApart whatever fails: others may have gone on."""
        try:
            self._leader.drafts(runs, widths)
            drafts = self._rollouts.chains(runs, widths)
            if self._group is not None:
                self._group.check()
            return drafts
        except Exception as error:
            raise RanksApart("drafts of several ranks failed, and they would not meet again") from error
