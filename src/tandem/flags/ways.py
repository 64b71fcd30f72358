"""Over how many GPUs a model goes, as far as flags say it. `planner/ways.py` chooses where they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.flags.engine_config import EngineConfig

FIELDS = ("tensor_parallel_size", "pipeline_parallel_size")


def way_is_open(config: EngineConfig) -> bool:
    """True if no flag says over how many GPUs the model goes, so the plan chooses."""
    return config.device != "cpu" and not config.given_flags(FIELDS)


def on_one_gpu(config: EngineConfig) -> EngineConfig:
    """The same, with one GPU unless a flag says how many."""
    return dataclasses.replace(config, explicit=config.explicit | {"tensor_parallel_size"})


def argv_on_one_gpu(argv: Sequence[str]) -> list[str]:
    """A command line of `kt serve`, with `--tensor-parallel-size 1` unless it says how many GPUs."""
    config, _ = EngineConfig.possible(argv)
    is_open = config is not None and way_is_open(config)
    return [*argv, "--tensor-parallel-size", "1"] if is_open else [*argv]
