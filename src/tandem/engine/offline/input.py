"""Input of `tandem.LLM`, checked as strictly as the server checks JSON: nothing is inferred or dropped."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.engine import protocol
from tandem.errors import RequestError


class SamplingParams(protocol.SamplingFields, frozen=True, kw_only=True):
    """How tokens are chosen and when to stop: `tandem.SamplingParams`. A field that is None is what the model's
    generation_config.json recommends, or else `protocol.SamplingSettings`' default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


RECOMMENDED = frozenset(SamplingParams.__struct_fields__) - frozenset(protocol.SamplingFields.__struct_fields__)
Prompt = str | list[int]
Message = Mapping[str, Any]
OneSampling = SamplingParams | protocol.SamplingSettings
Sampling = OneSampling | Sequence[OneSampling] | None


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several. Raises RequestError for what is neither text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and all(_is_id(prompt) for prompt in items):
        return [_ids(items)]
    return [prompt if isinstance(prompt, str) else _ids(_items(prompt)) for prompt in items]


def _items(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | bytes | Mapping) or not hasattr(prompts, "__iter__"):
        raise _bad_prompt(prompts)
    return list(prompts)


def _ids(items: list[Any]) -> list[int]:
    for token in items:
        if not _is_id(token):
            raise _bad_prompt(token)
    return [operator.index(token) for token in items]


def _is_id(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _bad_prompt(prompt: Any) -> RequestError:
    return RequestError(f"a prompt is a text or a list of token ids, not {prompt!r:.80}", "prompts")


def listed_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or several. Raises RequestError."""
    if isinstance(messages, str | Mapping):
        raise _bad_messages(messages)
    single = [item for item in messages if isinstance(item, Mapping)]
    several = [list(item) for item in messages if not isinstance(item, Mapping)]
    if single and several:
        raise RequestError(
            "messages must be one conversation or a list of conversations, not both", "messages"
        )
    for message in (message for conversation in several for message in conversation):
        if not isinstance(message, Mapping):
            raise _bad_messages(message)
    return [single] if single else several


def _bad_messages(messages: Any) -> RequestError:
    text = f'messages are dicts such as {{"role": "user", "content": "Hi"}}, not {messages!r:.80}'
    return RequestError(text, "messages")


def sampling_for_each(
    sampling: Sampling, count: int, defaults: Mapping[str, float]
) -> list[protocol.SamplingSettings]:
    """One for every prompt, all of the right types. defaults: of fields that are left out. Raises RequestError."""
    if sampling is None or isinstance(sampling, OneSampling):
        return [_resolved(sampling or SamplingParams(), defaults)] * count
    if isinstance(sampling, str | Mapping):
        raise RequestError(f"sampling is SamplingParams, not {sampling!r:.80}", "sampling")
    if len(sampling) != count:
        raise RequestError(
            f"{count} prompts need {count} SamplingParams or one, not {len(sampling)}", "sampling"
        )
    return [_resolved(one, defaults) for one in sampling]


def _resolved(params: OneSampling, defaults: Mapping[str, float]) -> protocol.SamplingSettings:
    """A struct takes values of any type; from here on they are what they are declared as. A stop string may come
    alone, and several in a list."""
    if not isinstance(params, OneSampling):
        raise RequestError(f"sampling is SamplingParams, not {params!r:.80}", "sampling")
    fields = {name: _plain(value) for name, value in msgspec.structs.asdict(params).items()}
    for name in RECOMMENDED:
        if fields[name] is None:
            del fields[name]
    if isinstance(fields["stop"], str):
        fields["stop"] = (fields["stop"],)
    try:
        return msgspec.convert({**defaults, **fields}, protocol.SamplingSettings)
    except msgspec.ValidationError as error:
        raise RequestError(f"SamplingParams: {error}", "sampling") from error


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
