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
from tandem.errors import EngineError, RequestError
from tandem.server.chat.content import Image
from tandem.server.errors import overloaded
from tandem.server.limits import (
    LOW_DETAIL_TOKENS,
    MAX_DECODE_SECONDS,
    MAX_HELD_IMAGES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_RECENT_IMAGES,
    MAX_WAITING_IMAGE_BYTES,
    RECENT_PIXEL_BYTES,
)
from tandem.spec.vision import Grid, Processor, Tower

T = TypeVar("T")
Name = tuple[bytes, int]
"""A file's hash, and the tokens that its image may have."""


class Pixels:
    """A resized image in memory of this process, which the engine maps by its path. It is freed when nothing refers to
    it any more."""

    def __init__(self, resized: Resized, processor: Processor) -> None:
        self._file = -1  # for `__del__`, where there are no more files
        decoded = resized.decoded
        self.grid: Grid = processor.grid(decoded.height, decoded.width)
        self.nbytes = len(resized.pixels)
        self._file = os.memfd_create("image", os.MFD_CLOEXEC)
        with open(self._file, "wb", closefd=False) as file:
            file.write(resized.pixels)
        self.key = resized.key(processor)
        path, inode = f"/proc/{os.getpid()}/fd/{self._file}", os.fstat(self._file).st_ino
        self.source = PixelSource(height=decoded.height, width=decoded.width, path=path, inode=inode)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


@dataclass(frozen=True, slots=True)
class PreparedImage:
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


class Budget:
    """Sums over the images of a request: pixels of their files, bytes of what they are resized to, rows of the prompt,
    seconds of the decoder."""

    def __init__(self, limit: TokenLimit | None, most_bytes: int) -> None:
        """limit: of prompt and answer together. most_bytes: of all requests' resized images."""
        self._limit, self._most_bytes = limit, most_bytes
        self._images = self._pixels = self._rows = 0
        self._bytes = dict[bytes, int]()  # by key: equal images are there once
        self.seconds = 0.0

    def check(self, image: Image) -> None:
        """Raises RequestError where one more is too many."""
        if self._images >= MAX_IMAGES:
            text = f"{image.where}: there are newer images, and {MAX_IMAGES} are the most"
            raise RequestError(text, image.where, "too_many_images")
        if self.seconds > MAX_DECODE_SECONDS:
            text = f"{image.where}: the images of this request take too long to decode; send smaller ones"
            raise RequestError(text, image.where, "image_too_large")

    def hold(self, pixels: Pixels, where: str) -> None:
        """Raises RequestError where the images of this request alone are more than all may be: waiting is no help."""
        if sum((self._bytes | {pixels.key: pixels.nbytes}).values()) > self._most_bytes:
            text = f"the images up to {where} take more than the {self._most_bytes >> 20} MiB that all requests' may"
            raise RequestError(f"{text}: send fewer, or smaller ones", where, "image_too_large")
        self._bytes[pixels.key] = pixels.nbytes

    def take(self, picture: PreparedImage, image: Image) -> None:
        """Raises RequestError where they are too many with this one, which then does not count."""
        if (pixels := self._pixels + picture.source_pixels) > MAX_IMAGE_PIXELS:
            most = MAX_IMAGE_PIXELS // 10**6
            text = f"the images up to {image.where} have {pixels // 10**6} million pixels; {most} are the most"
            raise RequestError(f"{text}: send fewer, or smaller ones", image.where, "image_too_large")
        if picture.pixels is not None:
            self.hold(picture.pixels, image.where)
        self._images, self._pixels, self._rows = self._images + 1, pixels, self._rows + picture.rows
        if self._limit is not None and self._rows >= self._limit.tokens:
            raise too_long(f"at least {self._rows}", self._limit)

    def is_too_long(self, error: Exception) -> bool:
        """Whether the prompt as a whole is refused, whichever image said so."""
        return self._limit is not None and self._rows >= self._limit.tokens and isinstance(error, RequestError)


class ImageReader:
    """Lives on the event loop. One image is decoded at a time, in a process of its own; those whose client leaves
    while they wait are not."""

    def __init__(self, tower: Tower, most_tokens: int, most_bytes: int) -> None:
        """most_tokens: of an image. most_bytes: of resized images, of running requests and those that are kept."""
        self._most_bytes = most_bytes
        self.limit: TokenLimit | None = None  # of prompt and answer together
        self.placeholder = tower.placeholder
        self._processor = tower.processor
        self._most_tokens = most_tokens
        self.counts = ImageCounts()
        self._process = ImageProcess(tower.processor)
        self._thread = ThreadPoolExecutor(1, "images")  # waits for the process
        self._waiting = 0  # bytes
        self._recent: OrderedDict[Name, PreparedImage] = OrderedDict()
        self._unreadable: OrderedDict[Name, Unreadable] = OrderedDict()  # that an older turn had
        self._held: WeakValueDictionary[bytes, Pixels] = WeakValueDictionary()  # by key

    def close(self) -> None:
        """Also in the midst of an image."""
        self._process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(self, images: Sequence[Image], *, sizes: bool = False) -> list[PreparedImage | Unreadable]:
        """Each image, in order. sizes: nothing is decoded. What is too much becomes a note where the image is of an
        older turn, whose client sends it again and again; the newest come first. Raises RequestError where the newest
        turn has it; ApiError 429; EngineError where the decoder fails."""
        newest, older = ([i for i, image in enumerate(images) if image.older == old] for old in (False, True))
        if len(newest) > MAX_IMAGES:
            text = f"at most {MAX_IMAGES} images in one request, not {len(newest)}; leave out the oldest"
            raise RequestError(text, images[newest[MAX_IMAGES]].where, "too_many_images")
        read, budget = dict[int, PreparedImage | Unreadable](), Budget(self.limit, self._most_bytes)
        with self._in_line(sum(len(image.data) for image in images)):
            for number in (*newest, *reversed(older)):
                read[number] = await self._within(budget, images[number], sizes)
        return [read[number] for number in range(len(images))]

    async def _within(self, budget: Budget, image: Image, sizes: bool) -> PreparedImage | Unreadable:
        try:
            budget.check(image)
            picture = await self._read(image, sizes, budget)
            if isinstance(picture, PreparedImage):
                budget.take(picture, image)
            return picture
        except (RequestError, EngineError) as error:
            if not image.older or self._process.closed or budget.is_too_long(error):
                raise
            return Unreadable(str(error))

    def held(self, spans: Sequence[ImageSpan]) -> list[Pixels]:
        """The pixels of these: as long as somebody has them, their paths are good."""
        return [self._held[span.key] for span in spans]

    async def _read(self, image: Image, sizes: bool, budget: Budget) -> PreparedImage | Unreadable:
        most = min(self._most_tokens, LOW_DETAIL_TOKENS) if image.detail == "low" else self._most_tokens
        data = image.data.encode("ascii", "replace")
        name = (await asyncio.to_thread(lambda: hashlib.sha256(data).digest()), most)
        if (picture := self._recent.get(name)) is not None:
            self._recent.move_to_end(name)
            self.counts.again += 1
            return picture
        if image.older and name in self._unreadable:
            return self._unreadable[name]
        try:
            picture = await self._on_thread(lambda: self._decoded(data, image.where, most, sizes, budget))
        except (RequestError, EngineError) as error:
            self.counts.refused += 1
            if image.older and not self._process.closed:
                self._unreadable[name] = Unreadable(str(error))
                _shrink(self._unreadable)
            raise
        if picture.pixels is None:
            return picture
        budget.hold(picture.pixels, image.where)
        return self._cached(name, replace(picture, pixels=self._held_once(picture.pixels)))

    def _decoded(self, data: bytes, where: str, most: int, sizes: bool, budget: Budget) -> PreparedImage:
        began = time.monotonic()
        try:
            resized = self._process.resized(data, where, most_tokens=most, base64=True, pixels=not sizes)
        finally:
            seconds = time.monotonic() - began
            self.counts.seconds, budget.seconds = self.counts.seconds + seconds, budget.seconds + seconds
        decoded = resized.decoded
        rows = self._processor.tokens(self._processor.grid(decoded.height, decoded.width))
        pixels = None if sizes else Pixels(resized, self._processor)
        return PreparedImage(rows, decoded.source_pixels, decoded.frames > 1, pixels)

    def _held_once(self, pixels: Pixels) -> Pixels:
        """The same, or another file's that are equal. Those that are kept make room. Raises ApiError 429 where running
        requests hold too many."""
        if (known := self._held.get(pixels.key)) is not None:
            return known
        while not (room := self._has_room(pixels.nbytes)) and self._recent:
            self._recent.popitem(last=False)
        if not room:
            raise overloaded("the running requests hold too many images; try again later")
        self._held[pixels.key] = pixels
        return pixels

    def _has_room(self, nbytes: int) -> bool:
        held = sum(pixels.nbytes for pixels in self._held.values())
        return held + nbytes <= self._most_bytes and len(self._held) < MAX_HELD_IMAGES

    def _cached(self, name: Name, picture: PreparedImage) -> PreparedImage:
        self.counts.decoded += 1
        self._recent[name] = picture
        size = sum(one.nbytes for one in self._recent.values())
        while size > RECENT_PIXEL_BYTES and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            size -= oldest.nbytes
        _shrink(self._recent)
        return picture

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


def _shrink(cache: OrderedDict[Name, T]) -> None:
    while len(cache) > MAX_RECENT_IMAGES:
        cache.popitem(last=False)
