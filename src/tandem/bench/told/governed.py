"""Columns of the governor: which widths it chose, how often, and what it believed of steps and guesses."""

from __future__ import annotations

from typing import Any

from tandem.engine.protocol import SpeculationStats


def governed(stats: SpeculationStats) -> dict[str, Any]:
    """widths: how often a sequence had 0, 1, … guesses in a step. believed_ms: of a step where each sequence has so
    many. believed_chances: that a guess comes, by kind; a draft layer's first, second, …"""
    return {
        "widths": list(stats.widths),
        "believed_ms": [round(1e3 * seconds, 3) for seconds in stats.believed_seconds],
        "believed_chances": [round(chance, 3) for chance in stats.believed_chances],
    }


def governed_text(row: dict[str, Any]) -> str:
    """Text of such columns, for people."""
    chosen = ", ".join(f"{width}: {count}" for width, count in enumerate(row["widths"]) if count)
    text = f"widths chosen {chosen}"
    if not row["believed_ms"]:
        return text
    plain, *others = row["believed_ms"]
    slower = ", ".join(f"{each / plain:.2f}" for each in others)
    chances = ", ".join(f"{chance:.2f}" for chance in row["believed_chances"])
    return f"{text}; believed: a step {plain:.1f} ms, with guesses {slower} x; right {chances}"
