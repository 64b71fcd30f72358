"""Messages between an `ImageProcess` and its process: questions and answers (JSON)."""

from __future__ import annotations

import msgspec

INVALID, TOO_LARGE = "invalid_image", "image_too_large"  # codes of errors


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Question about an image file. side, min_pixels, max_pixels: as `target_size` has them. base64: the file is
    written so. pixels: False asks for sizes alone, and nothing is decoded."""

    side: int
    min_pixels: int
    max_pixels: int
    base64: bool = False
    pixels: bool = True


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """height, width: of the resized image. source_pixels: of the file's. frames: that the file has. error: why there is
    none, a sentence's end behind "the image"; `code` is its word for programs."""

    height: int = 0
    width: int = 0
    source_pixels: int = 0
    frames: int = 1
    error: str = ""
    code: str = INVALID
