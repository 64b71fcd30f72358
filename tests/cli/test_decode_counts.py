"""What rows of `kt bench decode --config` say about steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tandem.bench.decode_counts import StepCounts
from tandem.experts.handoff_counts import HandoffTimes, PrefetchCounts


def counted(posts: int, experts: int, hints: PrefetchCounts, times: HandoffTimes) -> StepCounts:
    handoff: Any = SimpleNamespace(used=lambda: (posts, experts), hints=lambda: hints, times=lambda: times)
    return StepCounts.now(cast(Any, handoff), None)


def test_what_two_repeats_used_is_added_up() -> None:
    before = counted(10, 70, PrefetchCounts(60, 30, 1000), HandoffTimes(10, 1.0, 2.0))
    after = counted(14, 100, PrefetchCounts(80, 45, 5000), HandoffTimes(14, 1.5, 3.0))
    new = after.since(before)
    columns = new.plus(new).columns(steps=4)
    assert new.cpu_experts_per_step(48) == 30 / 4 * 48
    assert columns["hint_hit"] == 0.75 and columns["ahead_bytes_per_step"] == 2 * 4000 // 4
    assert (columns["wait_us"], columns["cpu_us"]) == (125000.0, 250000.0)


def test_steps_without_the_cpu_have_no_rates() -> None:
    columns = StepCounts().columns(steps=3)
    assert not any(columns.values()) and StepCounts().cpu_experts_per_step(48) == 0
