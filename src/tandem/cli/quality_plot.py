"""The picture of `kt quality --plot`: errors by layer, one line per format."""

from __future__ import annotations

from pathlib import Path

from tandem.bench.figures import new_pyplot, save_figure
from tandem.quality.compare import CandidateResult


def draw(path: Path, measured: tuple[CandidateResult, ...]) -> None:
    """Relative errors of hidden states over layers, logarithmic: "total" solid, "own" dashed."""
    pyplot = new_pyplot()
    from matplotlib.ticker import FormatStrFormatter

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for each in measured:
        layers = [error.layer for error in each.layers]
        total = [100 * error.total for error in each.layers]
        [line] = axes.plot(layers, total, label=f"{each.label}, all layers up to it")
        own = [100 * error.own for error in each.layers]
        axes.plot(
            layers, own, linestyle="--", color=line.get_color(), label=f"{each.label}, this layer alone"
        )
    axes.set(yscale="log", xlabel="layer", ylabel="relative error of hidden states, %")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    if measured:
        axes.legend(fontsize="small")
    save_figure(figure, path, bbox_inches="tight")
