"""Errors as Ollama has them."""

from __future__ import annotations

import msgspec

from tandem.server.errors import ApiError, naming
from tandem.server.ollama.schema import OllamaError


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(OllamaError(naming(error)))
