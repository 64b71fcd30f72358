"""OpenAI sampling fields → `SamplingSettings`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.parameters import Dialect
from tandem.errors import RequestError
from tandem.server.chat.answer_grammar import grammar_of
from tandem.server.openai_schema import SamplingBody, StreamOptions
from tandem.server.sampling_bodies import sent_parameters

_BREAKERS = ("\n", ":", '"', "*")


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def sampling_of(body: SamplingBody, defaults: dict[str, float], **chosen: Any) -> SamplingSettings:
    """Fields that the body leaves out are the model's `defaults`, or else `SamplingSettings`'; `chosen` are decided by
    the route."""
    return SamplingSettings(
        **(defaults | sent_parameters(body, Dialect.OPENAI)),
        stop=stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.no_stop_trim),
        logit_bias=logit_bias(body.logit_bias),
        grammar=grammar_of(body),
        **chosen,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


class _TextEncoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def dry_breakers(
    texts: Sequence[str] | None, sent: Mapping[str, Any], tokenizer: _TextEncoder
) -> tuple[int, ...]:
    """The token with which each text ends inside of a text; () without DRY. sent: parameters, by name."""
    if not sent.get("dry_multiplier"):
        return ()
    texts = _BREAKERS if texts is None else texts
    if any(len(text) > 64 for text in texts):
        raise RequestError(
            "dry_sequence_breakers must have at most 64 characters each", "dry_sequence_breakers"
        )
    ids = (tokenizer.encode(f"a{text}", False) for text in texts if text)
    return tuple(dict.fromkeys(each[-1] for each in ids))


def logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """Keys are token ids in decimal. Raises RequestError."""
    for key in bias or {}:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise RequestError(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in (bias or {}).items()}


def request_id(body: SamplingBody, prefix: str) -> str:
    """The client's own, or a new one."""
    return body.rid or body.request_id or new_id(prefix)


def wants_usage(options: StreamOptions | None) -> bool:
    return options is not None and options.include_usage


def wants_all_usage(options: StreamOptions | None) -> bool:
    return options is not None and options.include_usage and options.continuous_usage_stats


def check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
