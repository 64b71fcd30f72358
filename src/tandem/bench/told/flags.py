"""`check_flags`: those of `kt bench decode` that say something only beside others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import ConfigError

NEEDS = {
    "overlap": ("--overlap", ("speculative",)),
    "acceptance": ("--acceptance", ("speculative",)),
    "fixed": ("--fixed", ("speculative", "overlap")),
    "plot": ("--plot", ("speculative", "overlap")),
    "draft_ms": ("--draft-ms", ("speculative", "overlap")),
}
EXAMPLES = {"speculative": "--speculative NGRAM", "overlap": "--overlap 0.33"}


def check_flags(parameters: Mapping[str, Any]) -> None:
    """parameters: the command's parameters by name. Raises ConfigError naming the flags that are missing."""
    for name, (flag, needed) in NEEDS.items():
        missing = [EXAMPLES[other] for other in needed if parameters[other] is None]
        if missing and parameters[name] is not None:
            raise ConfigError(f"{flag} says nothing alone: give {' and '.join(missing)}, too")
    if parameters["overlap"] is not None and not (parameters["governor"] or parameters["fixed"]):
        raise ConfigError("--no-governor with --overlap measures nothing without widths: give --fixed 3, too")
