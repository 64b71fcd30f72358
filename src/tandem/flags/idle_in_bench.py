"""Flags of `kt bench` that a way of running it does not read: giving them is an error, and not a row of something else.

Parameters that are in none of a command's sets are read in each of its ways.
"""

from __future__ import annotations

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
    values = context.params
    if values["explain"]:
        read = {"config", "gpu_share", "layers"}
        refuse_idle(context, (_FILES | _MADE_UP | _DRAFTS | _MEASURED | {"tier"}) - read, "with --explain")
    elif values["speculative"] is not None:
        read = {"model"} if values["config"] is None else {"config", "layers"}
        refuse_idle(context, (_FILES | _MADE_UP) - read, f"with --speculative{_and(values, 'config')}")
    elif values["config"] is not None:
        refuse_idle(context, _FILES | _DRAFTS, "with --config and without --speculative")
    else:
        refuse_idle(context, _MADE_UP, "without --config")
        refuse_idle(context, _DRAFTS, "without --speculative")


def check_explained(context: Any) -> None:
    """`kt bench kernels` and `prefill` with --explain. Raises ConfigError."""
    if context.params["explain"]:
        tier = set() if context.command.name == "kernels" else {"tier"}
        refuse_idle(context, _MEASURED | tier, "with --explain")


def check_serve(context: Any) -> None:
    """Raises ConfigError."""
    values = context.params
    if values["url"] is not None:
        refuse_idle(context, _OWN_SERVER | {"config", "layers"}, "with --url")
    if values["long_prompt"] is None:
        refuse_idle(context, _GAPS, "without --long-prompt")
    else:
        refuse_idle(context, _LOAD, "with --long-prompt")
    if values["config"] is None:
        refuse_idle(context, {"layers"}, "without --config")
    else:
        refuse_idle(context, {"model"}, "with --config")
    if values["prompts"] is not None:
        refuse_idle(context, _LENGTHS, "with --prompts")


def _and(values: dict[str, object], name: str) -> str:
    return "" if values[name] is None else f" and --{name}"
