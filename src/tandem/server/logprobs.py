"""Log-probabilities in the shapes of the three dialects."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tandem.engine.protocol import TokenLogprob
from tandem.server.openai_schema import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from tandem.server.state import TextTokenizer

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST


def _token(tokenizer: TextTokenizer, token_id: int) -> str:
    """The token's text; OpenAI's "bytes:\\x.." where it is only part of a character."""
    text = tokenizer.token_text(token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def chat_logprobs(tokenizer: TextTokenizer, tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(tokenizer, token) for token in tokens])


def _chat_token(tokenizer: TextTokenizer, token: TokenLogprob) -> ChatLogprob:
    top = [
        TopLogprob(tokenizer.token_text(i), _finite(p), list(tokenizer.token_bytes(i))) for i, p in token.top
    ]
    text, data = tokenizer.token_text(token.token_id), list(tokenizer.token_bytes(token.token_id))
    return ChatLogprob(text, _finite(token.logprob or 0.0), data, top)


class CompletionOffsets:
    """Builds completion logprobs chunk by chunk; `text_offset` counts characters of the returned text."""

    def __init__(self, tokenizer: TextTokenizer, echoed: str = "", skip_special_tokens: bool = True) -> None:
        """echoed: the prompt's text, if the answer begins with it."""
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._skip_special = skip_special_tokens
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be several tokens

    def build(self, tokens: Sequence[TokenLogprob], with_top: bool) -> CompletionLogprobs:
        texts = [_token(self._tokenizer, token.token_id) for token in tokens]
        values = [None if token.logprob is None else _finite(token.logprob) for token in tokens]
        top = [self._top(token) for token in tokens] if with_top else None
        return CompletionLogprobs(texts, values, top, [self._advance(token) for token in tokens])

    def _top(self, token: TokenLogprob) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        return {
            _token(self._tokenizer, i): _finite(p) for i, p in [*token.top, (token.token_id, token.logprob)]
        }

    def _advance(self, token: TokenLogprob) -> int:
        at = self._offset
        self._offset += self._length(token.token_id, at)
        return at

    def _length(self, token_id: int, at: int) -> int:
        """Characters that a token adds to the text. The begin token is none of an echoed text, nor is the space that
        SentencePiece puts before it."""
        piece = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._echoed.startswith(piece, at):
            return len(piece)
        hidden = self._skip_special or at < len(self._echoed)
        if hidden and self._tokenizer.is_special(token_id):
            return 0
        if at == 0 and piece[:1] == " " and self._echoed.startswith(piece[1:]):
            return len(piece) - 1
        return len(piece)


SglangLogprob = tuple[float | None, int, str | None]  # logprob, token id, text if asked for


def sglang_logprobs(
    tokenizer: TextTokenizer, tokens: Sequence[TokenLogprob], with_text: bool
) -> list[SglangLogprob]:
    return [_sglang(tokenizer, t.token_id, t.logprob, with_text) for t in tokens]


def sglang_top_logprobs(
    tokenizer: TextTokenizer, tokens: Sequence[TokenLogprob], with_text: bool
) -> list[list[SglangLogprob] | None]:
    return [
        None if t.logprob is None else [_sglang(tokenizer, i, p, with_text) for i, p in t.top] for t in tokens
    ]


def _sglang(tokenizer: TextTokenizer, token_id: int, logprob: float | None, with_text: bool) -> SglangLogprob:
    text = tokenizer.token_text(token_id) if with_text else None
    return (None if logprob is None else _finite(logprob), token_id, text)
