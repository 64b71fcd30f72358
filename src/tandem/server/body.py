"""Request bodies: read with a limit, decoded and checked by msgspec, every complaint translated for the client."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from tandem.server.errors import ApiError, ClientGone
from tandem.server.limits import DISCARD_BYTES, DISCARD_SECONDS, MAX_BODY_BYTES

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>key in )?`\$(?P<path>.*)`)?$", re.DOTALL)


async def read_body(request: Request) -> bytes:
    """The whole body, at most MAX_BODY_BYTES of it in memory. Raises ApiError 413."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        if "expect" not in request.headers and int(declared) <= DISCARD_BYTES:
            await _discard(request)
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                parts.clear()
                await _discard(request)
                raise _too_large()
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts)


async def _discard(request: Request) -> None:
    """Read on without keeping, for a while: a client that is still sending does not look at the answer."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while size < DISCARD_BYTES:
                message = await request.receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large() -> ApiError:
    message = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; send less text"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


async def read_json(request: Request, kind: type[T]) -> T:
    """Body → checked struct. Raises ApiError 400 naming the field, 413."""
    return decode(await read_body(request), kind)


def decode(body: bytes, kind: type[T]) -> T:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from error
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not valid UTF-8", code="invalid_utf8") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


def _complaint(text: str) -> ApiError:
    """msgspec's "Expected `int`, got `str` - at `$.n`" → "n: expected `int`, got `str`", param "n"."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, None)
    param = (path or "").lstrip(".") or None
    what = what[:1].lower() + what[1:]
    return ApiError(400, f"{param or 'the body'}: {what}", param=param, code="invalid_type")


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The OpenAPI fragment that documents a JSON body of this type, definitions inlined by reference."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
