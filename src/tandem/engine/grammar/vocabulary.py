"""`Vocabulary`: what grammars know of a model's tokens, in the engine and in the process that compiles them."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property
from typing import Any

import msgspec

from tandem.engine.grammar.shared_bits import SharedBits
from tandem.text.token_table import TokenTable


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """`pieces`: each token's bytes, `size` of them (the model's rows of logits), empty where a token is no text.

    `special`: control tokens' texts by id. `end_ids`: tokens that end an answer.
    """

    pieces: tuple[bytes, ...]
    special: dict[int, str]
    end_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.pieces)

    @classmethod
    def of(cls, table: TokenTable, size: int, end_ids: Collection[int]) -> Vocabulary:
        """A model often has more rows than its tokenizer has tokens; more tokens than rows are rare."""
        pieces = (*table.pieces[:size], *[b""] * (size - len(table.pieces)))
        special = {i: text for i, text in table.special.items() if i < size}
        return cls(pieces, special, tuple(sorted(i for i in set(end_ids) if i < size)))

    def spelt_in(self, text: str) -> tuple[int, ...]:
        """Control tokens whose text a grammar writes: they are the markers that a model calls tools with. All others
        must not occur: in the midst of a JSON string a control token is as good a text as any, and not shown."""
        plain = _unescaped(text)
        return tuple(sorted(i for i, marker in self.special.items() if marker and marker in plain))

    @cached_property
    def shared(self) -> SharedBits:
        """Sets of tokens that the matchers of one thread share."""
        return SharedBits(self.pieces, self.special)

    def tokenizer_info(self) -> Any:
        """xgrammar's, one for all grammars: its tables of 150,000 tokens take 22 MB.

        Control tokens are text in it; `text_bits` leaves out those that a grammar does not spell.
        """
        import xgrammar

        _ = self.shared  # or the first matcher makes it, in the engine's thread and in the fork of each job
        return xgrammar.TokenizerInfo(
            [*self.pieces, b""], xgrammar.VocabType.RAW, vocab_size=self.size + 1, stop_token_ids=[self.size]
        )


def _unescaped(text: str) -> str:
    """JSON may spell any character by its number."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text
