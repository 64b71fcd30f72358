"""Limits of an image: bytes, pixels, seconds. Those of whole requests are in `server/limits.py`."""

from __future__ import annotations

MAX_ENCODED_BYTES = 20 << 20  # of a file, before it is decoded
MAX_PIXELS = 64_000_000  # of an image, asked before it is decoded: 48 KB of PNG may hold 400 million
MAX_RATIO = 200  # of the longer side to the shorter one, as Qwen's own processor has it
WORKER_BYTES = 3 << 29  # of memory: a transparent image of 64 million pixels takes four copies
WORKER_CPU_SECONDS = 20  # for one image
WORKER_SECONDS = 30.0  # by the clock, then its process is killed
