"""Fields of a body that the server does not know: named in the answer's header, or refused where ignoring them would
change the answer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from tandem.errors import RequestError
from tandem.server.body import Fields, decode, decode_fields, parsed, read_fields
from tandem.server.errors import ApiError, not_available
from tandem.server.guard.shape import says_nothing

T = TypeVar("T", bound=msgspec.Struct)

IGNORED_HEADER = "x-tandem-ignored"
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")
_MAX_NAMES = 16

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Fields of OpenAI, SGLang, vLLM, llama.cpp and others that would change the answer, for routes that do not have them.
# Beside each are the values that would not. Nor do null, false and what is empty: clients send those for what they do
# not use.
_UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    # tools
    "functions": (), "function_call": ("none", "auto"), "tools": (), "tool_choice": ("none", "auto"),
    "mcp_servers": (), "container": (), "context_management": ({"edits": []}, _KEEP_ALL), "web_search_options": (),
    # what the answer must look like
    "response_format": ({"type": "text"},), "regex": (), "ebnf": (), "json_schema": (), "structural_tag": (),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "grammar": (), "format": (), "output_format": (), "guided_whitespace_pattern": (),
    "guided_decoding_backend": ("auto", "xgrammar"),
    # which tokens are chosen, and when to stop
    "stop_regex": (), "bad_words": (), "allowed_token_ids": (), "use_beam_search": (), "custom_logit_processor": (),
    "logits_processors": (), "include_stop_str_in_output": (), "best_of": (1,), "do_sample": (True,),
    "num_beams": (1,), "top_a": (0,), "tfs": (1,), "tfs_z": (1,), "mirostat": (0,), "mirostat_mode": (0,),
    "top_n_sigma": (-1, 0), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "dynatemp_range": (0,), "samplers": (),
    "smoothing_factor": (0,), "repeat_penalty": (1,), "no_repeat_ngram_size": (0,), "length_penalty": (1,),
    # how long the answer may be, by other names
    "stop_sequences": (), "stop_strings": (), "stop_tokens": (),
    "max_completion_tokens": (), "max_output_tokens": (), "max_new_tokens": (), "min_new_tokens": (0,),
    "n_predict": (), "num_predict": (), "max_length": (), "options": ({},),
    # how much to reason
    "reasoning_effort": ("none",), "thinking_token_budget": (), "thinking_budget": (),
    "thinking": ({"type": "disabled"},),
    "enable_thinking": (), "reasoning": (), "think": (), "separate_reasoning": (), "include_reasoning": (),
    # another prompt, other weights, another kind of answer
    "suffix": (), "echo": (), "chat_template": (), "template": (),
    "context": (), "conversation": (), "prompt": (), "documents": (), "chat_template_kwargs": ({},),
    "add_special_tokens": (), "input_ids": (), "prompt_token_ids": (), "prompt_embeds": (),
    "truncate_prompt_tokens": (-1,), "input_embeds": (), "image_data": (), "video_data": (), "audio_data": (),
    "modalities": (["text"],), "audio": (), "lora_path": (), "lora_request": (), "session_params": (),
    "return_hidden_states": (), "prompt_logprobs": (), "top_logprobs": (0,), "logprob_token_ids": (),
    "return_token_ids": (), "return_tokens_as_token_ids": (), "return_routed_experts": (),
    # of objects in a body
    "messages[].audio": (), "messages[].function_call": (), "messages[].prompt_token_ids": (),
    "stream_options.chunk_size": (),
}  # fmt: skip
# Names of one thing: a route that does not know one of them says which it knows.
_SAME = (
    ("max_tokens", "max_output_tokens", "max_new_tokens", "max_completion_tokens", "n_predict", "num_predict",
     "max_length"),
    ("min_tokens", "min_new_tokens"),
    ("stop", "stop_sequences", "stop_strings"),
    ("stop_token_ids", "stop_tokens"),
    ("repetition_penalty", "repeat_penalty"),
    ("response_format", "guided_json", "json_schema", "format", "output_format"),
    ("ebnf", "guided_grammar", "grammar"),
    ("regex", "guided_regex"),
)  # fmt: skip
_FALSE_COUNTS = {"do_sample"}
# Of `sampling_params`: they change nothing here.
_HARMLESS = {"spaces_between_special_tokens", "stream_interval", "custom_params"}
_SAMPLING = re.compile(r"(sampling_params(\[\])?|options)\.")


async def read_as(
    http: Request, kind: type[T], inner: type[msgspec.Struct] | None = None
) -> tuple[T, list[str]]:
    """A request's body, as `read_fields_as` has it. Raises ApiError 400, 413."""
    fields = await read_fields(http)
    nbytes = sum(memoryview(raw).nbytes for raw in fields.values())
    return await parsed(nbytes, lambda: read_fields_as(fields, kind, inner))


def read_fields_as(
    fields: Fields, kind: type[T], inner: type[msgspec.Struct] | None = None
) -> tuple[T, list[str]]:
    """A checked body, and the names of what is ignored in it. inner: of its `sampling_params` or `options`. Raises
    ApiError 400 for what is wrong, and for what is not available."""
    body, unknown = decode_fields(fields, kind)
    for path, raw in unknown.items():
        name = _SAMPLING.sub("", path)
        if name in _UNAVAILABLE:
            value = decode(raw, Any, path) if isinstance(raw, msgspec.Raw) else raw
            if not _changes_nothing(name, value):
                raise not_available(path, _instead(name, kind if name == path else inner))
        elif path.startswith("sampling_params"):  # `refuse_misspelt` looks at these
            continue
        elif near := misspelt(name, kind if name == path else inner):
            value = decode(raw, Any, path) if isinstance(raw, msgspec.Raw) else raw
            if not says_nothing(value):
                text = f"{path} is not known here; the nearest name is {near!r}"
                raise ApiError(400, text, param=path, code="unknown_parameter")
    return body, list(unknown)


def misspelt(name: str, kind: type[msgspec.Struct] | None) -> str | None:
    """The field of a body of this kind that is meant: one letter is wrong, or only case and underscores are. None: it
    is another server's field, or an object's in the body. What is like `model` does not matter: one is served."""
    known = {} if kind is None else {_letters(f.encode_name): f.encode_name for f in msgspec.structs.fields(kind)}
    letters = _letters(name[:64])
    near = (field for field in known if field == letters or (len(field) >= 5 and _one_is_wrong(letters, field)))
    return next((known[field] for field in near if field != "model"), None)


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _one_is_wrong(name: str, field: str) -> bool:
    """One letter is another, is missing, is too much or has changed its place."""
    if abs(len(name) - len(field)) > 1:
        return False
    blocks = difflib.SequenceMatcher(None, name, field, autojunk=False).get_matching_blocks()
    return len(name) + len(field) - 2 * sum(block.size for block in blocks) <= 2


def _instead(name: str, kind: type[msgspec.Struct] | None) -> str | None:
    """Name that a body of this kind has for the same thing."""
    known = set[str]() if kind is None else {f.encode_name for f in msgspec.structs.fields(kind)}
    same = next((names for names in _SAME if name in names), ())
    return next((other for other in same if other in known), None)


def refuse_misspelt(ignored: Iterable[str], kind: type[msgspec.Struct]) -> None:
    """As in SGLang a name in `sampling_params` that is none is refused: mostly it is misspelt. Raises RequestError."""
    known = sorted(f.encode_name for f in msgspec.structs.fields(kind))
    for path in ignored:
        name = _SAMPLING.sub("", path)
        if name == path or name in _UNAVAILABLE or name in _HARMLESS:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        text = f"sampling_params has no {name[:64]!r}; the nearest name is {near!r}"
        raise RequestError(text, f"sampling_params.{name[:64]}")


def name_ignored(response: Response, ignored: list[str]) -> Response:
    """Unknown fields are ignored as OpenAI does, but the client can see which."""
    names = [name for name in ignored if _FIELD_NAME.fullmatch(name)]
    if names:
        response.headers[IGNORED_HEADER] = ", ".join(names[:_MAX_NAMES])
    return response


def _changes_nothing(name: str, value: Any) -> bool:
    if value is None or any(type(value) is not bool and value == harmless for harmless in _UNAVAILABLE[name]):
        return True
    if type(value) is bool and name in _FALSE_COUNTS:
        return value in _UNAVAILABLE[name]
    return says_nothing(value)
