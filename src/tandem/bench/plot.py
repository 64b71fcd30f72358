"""The roofline picture of `kt bench kernels --plot`."""

from __future__ import annotations

from pathlib import Path

from tandem.bench.ceilings import Ceilings
from tandem.bench.kernels.experts import Result
from tandem.errors import ConfigError

INTENSITIES = [2.0**i for i in range(-1, 12)]  # operations per byte


def draw_roofline(path: Path, ceilings: dict[str, Ceilings], results: list[Result]) -> None:
    """Attained TFLOPS over operations per byte: one roof per tier, one line per bench, format and tier."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('--plot needs matplotlib: pip install "tandem-moe[bench]"') from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for tier, each in ceilings.items():
        roof = [min(each.flops, i * each.read_gbps * 1e9) / 1e12 for i in INTENSITIES]
        axes.plot(INTENSITIES, roof, label=f"roof, {tier}", linestyle="--", color="grey")
    for (bench, shape, fmt, tier), points in _lines(results).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{bench} {shape} {fmt} {tier}")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of weights read", ylabel="TFLOPS")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")
    pyplot.close(figure)


def _lines(results: list[Result]) -> dict[tuple[str, str, str, str], list[tuple[float, float]]]:
    lines: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for r in results:
        intensity, tflops = r.operations / r.bytes_read, r.operations / r.ms / 1e9
        lines.setdefault((r.bench, r.shape, r.format, r.tier), []).append((intensity, tflops))
    return lines
