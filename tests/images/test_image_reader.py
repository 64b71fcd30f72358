"""`ImageReader`: what of a request's images is too much, and pixels that are not another image's."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image as Picture

from seeing_server import PROCESSOR
from tandem.engine.vision.pixels import pixels_of
from tandem.errors import EngineError, RequestError
from tandem.server.chat.content import Image
from tandem.server.prompts import images
from tandem.server.prompts.images import ImageReader, PreparedImage, Unreadable
from tandem.spec.vision import Tower

TOWER = Tower(
    depth=1, hidden=8, heads=1, width=8, side=4, out=8, placeholder=3, start=4, end=5, processor=PROCESSOR
)  # fmt: skip


def picture(shade: int, side: int = 64) -> str:
    file = io.BytesIO()
    Picture.new("RGB", (side, side), (shade, shade, shade)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def image(shade: int, older: bool = False, data: str | None = None) -> Image:
    return Image(data or picture(shade), f"images[{shade}]", "high", older=older)


@pytest.fixture
def reader() -> Iterator[ImageReader]:
    made = ImageReader(TOWER, 4096, 1 << 30)
    yield made
    made.close()


def read(reader: ImageReader, *several: Image) -> list[Any]:
    return asyncio.run(reader.read(several))


def test_pixels_of_another_image_are_never_read(reader: ImageReader) -> None:
    """A file's number is given again once an image is gone; an image of equal size may be there."""
    (first,) = read(reader, image(1))
    source = first.pixels.source
    assert pixels_of(source).max() == 1
    reader._recent.clear()
    del first
    (second,) = read(reader, image(2))
    assert second.pixels.source.path == source.path and second.pixels.source.inode != source.inode
    with pytest.raises(EngineError, match="pixels of an image are gone"):
        pixels_of(source)


def test_too_many_older_images_become_notes_and_the_newest_are_shown(reader: ImageReader, monkeypatch: Any) -> None:
    monkeypatch.setattr(images, "MAX_IMAGES", 3)
    answers = read(reader, *[image(i, older=True) for i in range(4)], image(9))
    assert [type(one) for one in answers] == [Unreadable, Unreadable, PreparedImage, PreparedImage, PreparedImage]
    assert "newer images" in answers[0].why
    with pytest.raises(RequestError, match="at most 3 images"):
        read(reader, *[image(i) for i in range(4)])


def test_too_many_pixels_likewise(reader: ImageReader, monkeypatch: Any) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 2 * 64 * 64)
    answers = read(reader, *[image(i, older=True) for i in range(3)], image(9))
    assert [type(one) for one in answers] == [Unreadable, Unreadable, PreparedImage, PreparedImage]


def test_the_decoder_s_time_is_divided(reader: ImageReader, monkeypatch: Any) -> None:
    monkeypatch.setattr(images, "MAX_DECODE_SECONDS", 0.0)
    answers = read(reader, *[image(i, older=True) for i in range(3)])
    assert [type(one) for one in answers] == [Unreadable, Unreadable, PreparedImage]
    assert [type(one) for one in read(reader, image(2, older=True), image(2))] == [PreparedImage, PreparedImage], (
        "known ones take none"
    )


def test_an_older_image_that_cannot_be_read_is_tried_once(reader: ImageReader, monkeypatch: Any) -> None:
    """Whoever refuses it: an agent sends it again with each request."""
    for error in (RequestError("no image", "x"), EngineError("the decoder ended twice")):
        calls = list[int]()

        def fails(*of: Any, error: Exception = error, calls: list[int] = calls, **more: Any) -> Any:
            calls.append(1)
            raise error

        monkeypatch.setattr(reader._process, "resized", fails)
        name = 100 + len(str(error))
        for _ in range(2):
            assert [type(one) for one in read(reader, image(name, older=True))] == [Unreadable]
        assert len(calls) == 1
        with pytest.raises(type(error)):
            read(reader, image(name))


def test_few_are_kept(reader: ImageReader, monkeypatch: Any) -> None:
    monkeypatch.setattr(images, "MAX_RECENT_IMAGES", 2)
    read(reader, *[image(i) for i in range(4)])
    assert len(reader._recent) == 2
