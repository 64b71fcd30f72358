"""`TextStream`: token ids in, final text out, for one answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from tandem.text.stop_strings import StopMatcher

# A character has at most four bytes, hence at most four byte tokens. A longer run without a valid character is not
# going to become one, and is shown as it decodes.
_MOST_PARTIAL_TOKENS = 8


class Decoder(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@runtime_checkable
class KnowsOwnTexts(Protocol):
    """A decoder some of whose tokens add the same text whatever stands before them."""

    def own_texts(self, skip_special_tokens: bool) -> Mapping[int, str] | None: ...


class OwnTexts(dict[int, str]):
    """Texts of such tokens by id; "" of others. Filled as tokens are asked for.

    Its decoder joins the bytes of tokens. Whole characters begin with no byte that could end another one, so they are
    the same behind any bytes.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        """U+FFFD stands for part of a character, or for itself."""
        text = self._decode([token_id])
        self[token_id] = text = "" if "\ufffd" in text else text
        return text


class TextPiece(NamedTuple):
    text: str
    stop: str | None  # the stop string that ended the answer


class IncrementalDecoder:
    """Text of a growing list of ids. A token's text may depend on the one before it (spaces), and may be part of a
    character. So each step decodes a short window twice, without and with the new ids. The difference is new. Where
    the decoder knows a token's own text, that is looked up: decoding takes ten times as long."""

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: list[int],
        skip_special_tokens: bool,
        shown: Collection[int] = (),
    ) -> None:
        """shown: special tokens whose text is not skipped."""
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        self._shown = frozenset(shown) if skip_special_tokens else frozenset()
        self._window = prompt_ids[
            -_MOST_PARTIAL_TOKENS:
        ]  # ids whose text is out, then `_fresh` ids whose is not
        self._fresh = 0
        self._own = decoder.own_texts(skip_special_tokens) if isinstance(decoder, KnowsOwnTexts) else None

    def push(self, token_id: int) -> str:
        if token_id in self._shown:
            return self._push_special(token_id)
        if self._own is not None and not self._fresh and (text := self._own[token_id]):
            self._window = [token_id]
            return text
        self._window.append(token_id)
        self._fresh += 1
        text = self._fresh_text()
        if text.endswith("\ufffd") and self._fresh <= _MOST_PARTIAL_TOKENS:
            return ""
        if text:
            self._window = self._window[-self._fresh :]
            self._fresh = 0
        elif (
            self._fresh > _MOST_PARTIAL_TOKENS
        ):  # skipped tokens: not kept, or each step would decode all of them
            self._window = self._window[: -self._fresh]
            self._fresh = 0
        return text

    def _push_special(self, token_id: int) -> str:
        """It ends the text before it, and is itself no part of the window, where it would be skipped."""
        text = self._fresh_text()
        self._window = self._window[-self._fresh :] if self._fresh else self._window
        self._fresh = 0
        return text + self._decoder.decode([token_id], skip_special_tokens=False)

    def flush(self) -> str:
        return self._fresh_text()

    def _fresh_text(self) -> str:
        if self._fresh == 0:
            return ""
        prefix = self._decode(self._window[: -self._fresh])
        return self._decode(self._window)[len(prefix) :]

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special) if ids else ""


class TextOptions(Protocol):
    """The fields of `SamplingParams` that say which text is shown, and where it stops."""

    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def show_tokens(self) -> tuple[int, ...]: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def include_stop(self) -> bool: ...


class TextStream:
    """Decodes, and looks for stop strings across token borders."""

    def __init__(self, decoder: Decoder, prompt_ids: list[int], params: TextOptions) -> None:
        self._ids = IncrementalDecoder(decoder, prompt_ids, params.skip_special_tokens, params.show_tokens)
        self._stops = StopMatcher(params.stop) if params.stop else None
        self.ids = None if params.stop else self._ids  # where nothing is looked for: all text that it gives is final
        self._include_stop = params.include_stop

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """The answer's next token. `may_stop` False: too early (min_tokens), stop strings are only text."""
        text = self._ids.push(token_id)
        return TextPiece(text, None) if self._stops is None else self._search(self._stops, text, may_stop)

    def finish(self) -> TextPiece:
        """The answer ended for another reason: everything held back."""
        text = self._ids.flush()
        if self._stops is None:
            return TextPiece(text, None)
        piece = self._search(self._stops, text, True)
        return piece if piece.stop is not None else TextPiece(piece.text + self._stops.flush(), None)

    def _search(self, stops: StopMatcher, text: str, may_stop: bool) -> TextPiece:
        if not may_stop:
            return TextPiece(stops.skip(text), None)
        final, stop = stops.push(text)
        return TextPiece(final + stop if stop and self._include_stop else final, stop)
