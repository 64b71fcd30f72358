"""`table`: rows of `kt bench decode --config`, as they are shown."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table(rows: list[dict[str, Any]]) -> Table:
    rates = Table(
        title="Decoding with experts on GPU and CPU; hit = routed tokens on the GPU, MB = experts read per step,\n"
        "bound = GPU step without experts + experts' bytes, foreseen = used ones among the CPU's that were foreseen"
    )
    for name in (
        "format",
        "GPU share",
        "hit",
        "CPU MB",
        "GPU MB",
        "batch",
        "step ms",
        "tokens/s",
        "bound",
        "share",
        "foreseen",
    ):
        rates.add_column(name, justify="right")
    for r in rows:
        if r["bench"] == "decode":
            rates.add_row(
                r["format"], f"{r['gpu_share']:.0%}", f"{r['hit']:.0%}", f"{r['cpu_bytes_per_step'] / 1e6:.0f}",
                f"{r['gpu_bytes_per_step'] / 1e6:.0f}", str(r["batch"]), f"{r['step_ms']:.2f}", f"{r['tok_s']:.1f}",
                f"{r['bound_tok_s']:.1f}", f"{r['share']:.0%}", f"{r['hint_hit']:.0%}" if r["foresight"] else "off",
            )  # fmt: skip
    return rates
