"""Every error Tandem raises on purpose, on one page. Each message names what to change.

TandemError
├── ConfigError        a flag, a value or a combination of them
│   └── GpuTooSmall    what was to be on the GPU, or beside it in CPU memory, does not fit
├── CheckpointError    a file of the model: missing, truncated, wrong shape, unknown format
│   ├── HubError       a model that cannot be fetched by its name
│   └── CacheDamaged   a packed cache is not what was written; the model is loaded from its checkpoint
├── RequestError       one request is wrong; the others go on        (HTTP 400)
├── BusyError          there is too much of something already; the same may work later (HTTP 429)
├── EngineError        the engine failed or died while it had work   (HTTP 503)
└── KernelError        a kernel was given an array it cannot take    (a bug of ours, or of a library user)
"""

from __future__ import annotations

from collections.abc import Sequence


class TandemError(Exception):
    """Root of the tree: catching it catches everything Tandem raises on purpose."""


class ConfigError(TandemError, ValueError):
    """A flag, a value or a combination of them cannot work.

    `reasons`: all that stand in the way, each one sentence or more. `fields`: those of `EngineConfig` without which
    the reasons would not hold; `resolve` leaves them out to find what else stands in the way.
    """

    def __init__(self, *reasons: str, fields: tuple[str, ...] = ()) -> None:
        self.reasons = tuple(dict.fromkeys(reasons))
        self.fields = fields
        super().__init__(listed(self.reasons))


class DoesNotFit(ConfigError):
    """The model needs more memory than may be used."""


class GpuTooSmall(DoesNotFit):
    """A GPU, or the CPU memory beside it, is too small for what was to be there. `--device auto` does without it."""


class CheckpointError(TandemError):
    """A model file is missing, truncated, or holds something we cannot read."""


class HubError(CheckpointError):
    """A model cannot be fetched by its name."""


class CacheDamaged(CheckpointError):
    """A packed cache is not what was written, so what was taken from it is wrong. The loader packs the model again."""


class RequestError(TandemError, ValueError):
    """One request is wrong. `param` is the request's field and `code` a word for programs, as OpenAI reports them."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BusyError(TandemError):
    """Too many want the same at once. It may work later."""


class EngineError(TandemError):
    """The engine failed or died while it had work."""


class RanksApart(EngineError):
    """Ranks may stand in different places of a step, and would not meet again: the process has to end."""


class RankLost(EngineError):
    """Another rank of the model has ended, or does not answer: the supervisor says which, and why."""


class KernelError(TandemError, ValueError):
    """A kernel was given an array of a shape, type or alignment it cannot take."""


def exit_status(error: TandemError) -> int:
    """Exit status of a program that ends with this error: 2 where what was asked cannot be met, else 1."""
    return 2 if isinstance(error, ConfigError) else 1


def listed(reasons: Sequence[str]) -> str:
    """One reason as it is; several as a list."""
    if len(reasons) == 1:
        return reasons[0]
    return "\n  * ".join([f"{len(reasons)} things stand in the way:", *reasons])


def typed(error: BaseException) -> str:
    """Its type, and what it says: Python's own `MemoryError` says nothing."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
