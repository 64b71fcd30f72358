"""`complete`: what stands beside tokenizer.json and changes ids: added tokens, and tokens around a prompt.

Fine-tunes add tokens in tokenizer_config.json, added_tokens.json or special_tokens_map.json, and copy an old
tokenizer.json along. What these files say wins, as in Transformers; a token gets the id that they name for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tandem.errors import CheckpointError

log = logging.getLogger("tandem.text")

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
MOST_GAPS = 4096  # ids without a name, between those of tokenizer.json and those beside it
ID_DIGITS = 10  # more than any id has; Python refuses to read thousands
_SWITCHES = ("lstrip", "rstrip", "normalized", "single_word", "special")

Settings = dict[str, Any]


def merged(settings: Settings, special: Settings) -> Settings:
    """settings: tokenizer_config.json. special: special_tokens_map.json, which counts where the former is of the time
    before it listed added tokens."""
    if isinstance(settings.get("added_tokens_decoder"), dict):
        return settings
    return settings | {name: value for name, value in special.items() if name in (*NAMED, *LISTS) and value}


def complete(inner: Tokenizer, settings: Settings, older: Settings, rows: int | None, path: Path) -> None:
    """older: added_tokens.json. rows: ids that the model has, None: unknown. Raises CheckpointError; path: whose."""
    if settings.get("split_special_tokens") is True:
        raise CheckpointError(
            f"{path.parent / 'tokenizer_config.json'}: split_special_tokens is not supported: no chat template could "
            "write a control token; remove it"
        )
    listed = settings.get("added_tokens_decoder")
    special = [one for name in NAMED if (one := token(settings.get(name), special=True)) is not None]
    added = _Added(inner, {one.content for one in special}, rows, path)
    for place, one in (_by_id(listed) if isinstance(listed, dict) else _older(older, settings)).items():
        added.listed(place, one)
    for named in (*special, *_in_lists(settings)):
        added.named(named)
    inner.add_tokens(added.tokens)  # at once: each time the library reads all of them again
    _begin_with_bos(inner, settings)


def token(value: Any, special: bool = False) -> AddedToken | None:
    """From a text, or {"content": text, "lstrip": …}. None: it is neither, or empty."""
    switches = value if isinstance(value, dict) else {}
    text = switches.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        return None
    flags = {name: switches.get(name) is True for name in _SWITCHES}
    flags["special"] |= special
    flags["normalized"] = switches.get("normalized", not flags["special"]) is True
    return AddedToken(text, **flags)


def _by_id(listed: Mapping[Any, Any]) -> dict[int, AddedToken]:
    tokens = {
        int(place): one
        for place, value in listed.items()
        if isinstance(place, str) and place.isdecimal() and len(place) <= ID_DIGITS
        if (one := token(value)) is not None
    }
    return dict(sorted(tokens.items()))


def _older(older: Settings, settings: Settings) -> dict[int, AddedToken]:
    """added_tokens.json has texts and ids alone."""
    special = {one.content for name in NAMED if (one := token(settings.get(name))) is not None}
    special |= {one.content for one in _in_lists(settings)}
    tokens = {
        place: AddedToken(text, normalized=text not in special, special=text in special)
        for text, place in older.items()
        if isinstance(place, int) and not isinstance(place, bool) and text
    }
    return dict(sorted(tokens.items()))


def _in_lists(settings: Settings) -> Iterable[AddedToken]:
    """Tokens in lists, or in dicts by the names that templates call them."""
    for name in LISTS:
        listed = settings.get(name)
        values = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
        yield from (one for value in values if (one := token(value, special=True)) is not None)


class _Added:
    """`tokens`: what the library has to add, in this order: it numbers those that its vocabulary lacks.

    special: texts of tokens like `eos_token`, which are special where a list says otherwise, too.
    """

    def __init__(self, inner: Tokenizer, special: Collection[str], rows: int | None, path: Path) -> None:
        self.tokens: list[AddedToken] = []
        self._inner, self._special, self._rows, self._path = inner, special, rows, path
        self._known = {one.content: one for one in inner.get_added_tokens_decoder().values()}
        self._next = inner.get_vocab_size(with_added_tokens=True)

    def listed(self, place: int, one: AddedToken) -> None:
        """With its id. A token that is known gets the switches that are listed. Raises CheckpointError."""
        known = self._inner.token_to_id(one.content)
        if known is not None:
            if known != place:
                log.warning(
                    "%s: %r is token %s, and token %s beside it", self._path, one.content, known, place
                )
            if repr(self._known.get(one.content)) != repr(one):
                self._add(one, known)
        elif one.content in self._known:
            log.warning("a file beside %s lists %r twice, as token %s, too", self._path, one.content, place)
        elif place < self._next:
            log.warning("%s has another token %s than %r, which stays text", self._path, place, one.content)
            self._known[one.content] = one
        elif place - self._next > MOST_GAPS:
            text = f"{self._path} has {self._next} tokens, and a file beside it names token {place}"
            raise CheckpointError(f"{text}; fetch both again")
        else:
            for gap in range(self._next, place if self._has_row(place) else self._next):
                self._add(AddedToken(f"<|reserved_token_{gap}|>", normalized=False, special=True), gap)
            self._add(one, place)

    def named(self, one: AddedToken) -> None:
        """With its id in the vocabulary, or the next one. What is known or listed keeps its switches."""
        if one.content not in self._known:
            place = self._inner.token_to_id(one.content)
            self._add(one, self._next if place is None else place)

    def _has_row(self, place: int) -> bool:
        return self._rows is None or place < self._rows

    def _add(self, one: AddedToken, place: int) -> None:
        """place: its id. Without a row it stays text: a prompt with that id would be refused."""
        new = one.content not in self._known
        self._known[one.content] = one
        if new and not self._has_row(place):
            text = "%s: %r is token %s, and the model has no row for it: it stays text"
            log.warning(text, self._path, one.content, place)
            return
        one.special |= one.content in self._special
        if place == self._next:
            log.info("%r is not in %s: it is token %s", one.content, self._path, place)
            self._next += 1
        self.tokens.append(one)


def _begin_with_bos(inner: Tokenizer, settings: Settings) -> None:
    """`add_bos_token` where it is said, whatever tokenizer.json does by itself: llama.cpp takes both for GGUF files.
    `add_eos_token` counts in training alone: no text goes on behind an end."""
    adds_bos, bos = settings.get("add_bos_token"), token(settings.get("bos_token"))
    place = None if bos is None else inner.token_to_id(bos.content)
    before, after = _around(inner)
    if not isinstance(adds_bos, bool) or bos is None or place is None or adds_bos == (place in before):
        return
    before = [place, *before] if adds_bos else [i for i in before if i != place]
    names = {i: str(inner.id_to_token(i)) for i in (*before, *after)}
    inner.post_processor = processors.TemplateProcessing(
        single=[*(names[i] for i in before), "$A", *(names[i] for i in after)],
        special_tokens=[(name, i) for i, name in names.items()],
    )


def _around(inner: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that tokenizer.json puts before and behind a text."""
    ids: list[int] = inner.encode("a").ids
    plain: list[int] = inner.encode("a", add_special_tokens=False).ids
    at = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
    return ids[:at], ids[at + len(plain) :]
