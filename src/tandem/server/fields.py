"""Fields of a body that the server does not know: named in the answer's header, or refused where ignoring them would
change the answer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from tandem.errors import RequestError
from tandem.server.body import Fields, decode
from tandem.server.errors import not_available

IGNORED_HEADER = "x-tandem-ignored"
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMES = 16

# Fields of OpenAI, SGLang and vLLM that would change the answer, each with the values that would not. Nor do null,
# false and what is empty: clients send those for what they do not use.
_UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    # tools
    "functions": (), "function_call": ("none", "auto"),
    # what the answer must look like
    "response_format": ({"type": "text"},), "regex": (), "ebnf": (), "json_schema": (), "structural_tag": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    # which tokens are chosen, and when to stop
    "stop_regex": (), "bad_words": (), "allowed_token_ids": (), "use_beam_search": (), "custom_logit_processor": (),
    "logits_processors": (), "include_stop_str_in_output": (),
    # another prompt, other weights, another kind of answer
    "suffix": (), "echo": (), "chat_template": (), "documents": (),
    "truncate_prompt_tokens": (-1,), "input_embeds": (), "image_data": (), "video_data": (), "audio_data": (),
    "modalities": (["text"],), "audio": (), "lora_path": (), "lora_request": (), "session_params": (),
    "return_hidden_states": (), "prompt_logprobs": (),
}  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, False, "", [])
# Of `sampling_params`: they change nothing here.
_HARMLESS = {"spaces_between_special_tokens", "stream_interval", "custom_params"}
_NULL = msgspec.Raw(b"null")
_SAMPLING: Any = Fields | list[Fields] | None


def unknown_fields(fields: Fields, kind: type[msgspec.Struct]) -> list[str]:
    """Names in a body that `kind` does not have. Raises ApiError 400 when one of them asks for what is not
    available."""
    return _unknown(fields, _known(kind), "")


def unknown_sampling(fields: Fields, kind: type[msgspec.Struct]) -> list[str]:
    """The same of SGLang's `sampling_params`, one or a list, decoded as `kind`. As in SGLang a name that is none is
    refused (RequestError): mostly it is misspelt."""
    params = decode(fields.get("sampling_params", _NULL), _SAMPLING, "sampling_params")
    each = params if isinstance(params, list) else [params or {}]
    known = _known(kind)
    names = {name for one in each for name in _unknown(one, known, "sampling_params.")}
    for name in sorted(names):
        _refuse_misspelt(name.removeprefix("sampling_params."), known)
    return sorted(names)


def name_ignored(response: Response, ignored: list[str]) -> Response:
    """Unknown fields are ignored as OpenAI does, but the client can see which."""
    names = [name for name in ignored if _FIELD_NAME.fullmatch(name)]
    if names:
        response.headers[IGNORED_HEADER] = ", ".join(names[:_MAX_NAMES])
    return response


def _known(kind: type[msgspec.Struct]) -> set[str]:
    return {f.encode_name for f in msgspec.structs.fields(kind)}


def _unknown(given: Mapping[str, msgspec.Raw], known: set[str], prefix: str) -> list[str]:
    names = [name for name in given if name not in known]
    for name in names:
        if name in _UNAVAILABLE and not _changes_nothing(name, decode(given[name], Any, prefix + name)):
            raise not_available(prefix + name)
    return [prefix + name for name in names]


def _changes_nothing(name: str, value: Any) -> bool:
    return value in (*_EMPTY, *_UNAVAILABLE[name])


def _refuse_misspelt(name: str, known: set[str]) -> None:
    if name in _UNAVAILABLE or name in _HARMLESS:
        return
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    raise RequestError(
        f"sampling_params has no {name[:64]!r}; the nearest name is {near!r}", f"sampling_params.{name[:64]}"
    )
