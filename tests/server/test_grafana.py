"""docs/grafana.json: its queries name only what /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import echo_engine
from server_harness import LocalServer
from server_requests import run
from tandem.config import EngineConfig

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    async def scenario(server: LocalServer) -> None:
        await server.post("/generate", text="x")
        samples = re.findall(r"^(\w+)(?:\{(.*)\})? ", (await server.client.get("/metrics")).text, re.M)
        labels = {name: set(re.findall(r'(\w+)="', text)) for name, text in samples}
        for query in QUERIES:
            named = re.findall(r"\btandem_\w+", query)
            assert named and set(named) <= set(labels), query
            used = {
                word
                for group in re.findall(r"by \((.*?)\)|\{(\w+)=", query)
                for word in group
                if word
            }
            assert all(used <= labels[name] for name in named), query

    run(scenario, loaded=echo_engine.load_routed(EngineConfig(model="echo"), 2, 16))


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)
