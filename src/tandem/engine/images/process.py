"""`ImageProcess`: image files decoded in a process of their own, which can be stopped, and whose memory is bounded."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import socket
import subprocess
import sys
import threading
from typing import NamedTuple

import msgspec

from tandem.engine.images.limits import WORKER_SECONDS
from tandem.engine.images.question import TOO_LARGE, Ask, Decoded
from tandem.engine.vision.spans import KEY_BYTES
from tandem.errors import EngineError, RequestError
from tandem.process.children import exit_reason
from tandem.process.frames import receive_frame, send_frame
from tandem.spec.vision import Processor

_ATTEMPTS = 2  # the process may have died for another reason than this image


class Resized(NamedTuple):
    """pixels: RGB bytes [height, width, 3]; empty where only sizes were asked for."""

    decoded: Decoded
    pixels: bytes

    def key(self, processor: Processor) -> bytes:
        """Equal for equal pixels that are read alike."""
        digest = hashlib.sha256(f"{processor} {self.decoded.height} {self.decoded.width} ".encode())
        digest.update(self.pixels)
        return digest.digest()[:KEY_BYTES]


class ImageProcess:
    """Decodes one image after the other, for any thread. A process that takes too long or dies is replaced."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._turn = threading.Lock()  # of the thread that waits for the process
        self._lock = threading.Lock()  # of the two below, which `close` takes away from it
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def resized(
        self, data: bytes, where: str, *, most_tokens: int, base64: bool = False, pixels: bool = True
    ) -> Resized:
        """data: a file, or its base64 text. where: its field, for errors. most_tokens: of the resized image. pixels:
        False asks for the size alone. Raises RequestError; EngineError where it cannot be decoded twice."""
        side, processor = self._processor.side, self._processor
        ask = Ask(
            side=side, min_pixels=processor.min_pixels, base64=base64, pixels=pixels,
            max_pixels=min(processor.max_pixels, most_tokens * side * side),
        )  # fmt: skip
        with self._turn:
            resized = self._decoded(ask, data, where)
        if resized.decoded.error:
            raise RequestError(f"{where}: the image {resized.decoded.error}", where, resized.decoded.code)
        return resized

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Also in the midst of an image. No process is started any more."""
        self._closed = True
        self._stop()

    def _decoded(self, ask: Ask, data: bytes, where: str) -> Resized:
        for _ in range(_ATTEMPTS):
            try:
                return _answer(self._connected(), ask, data)
            except (OSError, EOFError) as error:  # TimeoutError is an OSError
                code = self._stop()
                if isinstance(error, TimeoutError) or code == -signal.SIGXCPU:
                    text = f"{where}: the image takes too long to decode; send a smaller one"
                    raise RequestError(text, where, TOO_LARGE) from error
            except BaseException:  # Ctrl+C in tandem.LLM: the next image would have this one's answer
                self._stop()
                raise
        why = "the server is stopping" if self._closed else exit_reason(code)
        raise EngineError(f"{where}: the decoder of images ended twice ({why}); send this one as PNG")

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise EOFError("closed")
            if self._socket is None:
                ours, theirs = socket.socketpair()
                with theirs:
                    command = [sys.executable, "-P", "-m", "tandem.engine.images.worker", str(theirs.fileno())]
                    self._process = subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                    )
                self._socket = ours
                self._socket.settimeout(WORKER_SECONDS)
            return self._socket

    def _stop(self) -> int:
        """The exit code of the process: its own, where it had ended by itself."""
        with self._lock:
            process, ours = self._process, self._socket
            self._process = self._socket = None
        if ours is not None:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
            ours.close()
        if process is None:
            return 0
        process.kill()
        return process.wait()


def _answer(ours: socket.socket, ask: Ask, data: bytes) -> Resized:
    send_frame(ours, msgspec.json.encode(ask))
    send_frame(ours, data)
    answer = msgspec.json.decode(receive_frame(ours), type=Decoded)
    return Resized(answer, receive_frame(ours))
