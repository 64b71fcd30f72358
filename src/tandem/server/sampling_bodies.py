"""Sampling parameters in requests' bodies: their fields, made from the table `engine/sampling/parameters.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tandem.engine.sampling.parameters import Dialect, Row, table

T = TypeVar("T", bound=msgspec.Struct)

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def with_parameters(dialect: Dialect, *, defaults: bool = False) -> Callable[[type[T]], type[T]]:
    """Decorator of a body: adds a field for each parameter of the dialect that no route converts. One that is left out
    is None; with `defaults` it has the table's default."""

    def extended(body: type[T]) -> type[T]:
        about = {"__doc__": body.__doc__, "__qualname__": body.__qualname__}
        config = body.__struct_config__
        return msgspec.defstruct(  # type: ignore[return-value]
            body.__name__, [_field(row, dialect, defaults) for row in rows_of(dialect)], bases=(body,),
            module=body.__module__, namespace=about, kw_only=True, frozen=config.frozen,
        )  # fmt: skip

    return extended


def _field(row: Row, dialect: Dialect, defaults: bool) -> tuple[str, Any, Any]:
    kind = {int: Int64, int | None: Int64 | None}.get(row.type, row.type)
    name = row.parameter.name_in(dialect, row.name)
    return (name, kind, row.default) if defaults else (name, kind | None, None)


def rows_of(dialect: Dialect) -> Iterator[Row]:
    """Those whose values go to the engine as they are."""
    for row in table().values():
        if dialect in row.parameter.dialects and not row.parameter.by_route:
            yield row


def sent_parameters(body: msgspec.Struct, dialect: Dialect) -> dict[str, Any]:
    """Values of the parameters that the body has, by their names in `SamplingSettings`; None is left out."""
    fields = ((row.name, getattr(body, row.parameter.name_in(dialect, row.name))) for row in rows_of(dialect))
    return {name: sent for name, sent in fields if sent is not None}
