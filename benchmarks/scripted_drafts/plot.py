"""The picture of `kt bench decode --overlap … --plot`: what draft tokens gain, over the share of them that is
accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.figures import new_pyplot, save_figure

Line = tuple[str, list[float], list[float]]


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    figure, axes = new_pyplot().subplots(figsize=(9, 6))
    axes.axhline(1.0, linestyle=":", color="grey", label="without drafts")
    for label, acceptances, ratios in lines(rows):
        axes.plot(acceptances, ratios, marker="o", label=label)
    axes.set(xlabel="share of the draft tokens that are accepted", ylabel="tokens/s, beside those without drafts")
    axes.legend(fontsize="small")
    first = rows[0]
    figure.suptitle(f"{first['config']}, {first['algorithm']}, overlap {first['overlap']:g}: {first['machine']}")
    save_figure(figure, path, bbox_inches="tight")


def lines(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """One for each format, share of experts on the GPU, batch and width: its name, acceptances and ratios."""
    series = dict[str, list[tuple[float, float]]]()
    for r in rows:
        width = f"up to {r['steps']}" if r["governor"] else f"always {r['steps']}"
        label = f"{r['format']}, {r['gpu_share']:.0%} on the GPU, batch {r['batch']}: {width}"
        series.setdefault(label, []).append((r["acceptance"], r["ratio"]))
    return [(label, [x for x, _ in sorted(points)], [y for _, y in sorted(points)]) for label, points in series.items()]
