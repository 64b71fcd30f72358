"""Limits of one HTTP request. Those of sampling parameters are in `engine/limits.py`."""

from __future__ import annotations

MAX_BODY_BYTES = 64 << 20  # about 16 million tokens of text, or 30 screenshots as base64, which agents send each time
MAX_JSON_VALUES = 3_000_000  # numbers of a list in a body; a key counts as 16, a list or object as 5
DISCARD_BYTES = 256 << 20  # of a too large body, read and thrown away so that the client sees the answer
DISCARD_SECONDS = 10.0

BODY_SECONDS = 60.0  # for a whole body
SMALL_BODY_BYTES = 64 << 10
INLINE_BODY_BYTES = 1 << 20  # larger ones are parsed off the event loop: other streams go on
MAX_TEXT_CHARS = 16 << 20  # of all messages together, without images
MAX_HELD_BYTES = 1 << 30  # of bodies of requests in progress, waiting or not
MAX_UNFINISHED_BYTES = 256 << 20  # of large bodies that are still arriving, over all connections

MAX_URL_BYTES = 16 << 10
MAX_HEAD_BYTES = 64 << 10  # all header lines of a request
MAX_HEADERS = 128
HEAD_SECONDS = 20.0  # for the URL and all header lines, also of the first request after connecting
EOF_SECONDS = 1.0  # behind a request: a client that closes its side so soon waits for its answer, begun or not
LINGER_SECONDS = 1.0  # what a refused client still sends is read and thrown away
MAX_CONNECTIONS = 16_384
WAITING_SECONDS = 10.0  # until a stream begins without its first token, and until it says again that it waits
UNREAD_SECONDS = 60.0  # a client that reads nothing of its answer for so long is gone
MAX_UNREAD_OUTPUTS = 16_384  # of a stream that its client reads too slowly; more for many answers
MAX_UNREAD_PER_ANSWER = 1_024

MAX_PROMPTS = 512  # in one batched request
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_IMAGES = 100
MAX_DECODE_SECONDS = 20.0  # of all images of a request: there is one decoder
MAX_HELD_IMAGES = 2048  # of running requests: each is an open file
MAX_RECENT_IMAGES = 512  # that are kept, and as many whose refusal is known
MAX_IMAGE_PIXELS = 256_000_000  # of all images of a request, before they are resized
MAX_WAITING_IMAGE_BYTES = 256 << 20  # of base64 that waits to be decoded; more is refused with 429
RECENT_PIXEL_BYTES = 256 << 20  # of resized images that are kept: agents send them again
LOW_DETAIL_TOKENS = 256  # of an image that is to be shown small
MAX_TOP_LOGPROBS = 20
MAX_ID_CHARS = 128

MAX_OPEN_ANSWERS = 4096  # running + waiting over all clients; more is refused with 429
RETRY_AFTER_SECONDS = 1

INLINE_TOKENIZE_CHARS = 4_000  # longer prompts are tokenised off the event loop: other streams go on
INLINE_DECODE_TOKENS = 1_000  # the same the other way
CHARS_OF_TOKEN = 4
LARGE_TOKENIZE_CHARS = 500_000  # longer ones one at a time: each may take a gigabyte
MAX_WAITING_CHARS = 64 << 20  # of prompts that wait to be tokenised; more is refused with 429
TEMPLATE_SECONDS = 10.0  # for a chat template to render a prompt
TEMPLATE_START_SECONDS = 60.0  # for its process, which imports from a disk that may be busy
TEMPLATE_BYTES = 1 << 30  # of memory, for that
MAX_RENDERED_CHARS = 64 << 20
HEALTH_SECONDS = 20.0  # /health_generate waits this long for its token
