"""Words for what ends a start or an engine, and what the API process is told of it."""

from __future__ import annotations

from tandem.errors import CheckpointError, ConfigError, EngineError, RankLost, TandemError, typed
from tandem.flags.ways import FIELDS
from tandem.server.messages import StartFailed

GPU_FIELDS = {"device", *FIELDS}


def describe(error: BaseException) -> str:
    """One line for the user: our own errors speak for themselves, others say their type too."""
    return str(error) if isinstance(error, TandemError) else typed(error)


def why_not_started(error: BaseException) -> str:
    """The plan has seen enough memory: another program took it, or a limit holds that the plan does not know."""
    if isinstance(error, MemoryError):
        detail = f" ({error})" if str(error) else ""
        return (
            f"memory ran out while the model was loaded{detail}: free some, raise this process's limit (ulimit -v), "
            "or give a smaller --max-total-tokens"
        )
    return describe(error)


def start_failed(error: BaseException) -> StartFailed:
    lost = lost_rank(error) if isinstance(error, EngineError) else None
    fields = error.fields if isinstance(error, ConfigError) else ()
    return StartFailed(
        message=why_not_started(lost or error),
        refused=isinstance(error, ConfigError),
        of_files=isinstance(error, CheckpointError),
        of_gpus=not GPU_FIELDS.isdisjoint(fields),
    )


def lost_rank(error: EngineError) -> RankLost | None:
    """Why the error came, where it was another rank."""
    return next((each for each in (error, error.__context__) if isinstance(each, RankLost)), None)
