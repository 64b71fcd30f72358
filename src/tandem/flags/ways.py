"""Over how many GPUs a model goes, as far as flags say it. `planner/ways.py` chooses where they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tandem.flags.engine_config import EngineConfig

FIELDS = ("tensor_parallel_size", "pipeline_parallel_size")


def way_is_open(config: EngineConfig) -> bool:
    """True if no flag says over how many GPUs the model goes, so the plan chooses."""
    return config.device != "cpu" and not config.given_flags(FIELDS)


def several_gpus_typed(config: EngineConfig) -> bool:
    """True if a flag says that the model goes over several GPUs. `--tp 1` says no more than the plan might."""
    return config.tensor_parallel_size * config.pipeline_parallel_size > 1 and not config.way_chosen


def with_way_kept(config: EngineConfig, ranks: int, stages: int) -> EngineConfig:
    """The same, over as many GPUs as the plan chose in an earlier start."""
    return dataclasses.replace(
        on_one_gpu(config), tensor_parallel_size=ranks, pipeline_parallel_size=stages, way_chosen=True
    )


def on_one_gpu(config: EngineConfig) -> EngineConfig:
    """The same, with one GPU unless a flag says how many."""
    return dataclasses.replace(config, explicit=config.explicit | {"tensor_parallel_size"})


def argv_on_one_gpu(argv: Sequence[str]) -> list[str]:
    """A command line of `kt serve`, with `--tensor-parallel-size 1` unless it says how many GPUs."""
    config, _ = EngineConfig.possible(argv)
    is_open = config is not None and way_is_open(config)
    return [*argv, "--tensor-parallel-size", "1"] if is_open else [*argv]
