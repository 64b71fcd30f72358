"""Where tables that are read by row are: in memory, in files behind the page cache, or on the disk past it."""

from __future__ import annotations

import math
from dataclasses import replace

from tandem.planner.memory import WANTED_CONTEXT, MemoryRequest, gib, wanted_context
from tandem.spec.model_config import ModelConfig
from tandem.spec.stored import StoredFormats

MAPPED, IN_RAM = "map", "ram"
_WORDS = {IN_RAM: "in memory", MAPPED: "in files, of which the page cache keeps what is read", "disk": "on disk"}


def table_bytes(request: MemoryRequest) -> int:
    """As the checkpoint stores them."""
    stored = request.stored.tables.bytes_per_weight
    return int(sum(table.rows * table.width for table in request.model.tables) * stored)


def token_row_bytes(model: ModelConfig, stored: StoredFormats) -> int:
    """Bytes of the rows that a token reads, at most: those of forms that a GPU does not read become bfloat16."""
    channels = sum(table.width * table.reads for table in model.tables)
    return math.ceil(channels * max(2.0, stored.tables.bytes_per_weight))


def where_tables(request: MemoryRequest) -> str:
    """As `--tables` asks; else in memory where a usual context still fits beside them, which experts come before."""
    mode, nbytes = request.config.tables, table_bytes(request)
    if mode != "auto" or not nbytes:
        return MAPPED if mode == "auto" else mode
    room = replace(request, table_bytes=nbytes).kv_room_bytes
    context = min(wanted_context(request)[0], WANTED_CONTEXT)
    single_rank = request.model.shard.ranks == 1  # each rank would have its own
    return IN_RAM if single_rank and room >= request.kv_bytes(context) else MAPPED


def table_text(request: MemoryRequest, where: str) -> tuple[str, str]:
    """The plan's line on n-gram tables: their size, their place and the reason."""
    mode, nbytes = request.config.tables, table_bytes(request)
    reason = "--tables" if mode != "auto" else "they fit beside all else" if where == IN_RAM else "memory is short"
    return f"{gib(nbytes)} {_WORDS[where]}", f"{reason}; n-grams, a few rows of which each token reads"
