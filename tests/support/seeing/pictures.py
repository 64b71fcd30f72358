"""Image files, made here: every mode that the four formats have, orientations, and files that are broken."""

from __future__ import annotations

import io
import random
import struct
import zlib

from PIL import Image

MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")  # of PNG


def picture(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise: no pixel is like its neighbours."""
    draw = random.Random(f"{mode} {width} {height} {seed}")
    if mode == "P":
        return picture("RGB", width, height, seed).convert("P", palette=Image.Palette.ADAPTIVE)
    if mode == "1":
        return picture("L", width, height, seed).convert("1")
    channels = {"L": 1, "I;16": 2, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    return Image.frombytes(mode, (width, height), draw.randbytes(width * height * channels))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    return encoded(picture("RGB", width, height, seed))


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(picture("RGB", 50, 37), kind, exif=exif)


def animated(kind: str = "GIF") -> bytes:
    first, second = (picture("P", 20, 20, seed) for seed in (1, 2))
    return encoded(first, kind, save_all=True, append_images=[second])


def bomb(width: int = 20_000, height: int = 20_000) -> bytes:
    """A PNG of few bytes and many pixels, all black."""
    row = zlib.compressobj(9)
    line = b"\0" + bytes(-(-width // 8))
    data = b"".join(row.compress(line) for _ in range(height)) + row.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
