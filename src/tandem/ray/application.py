"""`app(models, min, max)`: the application that `serve.run` takes, and `build` for Serve's files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from ray import serve
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.ray import router
from tandem.ray.engine import ReplicaEngine
from tandem.ray.front import ReplicaFront
from tandem.server.front.child import Command, serve_command
from tandem.server.front.models_file import FRONT_FLAGS, ModelEntry, ModelsFile, checked, words
from tandem.server.guard.key import with_key
from tandem.server.limits import MAX_OPEN_ANSWERS

GPU = "tandem_gpu"  # Ray's own `num_gpus` would hide GPUs from the engine, which chooses by what is free
USUAL_RUNNING = 64  # requests that an engine runs at once, where --max-running-requests says nothing else
UP_SECONDS, DOWN_SECONDS = 30.0, 600.0  # a start takes minutes
HEALTH_SECONDS = 2.0
_OF_REPLICAS = {"min": 1, "max": 1, "cpus": None, "gpus": 0, "memory_gb": None}
Model = str | Mapping[str, Any]


def app(
    models: Sequence[Model], min: int = 1, max: int = 1, *, fronts: int = 1, command: Command = serve_command,
    **common: Any,
) -> Application:  # fmt: skip
    """An application of Ray Serve: a front, and replicas of each model, `min` to `max` by their load.

    models: directories or names of the hub. One may be a mapping: `model`, a `name`, `aliases`, numbers of its own, and
    flags of `kt serve`. common: for all models `cpus` of a replica (None: a whole host like this one), `gpus`,
    `memory_gb`, and flags; the front's are `api_key_file`, `allowed_origins`, `allowed_hosts`, `request_timeout`.
    fronts: replicas of the front, at most one on each host. command: for tests. Raises ConfigError.
    """
    of_front = {name: common.pop(name) for name in list(common) if name in FRONT_FLAGS}
    config = with_key(EngineConfig(models="ray", **of_front))
    mappings = [{"min": min, "max": max, **common, **_as_mapping(model)} for model in models]
    entries = checked(ModelsFile(tuple(map(_entry, mappings)))).entries
    engines = {entry.name: _engine(entry, one, command) for entry, one in zip(entries, mappings, strict=True)}
    options = {"num_replicas": fronts, "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 0}}
    front = serve.deployment(serve.ingress()(ReplicaFront)).options(**options, max_ongoing_requests=MAX_OPEN_ANSWERS)
    return front.bind(engines, entries, config)


def build(arguments: dict[str, Any]) -> Application:
    """`app`, for Serve's files: `import_path: tandem.ray:build`, with `args`."""
    return app(**arguments)


def _as_mapping(model: Model) -> Mapping[str, Any]:
    return {"model": model} if isinstance(model, str) else model


def _entry(settings: Mapping[str, Any]) -> ModelEntry:
    """Raises ConfigError."""
    if not isinstance(settings.get("model"), str):
        raise ConfigError('a model has no `model`: give a directory or a name of the hub')
    name = settings.get("name", PurePath(settings["model"]).name)
    flags = {key: value for key, value in settings.items() if key not in ("name", "aliases", *_OF_REPLICAS)}
    return ModelEntry(name, words(flags), tuple(settings.get("aliases", ())))


def _engine(entry: ModelEntry, settings: Mapping[str, Any], command: Command) -> Application:
    of = {**_OF_REPLICAS, **settings}
    running = settings.get("max_running_requests", USUAL_RUNNING)
    scaling = AutoscalingConfig(
        min_replicas=of["min"], max_replicas=of["max"], target_ongoing_requests=running,
        upscale_delay_s=UP_SECONDS, downscale_delay_s=DOWN_SECONDS,
    )  # fmt: skip
    options = {
        "max_ongoing_requests": 4 * running, "max_queued_requests": MAX_OPEN_ANSWERS,
        "ray_actor_options": _actor_options(of), "health_check_period_s": HEALTH_SECONDS,
        "autoscaling_config": scaling,
        "graceful_shutdown_timeout_s": settings.get("shutdown_timeout", EngineConfig.shutdown_timeout),
        "request_router_config": RequestRouterConfig(request_router_class=router.PATH),
    }  # fmt: skip
    name = f"Engine-{entry.name}".replace("/", "-").replace("#", "-")
    return serve.deployment(ReplicaEngine).options(name=name, **options).bind(entry, command)


def _actor_options(of: Mapping[str, Any]) -> dict[str, Any]:
    cpus = len(os.sched_getaffinity(0)) if of["cpus"] is None else of["cpus"]
    options: dict[str, Any] = {"num_cpus": cpus, "resources": {GPU: of["gpus"]} if of["gpus"] else {}}
    return options if of["memory_gb"] is None else options | {"memory": int(of["memory_gb"] * 1e9)}
