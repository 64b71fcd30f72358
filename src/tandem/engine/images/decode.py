"""`decoded`: an image file's pixels, resized. Runs in a process of its own (`worker.py`): the file may be hostile."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Callable
from typing import TypeVar

from PIL import Image, UnidentifiedImageError

from tandem.engine.images.limits import MAX_ENCODED_BYTES, MAX_PIXELS
from tandem.engine.images.question import INVALID, TOO_LARGE, Ask, Decoded
from tandem.engine.images.resize import target_size

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_ON_THEIR_SIDE = (5, 6, 7, 8)  # orientations that swap height and width


class _Refused(Exception):
    """An image that is not taken."""

    def __init__(self, why: str, code: str = INVALID) -> None:
        super().__init__(why)
        self.code = code


def decoded(data: bytes, ask: Ask) -> tuple[Decoded, bytes]:
    """Decodes an image file: sizes, and RGB bytes [height, width, 3]. No bytes where only sizes are asked for, or where
    `Decoded.error` says why. Raises nothing."""
    try:
        return _decoded(_plain(data) if ask.base64 else data, ask)
    except _Refused as refused:
        return Decoded(error=str(refused), code=refused.code), b""
    except MemoryError:
        return Decoded(error="takes too much memory to decode; send a smaller one", code=TOO_LARGE), b""


def _plain(data: bytes) -> bytes:
    data = b"".join(data.split())
    try:
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except binascii.Error as error:
        raise _Refused("is no base64; encode the file's bytes with it") from error


def _decoded(data: bytes, ask: Ask) -> tuple[Decoded, bytes]:
    if len(data) > MAX_ENCODED_BYTES:
        text = f"has {len(data) / 2**20:.1f} MiB, and {MAX_ENCODED_BYTES >> 20} are the most; send a smaller one"
        raise _Refused(text, TOO_LARGE)
    with _safely(lambda: _opened(data)) as image:
        wide, high = image.size
        if wide * high > MAX_PIXELS:
            text = f"has {wide} x {high} pixels, and {MAX_PIXELS // 10**6} million are the most; send a smaller one"
            raise _Refused(text, TOO_LARGE)
        turn = _safely(lambda: _orientation(image))
        if turn in _ON_THEIR_SIDE:
            wide, high = high, wide
        height, width = _target(high, wide, ask)
        sizes = Decoded(height=height, width=width, source_pixels=wide * high, frames=_frames(image))
        if not ask.pixels:
            return sizes, b""
        rgb = _safely(lambda: _rgb(_turned(image, turn)))
    return sizes, rgb.resize((width, height), Image.Resampling.BICUBIC).tobytes()


def _target(height: int, width: int, ask: Ask) -> tuple[int, int]:
    try:
        return target_size(height, width, ask.side, min(ask.min_pixels, ask.max_pixels), ask.max_pixels)
    except ValueError as error:
        raise _Refused(f"is too narrow: {error}") from error


def _safely(work: Callable[[], T]) -> T:
    """A decoder may raise anything for a file that is broken. Raises _Refused, MemoryError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except (_Refused, MemoryError):
        raise
    except Exception as error:
        raise _Refused(f"cannot be decoded ({_reason(error)}); send it whole, as {_names()}") from error


def _reason(error: Exception) -> str:
    return str(error)[:100] or type(error).__name__


def _names() -> str:
    return f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def _opened(data: bytes) -> Image.Image:
    """Its head is read. Nothing but the four formats reaches a decoder."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is asked here, and says what to do
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise _Refused(f"is of no format that is read, or is broken; send {_names()}") from error


def _frames(image: Image.Image) -> int:
    """1 or 2, which means more: counting those of a GIF would read them all."""
    try:
        return 2 if getattr(image, "is_animated", False) else 1
    except MemoryError:
        raise
    except Exception:  # a later frame is broken, and is not wanted
        return 1


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; 1 where EXIF is broken."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:
        return 1


def _turned(image: Image.Image, turn: int) -> Image.Image:
    return image.transpose(_TURNS[turn]) if turn in _TURNS else image


def _rgb(image: Image.Image) -> Image.Image:
    """Transparency lies on white. Numbers of 16 bits lose their lower half; Pillow alone would cut them off at 255."""
    image.load()
    if image.mode.startswith("I;16") or image.mode == "I":
        return _of_deep_grey(image)
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear).convert("RGB")
    return image.convert("RGB")


def _of_deep_grey(image: Image.Image) -> Image.Image:
    """Pillow scales these with numbers alone: a function of any other form would be asked for 65,536 of them."""
    return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
