"""`ImageReader`: images of requests as pixels that the engine can map, each decoded once while it is of use."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakValueDictionary

from tandem.engine.images.process import ImageProcess, Resized
from tandem.engine.limits import TokenLimit, too_long
from tandem.engine.vision.spans import ImageSpan, PixelSource
from tandem.errors import RequestError
from tandem.server.chat.content import Image
from tandem.server.errors import overloaded
from tandem.server.limits import (
    LOW_DETAIL_TOKENS,
    MAX_HELD_PIXEL_BYTES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_WAITING_IMAGE_BYTES,
    RECENT_PIXEL_BYTES,
)
from tandem.spec.vision import Grid, Processor, Tower

T = TypeVar("T")


class Pixels:
    """A resized image in memory of this process, which the engine maps by its path. It is freed when nothing refers to
    it any more."""

    def __init__(self, resized: Resized, processor: Processor) -> None:
        sizes = resized.found
        self.grid: Grid = processor.grid(sizes.height, sizes.width)
        self.nbytes = len(resized.pixels)
        self._file = os.memfd_create("image", os.MFD_CLOEXEC)
        with open(self._file, "wb", closefd=False) as file:
            file.write(resized.pixels)
        self.key = resized.key(processor)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.source = PixelSource(height=sizes.height, width=sizes.width, path=path)

    def __del__(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Seen:
    """rows: tokens of the image. pixels: None where only its size was asked for. several: it has later frames, which
    are not shown. source_pixels: of its file."""

    rows: int
    source_pixels: int
    several: bool = False
    pixels: Pixels | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.pixels is None else self.pixels.nbytes

    def span(self, first: int) -> ImageSpan:
        """first: its first row in the prompt."""
        assert self.pixels is not None
        pixels = self.pixels
        return ImageSpan(first=first, rows=self.rows, grid=pixels.grid, key=pixels.key, pixels=pixels.source)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An image of an older turn, and why it is not shown."""

    why: str


@dataclass(slots=True)
class ImageCounts:
    """For /metrics. again: images whose pixels were still there. seconds: of decoding."""

    decoded: int = 0
    again: int = 0
    refused: int = 0
    seconds: float = 0.0


class ImageReader:
    """Lives on the event loop. One image is decoded at a time, in a process of its own; those whose client leaves
    while they wait are not."""

    def __init__(self, tower: Tower, most_tokens: int) -> None:
        self.limit: TokenLimit | None = None  # of prompt and answer together
        self.placeholder = tower.placeholder
        self._processor = tower.processor
        self._most_tokens = most_tokens
        self.counts = ImageCounts()
        self._process = ImageProcess(tower.processor)
        self._thread = ThreadPoolExecutor(1, "images")  # waits for the process
        self._waiting = 0  # bytes
        self._recent: OrderedDict[tuple[bytes, int], Seen] = OrderedDict()
        self._held: WeakValueDictionary[bytes, Pixels] = WeakValueDictionary()  # by key

    def close(self) -> None:
        """Also in the midst of an image."""
        self._process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, images: Sequence[Image], *, sizes: bool = False) -> list[Seen | Unreadable]:
        """sizes: nothing is decoded. Raises RequestError; ApiError 429; EngineError where the decoder fails."""
        if len(images) > MAX_IMAGES:
            text = f"at most {MAX_IMAGES} images in one request, not {len(images)}; leave out the oldest"
            raise RequestError(text, images[MAX_IMAGES].where, "too_many_images")
        outcomes = list[Seen | Unreadable]()
        with self._in_line(sum(len(image.data) for image in images)):
            for image in images:
                outcomes.append(await self._read(image, sizes))
                self._check_sum([one for one in outcomes if isinstance(one, Seen)], image)
        return outcomes

    def held(self, spans: Sequence[ImageSpan]) -> list[Pixels]:
        """The pixels of these: as long as somebody has them, their paths are good."""
        return [self._held[span.key] for span in spans]

    async def _read(self, image: Image, sizes: bool) -> Seen | Unreadable:
        most = min(self._most_tokens, LOW_DETAIL_TOKENS) if image.detail == "low" else self._most_tokens
        data = image.data.encode("ascii", "replace")
        name = (await self._on_thread(lambda: hashlib.sha256(data).digest()), most)
        if (picture := self._recent.get(name)) is not None:
            self._recent.move_to_end(name)
            self.counts.again += 1
            return picture
        try:
            picture = await self._on_thread(lambda: self._decoded(data, image.where, most, sizes))
        except RequestError as error:
            self.counts.refused += 1
            if image.older:
                return Unreadable(str(error))
            raise
        return picture if sizes else self._kept(name, picture)

    def _decoded(self, data: bytes, where: str, most: int, sizes: bool) -> Seen:
        began = time.monotonic()
        resized = self._process.resized(data, where, most_tokens=most, base64=True, pixels=not sizes)
        self.counts.seconds += time.monotonic() - began
        facts = resized.found
        rows = self._processor.tokens(self._processor.grid(facts.height, facts.width))
        pixels = None if sizes else Pixels(resized, self._processor)
        return Seen(rows, facts.source_pixels, facts.frames > 1, pixels)

    def _kept(self, name: tuple[bytes, int], picture: Seen) -> Seen:
        """The same; another file's pixels where they are equal. Raises ApiError 429 where running requests hold too
        many."""
        assert picture.pixels is not None
        held = sum(pixels.nbytes for pixels in self._held.values())
        if held + picture.pixels.nbytes > MAX_HELD_PIXEL_BYTES:
            raise overloaded("the running requests hold too many images; try again later")
        self.counts.decoded += 1
        picture = replace(picture, pixels=self._held.setdefault(picture.pixels.key, picture.pixels))
        self._recent[name] = picture
        size = sum(one.nbytes for one in self._recent.values())
        while size > RECENT_PIXEL_BYTES and len(self._recent) > 1:
            _, dropped = self._recent.popitem(last=False)
            size -= dropped.nbytes
        return picture

    def _check_sum(self, images: Sequence[Seen], newest: Image) -> None:
        """Raises RequestError where the images so far are too many for a request."""
        if (pixels := sum(one.source_pixels for one in images)) > MAX_IMAGE_PIXELS:
            most = MAX_IMAGE_PIXELS // 10**6
            text = f"the images up to {newest.where} have {pixels // 10**6} million pixels; {most} are the most"
            raise RequestError(f"{text}: send fewer, or smaller ones", newest.where, "image_too_large")
        rows = sum(one.rows for one in images)
        if self.limit is not None and rows >= self.limit.tokens:
            raise too_long(f"at least {rows}", self.limit)

    @contextmanager
    def _in_line(self, nbytes: int) -> Iterator[None]:
        """Raises ApiError 429."""
        if self._waiting and self._waiting + nbytes > MAX_WAITING_IMAGE_BYTES:
            raise overloaded("too many images are waiting to be decoded; try again later")
        self._waiting += nbytes
        try:
            yield
        finally:
            self._waiting -= nbytes

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
