"""`kt bench prefill` measures each way of a prompt on a GPU."""

from __future__ import annotations

import pytest

from gpu import needs_cuda
from tandem.bench import prefill

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize(("share", "ways"), [(0.5, ("auto", "cpu", "bus")), (1.0, ("auto",))], ids=["streams", "all"])
def test_prompts_are_measured(share: float, ways: tuple[str, ...]) -> None:
    flags = prefill.PrefillFlags("qwen3-30b-a3b", ("INT4",), (share,), (64, 512), 1, repeats=2, ways=ways)
    rows = list(prefill.measure(flags))
    assert [(row["tokens"], row["way"]) for row in rows] == [(tokens, way) for tokens in (64, 512) for way in ways]
    assert all(row["tok_s"] > 0 and row["gpu_share"] == share for row in rows)
