"""`kt bench experts`: tokens per second by share of experts on the GPU and by strategy, for a given routing.

On a GPU the model of `kt bench decode --config` decodes with its experts chosen by a trace (`gpu_rows.py`). Without
one, or with --simulate, the same placements and live policy run against the trace. A cost model
(`experts/live/cost.py`) then says how long a step takes, and every result says "simulated".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.bench.architectures import named_config
from tandem.bench.figures import check_matplotlib
from tandem.bench.placement.plot import draw
from tandem.bench.placement.request import SIMULATED, PlacementFlags, shape_columns, traffic
from tandem.bench.placement.simulation import simulate_live, simulate_static
from tandem.bench.placement.traces import ROUTINGS
from tandem.bench.rows import kept_rows, say, stamp
from tandem.bench.stored import expert_bytes
from tandem.experts.live.cost import StepCost
from tandem.experts.live.policy import PolicySettings
from tandem.experts.placement import place
from tandem.machine.machine import Machine
from tandem.spec.model_config import ModelConfig

LAYER_SECONDS = (
    35.5e-6  # of a GPU step beside reading dense weights: 48 layers with 2.4 GB of them took 2.27 ms
)


def run(request: PlacementFlags, simulate: bool, out: Path | None, plot: Path | None) -> None:
    request.check()
    if plot is not None:
        check_matplotlib()
    console, machine = Console(), Machine.detect()
    simulated = simulate or not machine.gpus
    if simulated and not simulate:
        console.print("No GPU was found: what follows is simulated by a cost model, nothing is measured.")
    measured = simulated_rows(request) if simulated else _measured_rows(request)
    with kept_rows(out) as rows:
        for row in measured:
            rows.append(row | _where(request, machine, simulated))
            say(console, row)
        console.print(table(rows))
    if plot is not None:
        draw(plot, rows)
        console.print(f"Drawn to {plot}")


def _measured_rows(request: PlacementFlags) -> Iterator[dict[str, Any]]:
    from tandem.bench.placement.gpu_rows import measured_rows  # Triton is there only where a GPU is

    return measured_rows(request, traffic(request, named_config(request.config, request.layers)))


def simulated_rows(request: PlacementFlags) -> Iterator[dict[str, Any]]:
    config = named_config(request.config, request.layers)
    workload, cost = traffic(request, config), step_cost(request, config)
    layers, experts = len(config.moe_layers), config.moe.router.num_experts
    for share in request.shares:
        for strategy in request.strategies:
            start_strategy = "uniform" if strategy == "dynamic" else strategy
            placement = place(start_strategy, layers, experts, round(share * layers * experts), workload.counts)
            if strategy == "dynamic":
                result = simulate_live(workload.trace, placement, cost, PolicySettings())
            else:
                result = simulate_static(workload.trace, placement, cost)
            rates = dataclasses.asdict(cost) | {"expert_bytes": round(cost.expert_bytes)}
            yield {
                **shape_columns(request, SIMULATED, strategy, share), "tok_s": round(result.tok_s, 2),
                "hit": round(result.hit, 4), "swaps": result.exchanges, "rests": result.rests, "model": rates,
            }  # fmt: skip


def step_cost(request: PlacementFlags, config: ModelConfig) -> StepCost:
    dense = (
        2 * config.dense_params / (2 * request.hbm_gbps * 1e9)
    )  # large matrices run at twice the experts' rate
    gpu_step = dense + len(config.layers) * LAYER_SECONDS
    return StepCost(
        expert_bytes(config, request.fmt), request.dram_gbps, request.pcie_gbps, request.hbm_gbps,
        gpu_step if request.gpu_step_ms is None else request.gpu_step_ms / 1e3,
    )  # fmt: skip


def _where(request: PlacementFlags, machine: Machine, simulated: bool) -> dict[str, Any]:
    gpu = "none used (simulation)" if simulated else machine.gpus[0].name
    machine_text = f"{gpu}; {machine.cpu_model}, {request.threads or machine.max_threads} threads"
    law = ROUTINGS.get(request.routing)
    return {"routing_parameters": None if law is None else dataclasses.asdict(law), **stamp(machine_text)}


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per share, one column per strategy: tokens/s and, in brackets, the hit rate."""
    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    simulated = any(row["bench"] == SIMULATED for row in rows)
    source = "SIMULATED by a cost model, not measured" if simulated else "measured"
    speeds = Table(title=f"Tokens/s (share of routed tokens on the GPU), {rows[0]['config']}, {source}")
    speeds.add_column("GPU share", justify="right")
    for strategy in strategies:
        speeds.add_column(strategy, justify="right")
    for share in dict.fromkeys(row["gpu_share"] for row in rows):
        cells = {row["strategy"]: row for row in rows if row["gpu_share"] == share}
        speeds.add_row(
            f"{share:.0%}", *(f"{cells[s]['tok_s']:.1f} ({cells[s]['hit']:.0%})" for s in strategies)
        )
    return speeds
