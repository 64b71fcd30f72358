"""`kt bench serve --long-prompt`: gaps between the pieces of an answer, alone and beside long prompts, as a row."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tandem.bench.gaps.made_up import PROGRAM, write_folder
from tandem.bench.gaps.readers import Gap, GapFigures, GapLoad, LongPrompt, measure
from tandem.bench.load_client import LoadClient, LoadError, ServedExperts
from tandem.bench.own_server import own_server
from tandem.bench.rows import Row, machine_name, stamp, write
from tandem.engine.start.model_files import prepare
from tandem.flags.engine_config import EngineConfig
from tandem.machine.machine import Machine


@dataclass(frozen=True, slots=True)
class GapFlags:
    """The flags of a run. url: of a running server. Else `kt serve model flags` is started, or, if `config` says
    so, that architecture with made-up weights and its first `layers` layers."""

    model: str
    url: str | None
    config: str | None
    layers: int | None
    load: GapLoad
    api_key: str | None
    flags: tuple[str, ...]


def run(request: GapFlags, out: Path | None, plot: Path | None) -> None:
    """Prints the row. Raises LoadError, ConfigError."""
    from tandem.bench.figures import check_matplotlib
    from tandem.bench.gaps.plot import draw

    if plot is not None:
        check_matplotlib()
    console = Console()
    with Console(stderr=True).status("starting a server …") as status, _server(request) as url:
        client = LoadClient(url, request.api_key)
        name = client.model_name()
        readings = measure(client, name, request.load, status.update)
        row = row_of(request, name, readings, client.served_experts(name))
    console.print_json(data=row)
    if out is not None:
        write([row], out)
        console.print(f"Written to {out}")
    if plot is not None:
        draw(plot, row, readings)
        console.print(f"Drawn to {plot}")


@contextmanager
def _server(request: GapFlags) -> Iterator[str]:
    if request.url is not None:
        yield request.url
    elif request.config is None:
        prepare(EngineConfig.from_args([request.model, *request.flags]))
        with own_server(request.model, request.flags) as url:
            yield url
    else:
        with tempfile.TemporaryDirectory(prefix="tandem-made-up-") as folder:
            write_folder(Path(folder), request.config, request.layers)
            with own_server(folder, ("--served-model-name", request.config, *request.flags), PROGRAM) as url:
                yield url


def row_of(request: GapFlags, name: str, readings: GapFigures, experts: ServedExperts) -> Row:
    """Gaps in milliseconds; of prompts the median speed counts. Raises LoadError where nothing can be said."""
    idle, loaded = readings.idle_gaps(), readings.loaded_gaps()
    if not idle or not loaded:
        raise LoadError("no gaps were seen; give a shorter --long-prompt, or a longer --output-len")
    tokens, p50, p99 = request.load.prompt_len, _ms(idle, 50), _ms(loaded, 99)
    both = readings.idle_prompts, readings.loaded_prompts
    alone_tok_s, shared_tok_s = (_speed(prompts, tokens) for prompts in both)
    figures: dict[str, Any] = {
        "idle_p50_ms": p50, "idle_p99_ms": _ms(idle, 99), "beside_p50_ms": _ms(loaded, 50), "beside_p99_ms": p99,
        "beside_max_ms": _ms(loaded, 100), "p99_over_idle": round(p99 / p50, 2), "prompt_tok_s": shared_tok_s,
        "prompt_alone_tok_s": alone_tok_s, "prompt_share": round(shared_tok_s / alone_tok_s, 3), "idle_gaps": len(idle),
        "gaps": len(loaded), "prompts": len(readings.loaded_prompts),
    }  # fmt: skip
    return {
        "bench": "gaps", "config": name, "server": request.url or "tandem", "flags": " ".join(request.flags),
        "layers": request.layers, **asdict(experts), "tokens": tokens, "streams": request.load.streams,
        **figures, **stamp(f"{machine_name(Machine.detect())}; the client runs on it too"),
    }  # fmt: skip


def _ms(gaps: list[Gap], percentile: float) -> float:
    return round(1e3 * float(np.percentile([gap.seconds for gap in gaps], percentile)), 2)


def _speed(prompts: list[LongPrompt], tokens: int) -> float:
    seconds = statistics.median(prompt.answered - prompt.sent for prompt in prompts)
    return round(tokens / float(seconds), 1)
