"""Errors as Anthropic has them."""

from __future__ import annotations

import msgspec

from tandem.server.anthropic.schema import AnthropicError, ErrorDetail
from tandem.server.errors import ApiError, naming
from tandem.server.openai_sampling import new_id

_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 414: "request_too_large", 429: "rate_limit_error",
    431: "request_too_large", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_body(error: ApiError) -> bytes:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode(AnthropicError(ErrorDetail(kind, naming(error)), new_id("req")))
