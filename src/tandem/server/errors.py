"""Errors as HTTP: every one has OpenAI's body {"error": {message, type, param, code}} and says what to change."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from tandem.errors import BusyError, EngineError, RequestError, TandemError
from tandem.server.info.other_routes import NO_ADVICE, hint, is_known
from tandem.server.limits import RETRY_AFTER_SECONDS

log = logging.getLogger("tandem.server")

INVALID = "invalid_request_error"


class ApiError(TandemError):
    """A refusal with its HTTP status. `code` is OpenAI's machine-readable word."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ClientGone(TandemError):
    """The client closed the connection: nobody reads an answer."""


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every refused request."""

    error: ErrorDetail


Form = Callable[[ApiError], bytes]


def unavailable(message: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return ApiError(
        503, message, kind="service_unavailable_error", code="engine_unavailable", headers=headers
    )


def overloaded(message: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", headers=headers)


def not_available(param: str, instead: str | None = None) -> ApiError:
    """`param` asks for what the server cannot do; ignoring it would change the answer. instead: what this route calls
    the same thing."""
    text = "is not available; leave it out" if instead is None else f"is not known here: give {instead}"
    return ApiError(400, f"{param} {text}", param=param, code="not_available")


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Complaints about the engine's fields (`SamplingSettings`, "prompt") get the names that the client knows."""
    try:
        yield
    except RequestError as error:
        text = re.sub(r"\w+_\w+|seed", lambda word: names.get(word[0], word[0]), str(error))
        raise RequestError(text, names.get(error.param or "", error.param), error.code) from error


def as_api_error(error: Exception, scope: Scope | None = None) -> ApiError:
    """The one translation of our error tree (and of surprises) into HTTP."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case BusyError():
            return overloaded(str(error))
        case EngineError():
            return unavailable(str(error))
        case ClientGone():
            return ApiError(499, "the client closed the connection")
        case HTTPException():
            return _from_http(error, scope)
        case _:
            log.error("a bug in the server", exc_info=error)
            return ApiError(500, "the server made a mistake; its log says where", kind="server_error")


def naming(error: ApiError) -> str:
    """The message, for dialects whose errors have no place for the field."""
    text = str(error)
    return text if error.param is None or error.param in text else f"{error.param}: {text}"


def body_of(error: ApiError) -> bytes:
    detail = ErrorDetail(str(error), error.kind, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(error: Exception, scope: Scope | None = None) -> Response:
    """scope: of the request; its route's dialect has its own form of errors."""
    api = as_api_error(error, scope)
    form = form_of(scope["app"], scope["path"]) if scope and "app" in scope else body_of
    body = form(api)
    return Response(body, api.status, api.headers, media_type="application/json")


def form_of(app: Any, path: str) -> Form:
    """How the dialect of a path says errors. app: on which `install` was called, or another."""
    forms: Mapping[str, Form] = getattr(getattr(app, "state", None), "error_forms", {})
    return next((form for prefix, form in forms.items() if path.startswith(prefix)), body_of)


def _from_http(error: HTTPException, scope: Scope | None) -> ApiError:
    """Routing errors of Starlette."""
    headers, no_route, status = error.headers, NO_ADVICE, error.status_code
    methods = "this route does not take this method"
    if status == 405 and scope is not None and is_known(scope["path"]) and "POST" not in _methods(scope):
        status = 404  # a route with a name in its path took it for one
    if status == 404 and scope is not None:
        no_route = hint(scope["path"], lambda path: bool(_methods({**scope, "path": path})))
    if status == 405 and scope is not None:
        allowed = _methods(scope)
        headers = {"Allow": ", ".join(allowed)}
        methods = f"this route takes {' and '.join(allowed)}, not {scope['method'][:20]}"
    messages = {404: no_route, 405: methods}
    codes = {404: "unknown_route", 405: "method_not_allowed"}
    message = messages.get(status, str(error.detail))
    return ApiError(status, message, code=codes.get(status), headers=headers)


def _methods(scope: Scope) -> list[str]:
    """Methods of all routes with this path; Starlette names those of the first. A route that takes any name does not
    count where the document has just this path."""
    if documented := scope["app"].openapi()["paths"].get(scope["path"]):
        methods = [method.upper() for method in documented]
        return sorted([*methods, "HEAD"] if "GET" in methods else methods)
    routes: list[BaseRoute] = scope["app"].routes
    scopes = {method: {**scope, "method": method} for method in ("DELETE", "GET", "POST")}
    methods = [m for m in scopes if any(route.matches(scopes[m])[0] is Match.FULL for route in routes)]
    return sorted([*methods, "HEAD"] if "GET" in methods else methods)


async def _handle(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope)


def install(app: FastAPI, forms: Mapping[str, Form] | None = None) -> None:
    """forms: bodies of errors by what a path begins with, where it is not OpenAI's."""
    app.state.error_forms = forms or {}
    kinds: list[Any] = [TandemError, HTTPException, Exception]
    for kind in kinds:
        app.add_exception_handler(kind, _handle)
