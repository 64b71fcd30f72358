"""The only file that reads the environment. Nothing here decides a result: flags do.

Variables that tutorials of other engines export (SGLANG_…, FLASHINFER_CUDA_ARCH_LIST, PYTORCH_CUDA_ALLOC_CONF,
AMX_METHOD, …) are never read, so they are harmless.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where prepared models are kept: $TANDEM_CACHE_DIR, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem."""
    chosen = os.environ.get("TANDEM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "tandem"
