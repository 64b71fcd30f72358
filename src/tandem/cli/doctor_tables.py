"""Findings of `kt doctor` on tables that are read by row: which of `--tables` can work here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.cli.doctor_checks import Finding

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def tables() -> Iterator[Finding]:
    """A line on tables of n-grams (Qwen3.8-Flash-Next): large pages for `ram`, direct reads for `disk`."""
    from tandem.hub.snapshot import cache_root

    folder = next(path for path in (cache_root(), *cache_root().parents) if path.is_dir())
    direct = f"--tables disk {'works' if reads_past_cache(folder) else 'does not work'} below {folder}"
    yield Finding("n-gram tables", f"--tables ram {'with' if has_large_pages() else 'without'} large pages; {direct}")


def has_large_pages() -> bool:
    """Whether the system gives large pages to memory that asks for them."""
    with suppress(OSError):
        return "[never]" not in LARGE_PAGES.read_text()
    return False


def reads_past_cache(folder: Path) -> bool:
    """Whether files there can be read past the page cache. False, too, where none can be made."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(4096))
        file.flush()
        os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        return True
    return False
