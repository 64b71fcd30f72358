"""The picture of `kt bench serve --long-prompt --plot`: how many gaps are how long, alone and beside long prompts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tandem.bench.figures import new_pyplot, save_figure
from tandem.bench.gaps.readers import Gap, GapFigures
from tandem.bench.rows import Row


def draw(path: Path, row: Row, readings: GapFigures) -> None:
    """Left the gaps as they came, right how many are longer."""
    pyplot = new_pyplot()
    figure, (timeline, shares) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for prompt in readings.loaded_prompts:
        timeline.axvspan(prompt.sent, prompt.answered, color="tab:orange", alpha=0.15, linewidth=0)
    gaps = list(readings.gaps())
    timeline.plot([gap.ended for gap in gaps], _ms(gaps), ".", markersize=2)
    timeline.set(xlabel="seconds (shaded: a long prompt runs)", ylabel="gap, ms", yscale="log")
    for name, gap_group in (("alone", readings.idle_gaps()), ("beside long prompts", readings.loaded_gaps())):
        longest = np.sort(_ms(gap_group))[::-1]
        shares.plot(longest, (np.arange(len(longest)) + 1) / len(longest), label=f"{name}, {len(gap_group)} gaps")
    shares.axvline(row["idle_p50_ms"], linestyle=":", color="tab:grey", label="median alone")
    shares.axhline(0.01, linestyle="--", color="tab:grey", linewidth=0.8)
    shares.set(xlabel="gap, ms", ylabel="share that is longer", xscale="log", yscale="log")
    shares.legend(fontsize="small")
    figure.suptitle(_title(row), fontsize="medium")
    save_figure(figure, path)


def _ms(gaps: list[Gap]) -> list[float]:
    return [1e3 * gap.seconds for gap in gaps]


def _title(row: Row) -> str:
    prompt = f"prompts of {row['tokens']:,} tokens at {row['prompt_share']:.0%} of their speed alone"
    return f"{row['config']}: P99 beside {row['p99_over_idle']:.1f} times the median alone; {prompt}"
