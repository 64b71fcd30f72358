"""`CompiledGrammar`: what any number of sequences may be matched against at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from tandem.engine.grammar.vocabulary import Vocabulary


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """`shown`: control tokens that it spells. `users`: its matchers."""

    inner: Any  # xgrammar's
    vocabulary: Vocabulary
    shown: tuple[int, ...]
    nbytes: int
    too_slow: bool = False  # an answer's matcher took too long
    users: WeakSet[Any] = field(default_factory=WeakSet)

    @classmethod
    def of(cls, inner: Any, vocabulary: Vocabulary, shown: tuple[int, ...]) -> CompiledGrammar:
        return cls(inner, vocabulary, shown, inner.memory_size_bytes)
