"""The process of an `ImageProcess`: `python -m tandem.engine.images.worker DESCRIPTOR`.

It reads frames (four bytes of length, then data) from a socket, two for each image: an `Ask` as JSON, and the file. It
answers with two: a `Decoded`, and the pixels. It ends with the socket, opens no files, and is bounded in memory and
time even when nobody is there any more to end it.
"""

from __future__ import annotations

import contextlib
import encodings.ascii
import encodings.latin_1  # noqa: F401  # text in images
import io
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec
from PIL import Image

from tandem.engine.images.decode import FORMATS, decoded
from tandem.engine.images.limits import WORKER_BYTES, WORKER_CPU_SECONDS
from tandem.engine.images.question import Ask
from tandem.process.frames import receive_frame, send_frame

FIRST_TO_END = 1000  # of oom_score_adj: the largest there is


def work(ours: socket.socket) -> NoReturn:
    """Raises EOFError when nobody asks any more."""
    while True:
        ask = msgspec.json.decode(receive_frame(ours), type=Ask)
        _bound_time()
        answer, pixels = decoded(receive_frame(ours), ask)
        send_frame(ours, msgspec.json.encode(answer))
        send_frame(ours, pixels)
        del pixels


def _bound_time() -> None:
    """For the next image."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + WORKER_CPU_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _load_decoders() -> None:
    """All that decoding imports: later no file can be read. Only the four formats are left to Pillow."""
    Image.init()
    for name in set(Image.OPEN) - set(FORMATS):
        del Image.OPEN[name]
    ask = Ask(side=1, min_pixels=1, max_pixels=4)
    for name in FORMATS:
        file, exif = io.BytesIO(), Image.Exif()
        exif[274] = 6
        Image.new("RGB", (2, 1)).save(file, name, **({} if name == "GIF" else {"exif": exif}))
        decoded(file.getvalue(), ask)


def _end_first() -> None:
    """Where the system's memory runs out, this process is ended in place of the server or the engine."""
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_END))


def _bound_everything() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains first
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _load_decoders()
        _end_first()
        _bound_everything()
        try:
            work(ours)
        except (EOFError, ConnectionError):
            return 0


if __name__ == "__main__":
    sys.exit(main())
