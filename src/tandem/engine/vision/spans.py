"""An image of a request: which rows of the prompt are its own, and where its pixels lie (msgspec structs)."""

from __future__ import annotations

import msgspec

from tandem.errors import RequestError
from tandem.spec.vision import Tower

KEY_BYTES = 16


class PixelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Resized RGB bytes [height, width, 3]: `inline`, or those from `offset` on in the file at `path`, such as
    /proc/PID/fd/N. The file must not change while the request lives. inode: of that file; another one may be there once
    the sender has let it go. 0: any."""

    height: int
    width: int
    path: str = ""
    inode: int = 0
    offset: int = 0
    inline: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.height * self.width * 3


class ImageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Rows first : first + rows of a prompt, all of the placeholder's id. grid: patches in time, downwards, across.
    key: 16 bytes, a hash of the resized pixels and of how they were made; images of equal keys are the same."""

    first: int
    rows: int
    grid: tuple[int, int, int]
    key: bytes
    pixels: PixelSource

    @property
    def end(self) -> int:
        return self.first + self.rows


def check_images(
    images: tuple[ImageSpan, ...], prompt_ids: list[int], tower: Tower | None, blind: str = "this model reads text only"
) -> None:
    """Raises RequestError where a tower cannot read them, or their rows are not those of their grid. A placeholder
    of no image is a token like any other. blind: why there is no tower."""
    if images and tower is None:
        raise RequestError(f"images are not read: {blind}", "images")
    end = 0
    for number, image in enumerate(images):
        assert tower is not None
        if wrong := _wrong(image, prompt_ids, tower, end):
            raise RequestError(f"images[{number}]: {wrong}", "images")
        end = image.end


def _wrong(image: ImageSpan, prompt_ids: list[int], tower: Tower, after: int) -> str:
    """What; "" where nothing is. after: the end of the image before."""
    pixels, processor = image.pixels, tower.processor
    if pixels.height % processor.side or pixels.width % processor.side or min(pixels.height, pixels.width) < 1:
        return f"{pixels.height} x {pixels.width} pixels are no whole tokens of {processor.side} x {processor.side}"
    if image.grid != processor.grid(pixels.height, pixels.width) or image.rows != processor.tokens(image.grid):
        return f"{image.rows} rows and the grid {image.grid} are not those of its pixels"
    if pixels.inline is not None and len(pixels.inline) != pixels.nbytes:
        return f"{len(pixels.inline)} bytes are not those of {pixels.height} x {pixels.width} pixels"
    if pixels.height * pixels.width > processor.max_pixels:
        return f"{pixels.height} x {pixels.width} pixels are more than the {processor.max_pixels} of an image"
    if len(image.key) != KEY_BYTES:
        return f"its key must have {KEY_BYTES} bytes, not {len(image.key)}"
    ids = prompt_ids[image.first : image.end] if image.first >= after else []
    return "" if ids == [tower.placeholder] * image.rows else f"its rows are not all of token {tower.placeholder}"
