"""Flags of `kt bench` that a way of running it does not read: giving them is an error, and not a row of something else.

Parameters that are in none of a command's sets are read in each of its ways.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tandem.flags.idle import refuse_idle

_FILES = {"model", "transformers", "llama_cpp", "deterministic", "kt_int8_activations"}
_MADE_UP = {"config", "gpu_share", "layers", "context", "dense_format", "foresight"}
_DRAFTS = {"speculative", "num_steps", "acceptance", "governor"}
_MEASURED = {
    "steps", "repeats", "threads", "out", "with_torch", "int8_activations", "seconds", "working_set_mib", "plot",
    "chunk", "threshold", "cached", "way",
}  # fmt: skip
_OWN_SERVER = {"model", "flag"}
_GAPS = {"long_prompt", "gaps", "seconds", "config", "layers", "plot"}
_LENGTHS = {"input_len", "spread", "shared_prefix"}
_LOAD = {"rate", "requests", "spread", "shared_prefix", "prompts"}


def check_decode(context: Any) -> None:
    """Raises ConfigError. context: Typer's."""
    given = context.params
    if given["explain"]:
        read = {"config", "gpu_share", "layers"}
        _refuse(context, _FILES | _MADE_UP | _DRAFTS | _MEASURED | {"tier"}, read, "with --explain")
    elif given["speculative"] is not None:
        read = {"model"} if given["config"] is None else {"config", "layers"}
        _refuse(context, _FILES | _MADE_UP, read, f"with --speculative{_and(given, 'config')}")
    elif given["config"] is not None:
        _refuse(context, _FILES | _DRAFTS, set(), "with --config and without --speculative")
    else:
        _refuse(context, _MADE_UP, set(), "without --config")
        _refuse(context, _DRAFTS, set(), "without --speculative")


def check_explained(context: Any) -> None:
    """Of `kt bench kernels` and `prefill`. Raises ConfigError."""
    if context.params["explain"]:
        tier = set() if context.command.name == "kernels" else {"tier"}
        _refuse(context, _MEASURED | tier, set(), "with --explain")


def check_serve(context: Any) -> None:
    """Raises ConfigError."""
    given = context.params
    if given["url"] is not None:
        _refuse(context, _OWN_SERVER | {"config", "layers"}, set(), "with --url")
    if given["long_prompt"] is None:
        _refuse(context, _GAPS, set(), "without --long-prompt")
    else:
        _refuse(context, _LOAD, set(), "with --long-prompt")
    if given["config"] is None:
        _refuse(context, {"layers"}, set(), "without --config")
    else:
        _refuse(context, {"model"}, set(), "with --config")
    if given["prompts"] is not None:
        _refuse(context, _LENGTHS, set(), "with --prompts")


def _and(given: dict[str, object], name: str) -> str:
    return "" if given[name] is None else f" and --{name}"


def _refuse(context: Any, idle: Set[str], read: Set[str], way: str) -> None:
    every = {each.name for each in context.command.params}
    refuse_idle(context, every - (idle - read), way)
