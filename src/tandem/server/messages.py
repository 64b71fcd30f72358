"""Messages between the API process and the engine process, besides `engine/protocol.py` (msgpack over ZeroMQ)."""

from __future__ import annotations

import msgspec

from tandem.engine.protocol import (
    AbortRequest,
    EngineStats,
    ExpertsRecorded,
    ExpertTraffic,
    GenerateRequest,
    LookAtExperts,
    RecordExperts,
    TokenOutput,
)
from tandem.flags.engine_config import EngineConfig
from tandem.planner.plan import Plan
from tandem.spec.vision import Tower


class StartEngine(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First message to a new engine process. `loader` is "module:function", called with the config.

    It is sent here and not on the command line, where every user of the machine could read the API key.
    """

    config: EngineConfig
    loader: str
    ranks: str = ""  # endpoint where other ranks' processes ask, if there will be some; "": there are none
    failed: list[str] = []  # flags of ways over several GPUs that were chosen before, and did not start


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Drop every page that only the prefix cache holds; answered by one `CacheFlushed`."""


class StopEngine(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Leave the loop and exit with code 0. The answer to `StartFailed`, too."""


class EngineConnected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """First message of a new engine process."""


class WayChosen(msgspec.Struct, frozen=True, kw_only=True, tag="way"):
    """Over how many GPUs the model goes, before it is loaded, where no flag says so. The other ranks are to be started.
    flag: as typed."""

    ranks: int
    stages: int
    flag: str


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is loaded. Everything the API process needs to know about the model."""

    plan: Plan
    model_path: str
    model_type: str
    vocab_size: int
    sampling_defaults: dict[str, float] = {}
    vision: Tower | None = None  # what reads images, if they are served


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="start_failed"):
    """The engine could not be built; the process exits with code 1 once that is answered. refused: what was asked
    cannot be met. of_files: what is wrong is with the model's files, whatever GPUs there are. of_gpus: what cannot be
    met is the choice of GPUs."""

    message: str
    refused: bool = False
    of_files: bool = False
    of_gpus: bool = False


class EngineEnds(msgspec.Struct, frozen=True, kw_only=True, tag="ends"):
    """No later step could work: another rank is missing. The process may be killed after this."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Everything one `Engine.step` produced."""

    outputs: list[TokenOutput]


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """`Engine.add` did not take the request. `fault` says whose: "request", "engine", or "busy" where there
    is too much to do."""

    id: str
    message: str
    param: str | None = None
    fault: str = "request"


class CacheFlushed(msgspec.Struct, frozen=True, kw_only=True, tag="flushed"):
    """Answer to `FlushCache`."""


ToEngine = StartEngine | GenerateRequest | AbortRequest | FlushCache | RecordExperts | LookAtExperts | StopEngine
FromEngine = (
    EngineConnected
    | WayChosen
    | EngineReady
    | StartFailed
    | EngineEnds
    | StepOutputs
    | RequestRefused
    | CacheFlushed
    | ExpertsRecorded
    | ExpertTraffic
    | EngineStats
)
