"""`quality_lines`: what rounding is known to cost the model whose speed was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.planner.forecast.quantisations import known_figures

UNROUNDED = ("BF16", "F32")


def quality_lines(model: str, is_demo: bool, formats: Sequence[str]) -> Iterator[str]:
    """A line for each format that rounds: the demo model's KL, or how to measure another model's."""
    figures = known_figures()
    for name in (name.upper() for name in formats):
        if name in UNROUNDED:
            continue
        if is_demo and name in figures:
            yield f"{name}: {_line(figures[name])} (docs/quality.md)"
        else:
            yield f"{name}: what it costs is not known here; kt quality {model} --format {name} measures it"


def _line(figures: dict[str, float]) -> str:
    kl = f"{figures['kl']:.4f} ± {figures['kl_error']:.4f}"
    return f"KL {kl} nats against bf16, the same top token at {figures['same_top']:.1%}"
