"""The picture of `kt bench experts --plot`: tokens per second and hit rate over the share of experts on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.bench.figures import new_pyplot, save_figure


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    pyplot = new_pyplot()
    first = rows[0]
    simulated = first["bench"] == "experts_simulated"
    figure, (speed, hits) = pyplot.subplots(1, 2, figsize=(12, 5))
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        points = sorted((r for r in rows if r["strategy"] == strategy), key=lambda r: r["gpu_share"])
        shares = [100 * r["gpu_share"] for r in points]
        speed.plot(shares, [r["tok_s"] for r in points], marker="o", label=strategy)
        hits.plot(shares, [100 * r["hit"] for r in points], marker="o", label=strategy)
    label = "tokens/s, simulated by a cost model" if simulated else "tokens/s"
    speed.set(xlabel="% of experts on the GPU", ylabel=label, ylim=(0, None))
    hits.set(xlabel="% of experts on the GPU", ylabel="% of routed tokens computed there", ylim=(0, 100))
    speed.legend()
    source = "SIMULATED" if simulated else first["machine"]
    figure.suptitle(f"{first['config']}, {first['format']}, {first['routing']} routing: {source}")
    save_figure(figure, path, bbox_inches="tight")
