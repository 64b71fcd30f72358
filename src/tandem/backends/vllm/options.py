"""Options of vLLM's user for Tandem, and vLLM's own that are refused beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.backends.options import experts_config
from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig

OPTION = "tandem"
WHERE = "--additional-config '{\"tandem\": ...}'"


def wishes_of(config: Any) -> Mapping[str, object] | None:
    """Our options in a VllmConfig; None: experts are vLLM's own. Raises ConfigError where they are no table."""
    additional_config = config.additional_config
    wishes = additional_config.get(OPTION) if isinstance(additional_config, Mapping) else None
    if wishes is None or wishes is False:
        return None
    if wishes is True:
        return {}
    if not isinstance(wishes, Mapping):
        raise ConfigError(f"{WHERE} is a table of options, such as {{}} or {{\"kt_method\": \"INT4\"}}, not {wishes!r}")
    return wishes


def check(config: Any) -> None:
    """Raises ConfigError with all that cannot be together."""
    reasons = [f"{WHERE}: {reason}" for reason in _against(config)]
    try:
        engine_config(config)
    except ConfigError as error:
        reasons += error.reasons
    if reasons:
        raise ConfigError(*reasons)


def engine_config(config: Any) -> EngineConfig:
    """Checks a VllmConfig whose experts are ours. Raises ConfigError for options that are none."""
    model = config.model_config
    name = model.model if model.revision is None else f"{model.model}@{model.revision}"
    dtype = str(model.dtype).removeprefix("torch.")
    return experts_config(name, wishes_of(config) or {}, dtype, WHERE)


def _against(config: Any) -> Iterator[str]:
    parallel, model = config.parallel_config, config.model_config
    if parallel.enable_expert_parallel:
        yield "experts are divided by their width, not among ranks: leave --enable-expert-parallel out"
    if parallel.enable_eplb:
        yield "experts have one copy each: leave --enable-eplb out"
    if parallel.data_parallel_size > 1:
        yield "one engine has all requests: leave --data-parallel-size out, or start several servers"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "prompts are not divided among ranks: leave --prefill-context-parallel-size out"
    if getattr(parallel, "enable_dbo", False):
        yield "experts compute one batch at a time: leave --enable-dbo out"
    if getattr(model, "enable_sleep_mode", False):
        yield "experts in CPU memory do not sleep: leave --enable-sleep-mode out"
    if config.lora_config is not None:
        yield "experts have no adapters: leave --enable-lora out"
