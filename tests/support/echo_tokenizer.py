"""Text is bytes: token = byte, END closes a prompt, EOS an answer; and engines that cannot be loaded.

Without torch: a server starts fast, and fails fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tandem.errors import CheckpointError, ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.text.token_table import TokenTable

if TYPE_CHECKING:
    import pytest

EOS, END, VOCAB = 256, 257, 258


class EchoTokenizer:
    eos_ids = (EOS,)
    bos_id = None
    chat_template = None
    guard = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*text.encode(), END] if text else []

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id]) if token_id < 256 else f"<{token_id}>"

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_table(self) -> TokenTable:
        pieces = tuple(self.token_bytes(i) for i in range(VOCAB))
        return TokenTable(pieces, {EOS: "<eos>", END: "<end>"})

    def special_ids_in(self, texts: set[str]) -> tuple[int, ...]:
        return ()

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return str(messages[-1]["content"]) if messages else ""


def seen_by_the_template(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Messages that the chat template is given for the newest prompt."""
    seen: list[dict[str, Any]] = []

    def noted(self: EchoTokenizer, messages: list[dict[str, Any]], **_: Any) -> str:
        seen[:] = messages
        return str(messages[-1]["content"]) if messages else ""

    monkeypatch.setattr(EchoTokenizer, "apply_chat_template", noted)
    return seen


def load_tokenizer(path: Path) -> EchoTokenizer:
    return EchoTokenizer()


def load_no_tokenizer(path: Path) -> EchoTokenizer:
    raise CheckpointError("no tokenizer here; give one")


def load_broken(config: EngineConfig) -> NoReturn:
    raise CheckpointError("this model is broken on purpose; give another")


def load_refused(config: EngineConfig) -> NoReturn:
    raise ConfigError("the echo does not fit", "--tp 3 is not for it")


def load_crashing(config: EngineConfig) -> NoReturn:
    raise ZeroDivisionError("a bug while loading")
