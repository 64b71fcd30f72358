"""The roofline picture of `kt bench kernels --plot`."""

from __future__ import annotations

from pathlib import Path

from tandem.bench.ceilings import Ceilings
from tandem.bench.figures import new_pyplot, save_figure
from tandem.bench.kernels.experts import Result

INTENSITIES = [2.0**i for i in range(-1, 12)]  # operations per byte


def draw_roofline(path: Path, ceilings: dict[str, Ceilings], results: list[Result]) -> None:
    """Attained TFLOPS over operations per byte: one roof per tier, one line per bench, format and tier."""
    pyplot = new_pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for tier, each in ceilings.items():
        roof = [min(each.flops, i * each.read_gbps * 1e9) / 1e12 for i in INTENSITIES]
        axes.plot(INTENSITIES, roof, label=f"roof, {tier}", linestyle="--", color="grey")
    for (bench, shape, fmt, tier), points in _lines(results).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{bench} {shape} {fmt} {tier}")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weights read", ylabel="TFLOPS")
    axes.legend(fontsize="small")
    save_figure(figure, path, bbox_inches="tight")


def _lines(results: list[Result]) -> dict[tuple[str, str, str, str], list[tuple[float, float]]]:
    lines: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for r in results:
        intensity, tflops = r.operations / r.bytes_read, r.operations / r.ms / 1e9
        lines.setdefault((r.bench, r.shape, r.format, r.tier), []).append((intensity, tflops))
    return lines
