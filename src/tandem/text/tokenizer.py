"""`Tokenizer`: text to ids and back, and the chat template, from the files beside a checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from tandem.errors import CheckpointError, RequestError
from tandem.spec.json_keys import JsonKeys
from tandem.spec.small_files import lfs_pointer, read_text
from tandem.text import added_tokens
from tandem.text.chat_template import ChatTemplate
from tandem.text.detokenizer import OwnTexts
from tandem.text.markers import MarkerGuard
from tandem.text.stored_templates import NO_TEMPLATE, ChatTemplates, chosen_template, stored_templates
from tandem.text.token_floor import TokenFloor, token_floor
from tandem.text.token_table import TokenTable, read_token_table

log = logging.getLogger("tandem.text")

TOKENIZER_BYTES = 256 << 20  # those of large vocabularies have thirty million
_CACHED_TOKENS = 1 << 16
_FEW_TOKENS = 1000


class Tokenizer:
    """Over the `tokenizers` library. Thread-safe; as fast as that library is."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        chat_template: ChatTemplates | str | None = None,
        template_variables: dict[str, Any] | None = None,
    ) -> None:
        self._inner = inner
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self._template_variables = template_variables or {}
        self.chat_template = chosen_template(chat_template, self._template_variables)
        self._before = self.encode("a", add_special_tokens=False)[-1:]
        self._text_before = self.decode(self._before, skip_special_tokens=False)
        self._added = {i: token.content for i, token in inner.get_added_tokens_decoder().items()}
        self._plain = frozenset(t.content for t in inner.get_added_tokens_decoder().values() if not t.special)
        self._special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self._guard: MarkerGuard | None = None
        # log-probabilities name the same tokens often
        self._text_of = lru_cache(_CACHED_TOKENS)(self._token_text)
        self._own = self._own_texts() if _joins_bytes(inner) else {}
        self._floor: TokenFloor | None = None
        self._floor_known = False

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json (or tiktoken.model, or vocab.json and merges.txt), tokenizer_config.json, what else has
        tokens, chat templates, and the end tokens of generation_config.json or config.json; or a GGUF file, which has
        all that inside."""
        if directory.is_file():
            with _begun(directory):
                return cls._of(*_read_gguf(directory))
        special = _read_json(directory / "special_tokens_map.json")
        settings = added_tokens.merged(_read_json(directory / "tokenizer_config.json"), special)
        path = _vocabulary_path(directory)
        inner, settings = _read_vocabulary(path, settings)
        older = _read_json(directory / "added_tokens.json")
        with _begun(directory):
            added_tokens.complete(inner, settings, older, _rows(directory), path)
            older_template = _read_json(directory / "chat_template.json").get("chat_template")
            listed = settings.get("chat_template") or older_template
            settings["chat_template"] = stored_templates(directory, listed)
            return cls._of(
                inner, _eos_ids(directory, inner, _token_text(settings.get("eos_token"))), settings
            )

    @classmethod
    def _of(
        cls, inner: tokenizers.Tokenizer, eos_ids: tuple[int, ...], settings: dict[str, Any]
    ) -> Tokenizer:
        """`settings`: as in tokenizer_config.json."""
        special = {name: _token_text(settings.get(name)) for name in settings if name.endswith("_token")}
        variables = {name: text for name, text in special.items() if text is not None}
        bos = variables.get("bos_token")
        return cls(
            inner,
            eos_ids=eos_ids,
            bos_id=None if bos is None else inner.token_to_id(bos),
            chat_template=settings.get("chat_template"),
            template_variables=variables,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: begin-of-text where the model wants one; off for rendered chat templates, which
        write it themselves. Special tokens spelt in the text become those tokens. Other threads go on meanwhile."""
        with _reading():
            # `encode` would hold the GIL until it is done, and offsets that nobody wants double its time
            [encoding] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """The text has at least so many tokens; far quicker than `encode`. 0 where nothing can be said."""
        if not self._floor_known:  # reads the whole vocabulary, and most texts are short
            self._floor, self._floor_known = token_floor(self._inner, _BYTE_OF_CHAR), True
        with _reading():
            return 0 if self._floor is None else self._floor.of(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Other threads go on meanwhile where there are many ids: `decode` of the library would hold the GIL. Raises
        RequestError."""
        try:
            if len(ids) > _FEW_TOKENS:
                return str(self._inner.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
            return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            raise _panicked(error, "write these tokens") from error

    def _own_texts(self) -> dict[bool, OwnTexts]:
        return {skip: OwnTexts(partial(self.decode, skip_special_tokens=skip)) for skip in (False, True)}

    def own_texts(self, skip_special_tokens: bool) -> OwnTexts | None:
        """As `KnowsOwnTexts`. None: any token's text may depend on what stands before."""
        return self._own.get(skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text that one token adds, special tokens included; part of a character decodes to U+FFFD."""
        return self._text_of(token_id)

    def _token_text(self, token_id: int) -> str:
        """Behind a letter: by itself it would begin the text, where decoders of SentencePiece's kind strip a space."""
        return self.decode([*self._before, token_id], skip_special_tokens=False)[len(self._text_before) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text, also where they are only part of a character."""
        return token_bytes(self._inner.id_to_token(token_id), self.token_text(token_id))

    def token_table(self) -> TokenTable:
        """All tokens' bytes; a pass over the whole vocabulary."""
        return read_token_table(self._inner, _BYTE_OF_CHAR, self.token_bytes)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves it out."""
        return token_id in self._special

    def special_ids_in(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Special tokens that are, or are part of, one of these texts."""
        searched = "\n".join(texts)
        return tuple(sorted(i for i in self._special if self._added[i] and self._added[i] in searched))

    @property
    def guard(self) -> MarkerGuard:
        """Keeps control tokens that messages spell from being ones."""
        if self._guard is None:
            source = self.chat_template.text if self.chat_template else ""
            special = {self._added[i] for i in self._special}
            written = {text for text in self._added.values() if text and text in source}
            self._guard = MarkerGuard(self._inner, special | written)
        return self._guard

    def own_markers(self, role: str, key: str) -> Collection[str]:
        """Control tokens that this text of a message may spell: an assistant's may be thoughts and calls, as it wrote
        them; tokens that end turns are special."""
        return self._plain if role == "assistant" and key != "tool_calls" else ()

    def encode_guarded(self, text: str, sign: str) -> list[int]:
        """Token ids of a rendered chat template whose messages were guarded with `sign`."""
        with _reading():
            return self.guard.encode(text, sign)

    def use_chat_template(self, source: str) -> None:
        """Instead of the checkpoint's. Raises CheckpointError."""
        variables = self._template_variables
        self.chat_template, self._guard = ChatTemplate(source, variables), None

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text; encode it with add_special_tokens=False."""
        if self.chat_template is None:
            raise RequestError(NO_TEMPLATE, "messages")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)


@contextmanager
def _begun(path: Path) -> Iterator[None]:
    """Raises CheckpointError for a tokenizer that cannot read a letter: each prompt would be refused."""
    try:
        yield
    except BaseException as error:
        if not (_of_library(error) or isinstance(error, RequestError)):
            raise
        raise CheckpointError(
            f"the tokenizer of {path} cannot read a text ({error}); its unknown token must be in its vocabulary: "
            "fetch tokenizer.json again"
        ) from error


@contextmanager
def _reading() -> Iterator[None]:
    """Raises RequestError for a text that cannot be read."""
    try:
        yield
    except (TypeError, UnicodeEncodeError) as error:  # lone surrogates
        raise RequestError(f"the text is not valid Unicode: {error}", "prompt") from error
    except BaseException as error:
        raise _panicked(error, "read this text") from error


def _of_library(error: BaseException) -> bool:
    """Whether the `tokenizers` library complains: its errors are bare Exceptions, its panics are not even that."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def _panicked(error: BaseException, doing: str) -> RequestError:
    """The refusal for an error of the library; raises any other."""
    if not _of_library(error):
        raise error
    return RequestError(f"the model's tokenizer cannot {doing}: {error}", "prompt")


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): visible Latin-1 characters are themselves, the rest
    follow from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()


def _joins_bytes(inner: tokenizers.Tokenizer) -> bool:
    """Whether a text is the bytes of all its tokens, one behind the other, as byte-level BPE has it. Other decoders
    strip or add spaces where a text begins."""
    decoder = {} if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    while decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


def token_bytes(piece: str | None, text: str) -> bytes:
    """`piece` is the vocabulary's spelling. Where the decoded text is complete, its UTF-8 is the answer already."""
    if piece is None or "\ufffd" not in text:
        return text.encode()
    if piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:-1], 16)])
    if all(char in _BYTE_OF_CHAR for char in piece):
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    return text.encode()


def _read_gguf(path: Path) -> tuple[tokenizers.Tokenizer, tuple[int, ...], dict[str, Any]]:
    """Imported here: it needs torch, whose import would make every start of the API process 1.3 s longer."""
    from tandem.checkpoint.gguf_config import end_ids
    from tandem.checkpoint.gguf_model import open_gguf
    from tandem.checkpoint.gguf_tokenizer import gguf_texts, gguf_tokenizer

    model = open_gguf(path)
    return gguf_tokenizer(model), tuple(end_ids(model)), gguf_texts(model)


def _vocabulary_path(directory: Path) -> Path:
    """The first of those that can be read. Raises CheckpointError."""
    for names in (("tokenizer.json",), ("tiktoken.model",), ("vocab.json", "merges.txt")):
        if all((directory / name).is_file() for name in names):
            return directory / names[0]
    raise CheckpointError(
        f"{directory} has no tokenizer.json, nor vocab.json and merges.txt: copy it from where the model came from, "
        "or write it there with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _read_vocabulary(path: Path, settings: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """settings: tokenizer_config.json; returned with what its class adds to them. Raises CheckpointError."""
    if path.name == "tiktoken.model":
        from tandem.checkpoint.tiktoken_tokenizer import tiktoken_tokenizer  # needs torch, as above

        return tiktoken_tokenizer(path.parent, settings, _BYTE_OF_CHAR), settings
    if path.name == "vocab.json":
        from tandem.text.bpe_files import bpe_tokenizer, with_defaults  # needs torch, as above

        return bpe_tokenizer(path.parent, settings), with_defaults(settings)
    inner = _read_tokenizer(path)
    inner.no_padding()  # some carry their training's padding and truncation
    inner.no_truncation()
    return inner, settings


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Through a text: the library's own reading would take whatever lies there."""
    text = read_text(path, TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # a rule that it cannot compile is a panic, which is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        broken = CheckpointError(f"{path} is no tokenizer that can be read ({error}); fetch the file again")
        raise lfs_pointer(path) or broken from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(value: Any) -> str | None:
    """Special tokens are written as text or as {"content": text, …}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _rows(directory: Path) -> int | None:
    """Ids that the model has: config.json's `vocab_size`, also where a model of several kinds has it inside."""
    config = _read_json(directory / "config.json")
    for key in ("text_config", "thinker_config", "text_config"):
        config = config[key] if isinstance(config.get(key), dict) else config
    rows = config.get("vocab_size")
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None


def _eos_ids(directory: Path, inner: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Says in the log where nothing ends an answer, or less than the files say."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids += JsonKeys(_read_json(directory / name), str(directory / name)).integers("eos_token_id")
    token_id = None if eos_token is None else inner.token_to_id(eos_token)
    ids += [] if token_id is None else [token_id]
    if not ids:
        log.warning(
            "no token ends an answer of %s: name eos_token_id in its generation_config.json, or eos_token in its "
            "tokenizer_config.json",
            directory,
        )
    elif eos_token is not None and token_id is None:
        log.warning("%s: its eos_token %r has no id; answers end with %s", directory, eos_token, ids)
    return tuple(dict.fromkeys(ids))
