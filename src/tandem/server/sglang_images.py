"""`image_data` of /generate: images of prompts that have the model's own placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.engine.images.placeholders import with_rows
from tandem.engine.vision.spans import ImageSpan
from tandem.errors import RequestError
from tandem.server.chat.attachments import Attachment, ImageSource, Sight
from tandem.server.chat.content import Content, images_of, joined
from tandem.server.errors import not_available
from tandem.server.prompts.images import ImageReader, PreparedImage
from tandem.server.sglang_schema import SglangRequest
from tandem.server.state import ServerState


class PromptWithImages(NamedTuple):
    """A prompt with the rows of its images. prepared: keeps their pixels."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    prepared: tuple[PreparedImage, ...] = ()


async def with_images(
    state: ServerState, body: SglangRequest, prompts: Sequence[list[int]], batched: bool
) -> list[PromptWithImages]:
    """Raises RequestError, ApiError 400 and 429, EngineError."""
    if not body.image_data:
        return [PromptWithImages(ids) for ids in prompts]
    if state.images is None:
        raise not_available("image_data")
    listed = _listed(body.image_data, len(prompts), batched)
    parts = [_parts(state, ids, *each) for ids, each in zip(prompts, listed, strict=True)]
    read = iter(await state.images.read(images_of(joined([part for each in parts for part in each]))))
    pictures = [[one for _, one in zip(each, read, strict=False) if isinstance(one, PreparedImage)] for each in parts]
    return [_shown(state.images, ids, each) for ids, each in zip(prompts, pictures, strict=True)]


def _listed(
    images: str | list[str | list[str] | None], count: int, batched: bool
) -> list[tuple[list[str], list[str]]]:
    """The images of each prompt, and their fields. Raises RequestError."""
    if batched:
        lists = images if isinstance(images, list) else [images]
        if len(lists) != count:
            raise RequestError(f"image_data has {len(lists)} entries for {count} prompts", "image_data")
        return [_named(each, f"image_data[{i}]") for i, each in enumerate(lists)]
    if isinstance(images, list) and len(images) == 1 and isinstance(images[0], list):
        return [_named(images[0], "image_data[0]")]
    return [_named(images, "image_data")]


def _named(images: str | Sequence[str | list[str] | None] | None, where: str) -> tuple[list[str], list[str]]:
    if isinstance(images, str):
        return [images], [where]
    listed = [each for each in images or () if isinstance(each, str)]
    if len(listed) != len(images or ()):
        raise RequestError(f"{where}: images of one prompt are a list of texts in base64", where)
    return listed, [f"{where}[{i}]" for i in range(len(listed))]


def _parts(state: ServerState, ids: list[int], images: list[str], wheres: list[str]) -> list[Content]:
    """The images of one prompt. Raises RequestError, ApiError 400."""
    reader = state.images
    assert reader is not None
    if (places := ids.count(reader.placeholder)) != len(images):
        name = state.tokenizer.token_text(reader.placeholder)
        text = f"image_data has {len(images)} images, and the prompt has {name} {places} times: write it once for each"
        raise RequestError(text, "image_data")
    sight = Sight([], images=True, refuses=True)
    return [
        Attachment("image", field="", image=ImageSource(data, bare=True)).shown(where, sight)
        for data, where in zip(images, wheres, strict=True)
    ]


def _shown(reader: ImageReader, ids: list[int], images: Sequence[PreparedImage]) -> PromptWithImages:
    ids, firsts = with_rows(ids, reader.placeholder, [one.rows for one in images])
    return PromptWithImages(
        ids, tuple(one.span(first) for one, first in zip(images, firsts, strict=True)), tuple(images)
    )
