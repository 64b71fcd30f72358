"""Bodies: requests' are read with a limit, decoded and checked by msgspec, every complaint translated for the client;
answers' are JSON."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from tandem.server.errors import ApiError, ClientGone
from tandem.server.guard.bodies import HELD, UnfinishedBodies
from tandem.server.guard.shape import BodyShape, shape_of
from tandem.server.limits import (
    DISCARD_BYTES,
    DISCARD_SECONDS,
    INLINE_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_JSON_VALUES,
    SMALL_BODY_BYTES,
)

T = TypeVar("T", bound=msgspec.Struct)
D = TypeVar("D")

Fields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(Fields)
_ANYTHING = msgspec.json.Decoder(Any)

_CHOICE = re.compile(r"^invalid enum value (.+)$", re.S)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>key in )?`\$(?P<path>.*)`)?$", re.DOTALL)


async def read_body(request: Request) -> bytes:
    """The whole body, at most MAX_BODY_BYTES of it in memory. Raises ApiError 413, 415, 503 beside others."""
    await _check_coding(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        if "expect" not in request.headers and int(declared) <= DISCARD_BYTES:
            await _discard(request)
        raise _too_large()
    bodies: UnfinishedBodies = request.app.state.bodies
    with bodies.reading() as body:
        try:
            async for part in request.stream():
                body.add(part)
                if len(body.data) > MAX_BODY_BYTES:
                    raise _too_large()
        except ClientDisconnect as error:
            raise ClientGone from error
        except ApiError:
            body.drop()
            await _discard(request)
            raise
        if (held := request.scope.get("state", {}).get(HELD)) is not None:
            held.hold(request.scope, len(body.data))
        return bytes(body.data)


async def _check_coding(request: Request) -> None:
    """A small body could unfold to gigabytes. Raises ApiError 415."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        await _discard(request)
        text = f"content-encoding: {coding[:40]!r} is not read; send the body as it is"
        raise ApiError(415, text, code="not_available", headers={"Connection": "close"})


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


async def read_fields(request: Request) -> Fields:
    """A body's top-level fields, each still as it was sent. Raises ApiError 400, 413."""
    body = await read_body(request)
    return await parsed(len(body), lambda: _fields_of(body))


async def parsed(nbytes: int, work: Callable[[], D]) -> D:
    """Runs `work` on so many bytes, on a thread where they are many."""
    return work() if nbytes <= INLINE_BODY_BYTES else await asyncio.to_thread(work)


def _fields_of(body: bytes) -> Fields:
    _check_values(body)
    return _decode(body, _FIELDS)


def _check_values(body: bytes) -> None:
    """Decoding holds up everybody else, for about as long as this number says. Raises ApiError 400."""
    lists = body.count(b"[") + body.count(b"{")
    if body.count(b",") + 5 * lists + 16 * body.count(b":") > MAX_JSON_VALUES:
        message = "the body holds too many JSON values; send fewer of them, or less text"
        raise ApiError(400, message, code="too_many_values")


def decode_fields(fields: Fields, kind: type[T]) -> tuple[T, dict[str, Any]]:
    """Those that `kind` has, checked, and what it does not have at any depth: a name such as "messages[].prefix" with
    a value that says something. Of the body itself the values are still as they were sent, whatever they say.
    Raises ApiError 400 naming the field."""
    values: dict[str, Any] = {}
    known = _known_fields(kind)
    unknown: dict[str, Any] = {name: raw for name, raw in fields.items() if name not in known}
    for sent_as, field in known.items():
        if sent_as in fields and not (field.defaulted and bytes(fields[sent_as]) == b"null"):
            values[field.name] = _decode_field(fields[sent_as], field, sent_as, unknown)
        elif field.required:
            raise _complaint(f"Object missing required field `{sent_as}`", "")
    return kind(**values), unknown


def _decode_field(raw: msgspec.Raw, field: _KnownField, sent_as: str, unknown: dict[str, Any]) -> Any:
    """Objects are decoded once, to look at what they have, and then made what they should be."""
    if not field.shape.has_fields:
        try:
            return _decode(raw, field.decoder, sent_as)
        except ApiError as error:
            if not _may_be_whole(raw, error):
                raise
    value = _decode(raw, _ANYTHING, sent_as)
    try:
        checked = _converted(raw, value, field)
    except msgspec.ValidationError as error:
        raise _complaint(str(error), sent_as) from error
    field.shape.find_unknown(value, sent_as, unknown)
    return checked


def _converted(raw: msgspec.Raw, value: Any, field: _KnownField) -> Any:
    """`value` as the field's type. A null is what is left out; to JSON 3.0 is an integer, and some languages write all
    numbers so."""
    try:
        return msgspec.convert(value, field.kind)
    except msgspec.ValidationError as error:
        if "got `null`" not in str(error) and not _may_be_whole(raw, error):
            raise
        value = field.shape.without_nulls(value)
        with contextlib.suppress(msgspec.ValidationError):
            small = len(bytes(raw)) <= SMALL_BODY_BYTES
            return msgspec.convert(_whole_numbers(value) if small else value, field.kind)
        raise


def _may_be_whole(raw: msgspec.Raw, error: Exception) -> bool:
    """Whether numbers are looked at one by one: not millions."""
    return "got `float`" in str(error) and len(bytes(raw)) <= SMALL_BODY_BYTES


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [_whole_numbers(one) for one in value]
    return {key: _whole_numbers(one) for key, one in value.items()} if isinstance(value, dict) else value


def decode(body: bytes | msgspec.Raw, kind: type[D], where: str = "") -> D:
    """where: the field that `body` is the value of. Raises ApiError 400."""
    return _decode(body, msgspec.json.Decoder(kind), where)


def _decode(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[D], where: str = "") -> D:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _complaint(str(error), where) from error
    except UnicodeDecodeError as error:
        what = where or "the body"
        raise ApiError(400, f"{what} is not valid UTF-8", param=where or None, code="invalid_utf8") from error
    except msgspec.DecodeError as error:
        why = f"the body is not valid JSON: {error}" if bytes(body).strip() else "the body is empty; send JSON"
        raise ApiError(400, why, code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error


class _KnownField(NamedTuple):
    """A field of a struct. Without objects in it, `decoder` decodes it. `defaulted`: null is as if it were left out."""

    name: str
    required: bool
    defaulted: bool
    kind: Any
    decoder: msgspec.json.Decoder[Any]
    shape: BodyShape


@cache
def _known_fields(kind: type[msgspec.Struct]) -> dict[str, _KnownField]:
    """By the names under which they are sent."""
    defaulted = shape_of(kind).defaulted
    return {
        name: _KnownField(
            field.name, field.required, name in defaulted, field.type, msgspec.json.Decoder(field.type),
            shape_of(field.type),
        )
        for field in msgspec.structs.fields(kind)
        for name in (field.encode_name,)
    }  # fmt: skip


def _complaint(text: str, where: str) -> ApiError:
    """msgspec's "Expected `int`, got `str` - at `$[0].n`", of the field "x" → "x[0].n: expected …", param "x[0].n"."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, None)
    param = (where + (path or "")).lstrip(".") or None
    what = _CHOICE.sub(r"\1 is none of the values that are served here", what[:1].lower() + what[1:])
    return ApiError(400, f"{param or 'the body'}: {what}", param=param, code="invalid_type")


def json_response(content: Any) -> Response:
    """JSON response of anything that msgspec can encode."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def body_schema(kind: type[msgspec.Struct], *, needed: bool = True, **also: Any) -> dict[str, Any]:
    """The OpenAPI fragment that documents a JSON body of this type, definitions inlined by reference. needed: whether
    the body may not be left out. also: what else its JSON schema says."""
    schema = _schema_of(kind)
    if also:
        schema = {"allOf": [schema, also]}
    return {"requestBody": {"required": needed, "content": {"application/json": {"schema": schema}}}}


def with_field(name: str, **schema: Any) -> dict[str, Any]:
    """A JSON schema: the field is there and fits `schema`."""
    return {"required": [name], "properties": {name: schema}}


def one_given(*names: str) -> list[dict[str, Any]]:
    """JSON schemas for `oneOf`: one of the fields is there and not null."""
    return [with_field(name, **{"not": {"type": "null"}}) for name in names]


def answers(kind: Any, streamed: str = "text/event-stream") -> dict[str, Any]:
    """OpenAPI fragment: what a route answers. streamed: the media type of a streamed answer."""
    body: dict[str, Any] = {"application/json": {"schema": _schema_of(kind)}}
    return {"responses": {"200": {"description": "OK", "content": body | {streamed: {}}}}}


@cache
def _schema_of(kind: Any) -> dict[str, Any]:
    """JSON schema of a type, as a reference to a component. Kept: msgspec looks through all that a type holds."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return schema
