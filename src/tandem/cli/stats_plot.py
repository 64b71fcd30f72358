"""The picture of `kt stats --png`: heat map and cumulative shares."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.bench.figures import new_pyplot, save_figure
from tandem.experts.usage.usage_file import UsageRecord
from tandem.experts.usage.usage_summary import UsageSummary, by_chance, cumulative

LEAST, MOST = 1 / 16, 16.0  # of even use: the ends of the colours


def draw(path: Path, record: UsageRecord, summary: UsageSummary) -> None:
    pyplot = new_pyplot()
    layers = len(summary.layers)
    height = min(14.0, max(3.6, 0.16 * layers + 1.4))
    figure, (heat_axes, curve_axes) = pyplot.subplots(
        1, 2, figsize=(14, height), width_ratios=(2.2, 1), layout="constrained"
    )
    _heat(figure, heat_axes, summary)
    _curves(curve_axes, record, summary)
    figure.suptitle(_title(record, summary), fontsize="medium")
    save_figure(figure, path)


def _title(record: UsageRecord, usage: UsageSummary) -> str:
    tokens = f", {record.tokens:,} tokens" if record.tokens else ""
    return f"{record.model or 'expert usage'}{tokens}: {usage.effective:.1f} of {usage.experts} experts effective"


def _heat(figure, axes, usage: UsageSummary) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.colors import LogNorm

    image = axes.imshow(
        usage.relative.clamp(LEAST, MOST).numpy(),
        aspect="auto",
        interpolation="nearest",
        norm=LogNorm(LEAST, MOST),
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01, label="use, even use = 1")
    ticks = [2.0**i for i in range(-4, 5, 2)]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    marked = range(0, len(usage.layers), max(1, len(usage.layers) // 16))
    axes.set_yticks(list(marked), labels=[str(usage.layers[i].layer) for i in marked])
    axes.set(xlabel="expert", ylabel="layer")


def _curves(axes, record: UsageRecord, usage: UsageSummary) -> None:  # type: ignore[no-untyped-def]
    counts = record.total
    share = ((torch.arange(counts.numel()) + 1) / counts.numel() * 100).numpy()
    each = ((torch.arange(usage.experts) + 1) / usage.experts * 100).numpy()
    for row in counts:
        if bool(row.any()):
            axes.plot(each, (cumulative(row) * 100).numpy(), color="tab:blue", alpha=0.12, linewidth=0.8)
    axes.plot(share, (cumulative(counts) * 100).numpy(), color="tab:blue", label="all layers (thin: each)")
    chance = by_chance(counts)
    if bool(chance.any()):
        axes.plot(
            share, (cumulative(chance) * 100).numpy(), "--", color="tab:grey", label="even use, by chance"
        )
    axes.plot([0, 100], [0, 100], ":", color="tab:grey", label="even use")
    axes.set(xlabel="hottest experts, %", ylabel="routed tokens, %", xlim=(0, 100), ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
