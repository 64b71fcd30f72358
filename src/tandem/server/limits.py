"""What one HTTP request may ask for. The limits of sampling parameters are in `engine/limits.py`."""

from __future__ import annotations

MAX_BODY_BYTES = 16 << 20  # about 4 million tokens of text, or 2 million token ids
MAX_JSON_VALUES = 3_000_000  # numbers of a list in a body; a key counts as 16, a list or object as 5
DISCARD_BYTES = 256 << 20  # of a too large body, read and thrown away so that the client sees the answer
DISCARD_SECONDS = 10.0

MAX_PROMPTS = 512  # in one batched request
MAX_MESSAGES = 4096
MAX_TOP_LOGPROBS = 20
MAX_ID_CHARS = 128

MAX_OPEN_ANSWERS = 4096  # running + waiting over all clients; more is refused with 429
RETRY_AFTER_SECONDS = 1

INLINE_TOKENIZE_CHARS = 4_000  # longer prompts are tokenised off the event loop: other streams go on
LARGE_TOKENIZE_CHARS = 500_000  # longer ones one at a time: each may take a gigabyte
MAX_WAITING_CHARS = 64 << 20  # of prompts that wait to be tokenised; more is refused with 429
DRAIN_SECONDS = 60.0  # SIGTERM: running requests may take this long to finish
HEALTH_SECONDS = 20.0  # /health_generate waits this long for its token
