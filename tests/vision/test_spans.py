"""Images of a request: what is sent, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.vision.spans import ImageSpan, PixelSource, check_images
from tandem.errors import RequestError
from tandem.planner.choices.images import TEXT_ONLY
from tandem.spec.vision import Processor, Tower

PROCESSOR = Processor(patch=4, min_pixels=64, max_pixels=1024)
TOWER = Tower(2, 8, 2, 8, 4, 8, placeholder=9, start=7, end=8, processor=PROCESSOR)
PIXELS = PixelSource(height=8, width=16, inline=bytes(8 * 16 * 3))
SPAN = ImageSpan(first=2, rows=2, grid=(1, 2, 4), key=bytes(16), pixels=PIXELS)
IDS = [1, 7, 9, 9, 8]


def test_a_request_with_images_comes_back_as_it_went() -> None:
    request = GenerateRequest(id="a", prompt_ids=IDS, sampling=SamplingSettings(), images=(SPAN,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_images_that_fit_their_rows_are_taken() -> None:
    check_images((), [1, 2], None, TEXT_ONLY)
    check_images((SPAN,), IDS, TOWER, "")
    check_images((SPAN, msgspec.structs.replace(SPAN, first=5)), [*IDS, 9, 9], TOWER, "")


WRONG = {
    "rows": {"rows": 1},
    "first": {"first": 1},
    "behind the end": {"first": 4},
    "before the start": {"first": -3},
    "grid": {"grid": (1, 4, 2)},
    "key": {"key": b"short"},
    "inline": {"pixels": msgspec.structs.replace(PIXELS, inline=b"123")},
    "size": {"pixels": msgspec.structs.replace(PIXELS, height=9)},
    "large": {"pixels": msgspec.structs.replace(PIXELS, height=8 * 64, inline=None), "grid": (1, 128, 4), "rows": 128},
    "nothing": {"pixels": msgspec.structs.replace(PIXELS, height=0)},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_an_image_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"images\[0\]"):
        check_images((msgspec.structs.replace(SPAN, **change),), IDS, TOWER, "")


def test_two_images_have_no_row_in_common() -> None:
    with pytest.raises(RequestError, match=r"images\[1\]"):
        check_images((SPAN, SPAN), IDS, TOWER, "")


def test_a_placeholder_without_an_image_is_a_token() -> None:
    check_images((), IDS, TOWER, "")


def test_a_model_of_text_says_so() -> None:
    with pytest.raises(RequestError, match="text only"):
        check_images((SPAN,), IDS, None, TEXT_ONLY)


def test_tokens_of_another_tower() -> None:
    with pytest.raises(RequestError):
        check_images((SPAN,), IDS, replace(TOWER, placeholder=3), "")
