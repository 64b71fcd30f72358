"""The options of `kt serve` that mean something where another engine asks for experts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig

OPTIONS = (
    "kt_weight_path", "kt_method", "kt_cpuinfer", "kt_threadpool_count", "kt_numa_nodes", "kernel_tier",
    "kt_int8_activations", "packed_cache", "kt_gpu_experts_ratio", "kt_num_gpu_experts", "kt_expert_placement_strategy",
    "init_expert_location",
)  # fmt: skip
DTYPES = ("bfloat16", "float32")


def experts_config(model: str, options: Mapping[str, object], dtype: str, where: str) -> EngineConfig:
    """options: some of OPTIONS, with `-` or `_`. dtype: of the engine's activations. where: how the user has said them,
    for errors. Raises ConfigError."""
    flags = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    for name in flags:
        if name not in OPTIONS:
            raise ConfigError(f"{where} has no option {name!r}{_nearest(name)}; there are: {', '.join(OPTIONS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"the experts compute in {' or '.join(DTYPES)}, not {dtype}: take --dtype bfloat16")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    try:
        return EngineConfig.from_keywords(model, dtype=dtype, **values)
    except ConfigError as error:
        raise ConfigError(*(f"{where}: {reason}" for reason in error.reasons)) from error


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, OPTIONS, 1)
    return f"; did you mean {close[0]}?" if close else ""
