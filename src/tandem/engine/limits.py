"""`validate`: what a request may ask for. Every refusal names the field and the range."""

from __future__ import annotations

import math
from typing import NamedTuple

from tandem.engine.grammar.sources import check
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.sampling.parameters import Bounds, ranges
from tandem.errors import RequestError

MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 4096
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 4096
TOO_LONG = "context_length_exceeded"  # OpenAI's word, which clients look for


def validate(params: SamplingSettings, vocab_size: int) -> None:
    """Raises RequestError, with the field as `param`, for anything the sampler cannot do."""
    for field, limits in ranges().items():
        setting = getattr(params, field)
        if setting is not None and not _within(setting, limits):
            raise RequestError(_range_text(field, setting, limits), field)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})", "min_tokens"
        )
    _validate_stops(params)
    _validate_grammar(params)
    _validate_token_ids("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS, vocab_size)
    _validate_token_ids("show_tokens", params.show_tokens, MAX_STOP_TOKENS, vocab_size)
    _validate_token_ids("dry_breakers", params.dry_breakers, MAX_STOP_TOKENS, vocab_size)
    _validate_token_ids("logit_bias", params.logit_bias, MAX_LOGIT_BIAS, vocab_size)
    for value in params.logit_bias.values():
        if not _within(value, Bounds(-100.0, 100.0)):
            raise RequestError(f"logit_bias values must be within -100 and 100, not {value}", "logit_bias")


class TokenLimit(NamedTuple):
    """How many tokens a prompt and its answer may have together, and the flag that says so."""

    tokens: int
    name: str


def token_limit(context_length: int, cache_tokens: int) -> TokenLimit:
    if cache_tokens < context_length:
        return TokenLimit(cache_tokens, "max_total_tokens")
    return TokenLimit(context_length, "context_length")


def _most(limit: TokenLimit) -> str:
    """In words that clients look for: some then ask another model, or drop old messages."""
    return f"this model's maximum context length is {limit.tokens} tokens ({limit.name})"


def too_long(prompt_tokens: str, limit: TokenLimit, param: str = "prompt") -> RequestError:
    """prompt_tokens: the number, or "at least" so many."""
    fault = f"prompt is too long: {prompt_tokens} tokens > {limit.tokens - 1} maximum"  # Anthropic's words
    message = f"{fault}; {_most(limit)}, and an answer needs one"
    return RequestError(message, param, TOO_LONG)


def answer_limit(request: GenerateRequest, context_length: int, cache_tokens: int) -> int:
    """Longest prompt + answer of this request, in tokens. Raises RequestError when it can never fit."""
    prompt, answer_tokens = len(request.prompt_ids), request.sampling.max_tokens
    most = token_limit(context_length, cache_tokens)
    limit = most.tokens
    if prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if prompt >= limit:
        raise too_long(str(prompt), most)
    if answer_tokens is not None and prompt + answer_tokens > limit:
        raise RequestError(
            f"{_most(most)}; prompt ({prompt} tokens) and max_tokens ({answer_tokens}) exceed it: "
            f"ask for at most {limit - prompt}",
            "max_tokens",
            TOO_LONG,
        )
    return limit if answer_tokens is None else prompt + answer_tokens


def check_prompt_ids(prompt_ids: list[int], vocab_size: int) -> None:
    if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise RequestError(f"token ids must be within 0 and {vocab_size - 1}", "prompt")


def _within(value: float, limits: Bounds) -> bool:
    above = limits.lowest <= value if limits.inclusive else limits.lowest < value
    return above and value <= limits.highest


def _range_text(field: str, value: float, limits: Bounds) -> str:
    bound = f"at least {limits.lowest:g}" if limits.inclusive else f"greater than {limits.lowest:g}"
    most = "" if limits.highest == math.inf else f" and at most {limits.highest:g}"
    return f"{field} must be {bound}{most}, not {value:g}"


def _validate_stops(params: SamplingSettings) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings, not {len(params.stop)}", "stop")
    if any(not stop for stop in params.stop):
        raise RequestError("a stop string must not be empty", "stop")
    if sum(map(len, params.stop)) > MAX_STOP_CHARS:
        raise RequestError(f"stop strings must have at most {MAX_STOP_CHARS} characters together", "stop")


def _validate_grammar(params: SamplingSettings) -> None:
    if params.grammar is None:
        return
    try:
        check(params.grammar)
    except RequestError as error:
        raise RequestError(refused_grammar(error), "grammar") from error


def refused_grammar(error: Exception) -> str:
    return f"the grammar of the answer is refused: {error}"


def _validate_token_ids(
    field: str, ids: tuple[int, ...] | dict[int, float], most: int, vocab_size: int
) -> None:
    if len(ids) > most:
        raise RequestError(f"{field} may have at most {most} entries, not {len(ids)}", field)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{field}: token id {token_id} is not within 0 and {vocab_size - 1}", field)
