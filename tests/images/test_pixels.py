"""Pixels are those of Transformers' Pillow processor, bit for bit; what no processor takes is refused by name."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from pictures import MODES, animated, bomb, encoded, picture, png, turned
from tandem.engine.images.decode import decoded
from tandem.engine.images.limits import MAX_ENCODED_BYTES
from tandem.engine.images.question import Ask, Decoded
from tandem.engine.images.resize import target_size

SIDE, LEAST, MOST = 32, 1 << 16, 1 << 20
ASK = Ask(side=SIDE, min_pixels=LEAST, max_pixels=MOST)
SIZES = ((1, 1), (7, 5), (33, 31), (199, 1), (3, 300), (641, 479), (1500, 1100))


@pytest.fixture(scope="module")
def processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": LEAST, "longest_edge": MOST},
        do_normalize=False, do_rescale=False,
    )  # fmt: skip


def oracle(processor, image: Image.Image) -> np.ndarray:
    """Transformers' pixels, [height, width, 3], put together again from its patches."""
    made = processor([ImageOps.exif_transpose(image)], return_tensors="np")
    _, high, wide = (int(n) for n in made["image_grid_thw"][0])
    patches = made["pixel_values"].reshape(high // 2, wide // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
    return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(high * 16, wide * 16, 3)


def pixels_of(data: bytes, ask: Ask = ASK) -> np.ndarray:
    found, pixels = decoded(data, ask)
    assert not found.error, found
    return np.frombuffer(pixels, np.uint8).reshape(found.height, found.width, 3)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixels_of_any_size(processor, size):
    data = encoded(picture("RGB", *size))
    assert np.array_equal(pixels_of(data), oracle(processor, opened(data)))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "I;16"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_pixels_of_every_mode(processor, mode, kind):
    image = picture(mode, 97, 61)
    if kind in ("WEBP", "JPEG"):
        image = image.convert("L" if mode in ("1", "L") and kind == "JPEG" else "RGBA" if "A" in mode else "RGB")
    if kind == "JPEG" and image.mode == "RGBA":
        image = image.convert("CMYK")
    data = encoded(image, kind)
    assert np.array_equal(pixels_of(data), oracle(processor, opened(data)))


def test_a_transparent_colour_of_a_palette(processor):
    data = encoded(picture("P", 97, 61), "PNG", transparency=3)
    assert np.array_equal(pixels_of(data), oracle(processor, opened(data)))


def test_what_is_clear_lies_on_white():
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    assert (pixels_of(encoded(clear)) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_orientation(processor, orientation, kind):
    data = turned(orientation, kind)
    assert np.array_equal(pixels_of(data), oracle(processor, opened(data)))


def test_an_orientation_that_is_none_turns_nothing():
    assert np.array_equal(pixels_of(turned(9)), pixels_of(turned(1)))


def test_sixteen_bits_lose_their_lower_half():
    """Transformers cuts them off at 255: nearly all would be white."""
    deep = picture("I;16", 64, 1024)
    upper = Image.fromarray((np.asarray(deep) >> 8).astype(np.uint8))
    assert np.array_equal(pixels_of(encoded(deep)), pixels_of(encoded(upper)))


def test_the_first_frame_of_several(processor):
    for kind in ("GIF", "WEBP"):
        data = animated(kind)
        found, _ = decoded(data, ASK)
        assert found.frames > 1
        assert np.array_equal(pixels_of(data), oracle(processor, opened(data)))


def test_base64_with_lines_and_without_its_end():
    data = png(10, 7)
    text = base64.encodebytes(data).replace(b"=", b"")
    ask = Ask(side=SIDE, min_pixels=LEAST, max_pixels=MOST, base64=True)
    assert np.array_equal(pixels_of(text, ask), pixels_of(data))


def test_sizes_alone_decode_nothing():
    """Of a file that ends behind its head the size is known."""
    ask = Ask(side=SIDE, min_pixels=LEAST, max_pixels=MOST, pixels=False)
    found, pixels = decoded(png(641, 479)[:200], ask)
    assert (found.height, found.width, pixels) == (*target_size(479, 641, SIDE, LEAST, MOST), b"")


REFUSED = {
    "no image": (b"%PDF-1.7 and more", "invalid_image", "PNG, JPEG, WEBP or GIF"),
    "nothing": (b"", "invalid_image", "PNG, JPEG, WEBP or GIF"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image", "no format that is read"),
    "tiff": (encoded(picture("RGB", 8, 8), "TIFF"), "invalid_image", "no format that is read"),
    "bmp": (encoded(picture("RGB", 8, 8), "BMP"), "invalid_image", "no format that is read"),
    "cut": (png(300, 300)[:5000], "invalid_image", "cannot be decoded"),
    "cut jpeg": (encoded(picture("RGB", 300, 300), "JPEG")[:5000], "invalid_image", "cannot be decoded"),
    "narrow": (encoded(picture("L", 201, 1)), "invalid_image", "too narrow"),
    "bomb": (bomb(), "image_too_large", "20000 x 20000 pixels"),
    "65 million": (bomb(65_000, 1_000), "image_too_large", "65000 x 1000 pixels"),
    "large file": (b"\0" * (MAX_ENCODED_BYTES + 1), "image_too_large", "20 are the most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    data, code, said = REFUSED[case]
    found, pixels = decoded(data, ASK)
    assert found.code == code and said in found.error and pixels == b""


def test_no_base64_is_refused():
    found, _ = decoded(b"!!!!", Ask(side=SIDE, min_pixels=LEAST, max_pixels=MOST, base64=True))
    assert "no base64" in found.error and found.code == "invalid_image"


def test_any_byte_of_a_file_may_be_wrong():
    """Nothing but an answer comes of it."""
    for data in (png(20, 20), turned(6), animated(), animated("WEBP")):
        for place in range(0, len(data), max(1, len(data) // 60)):
            broken = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
            found, pixels = decoded(broken, ASK)
            assert isinstance(found, Decoded) and bool(found.error) != bool(pixels)
