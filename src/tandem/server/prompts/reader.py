"""`PromptReader`: the only place where the server renders chat templates and tokenises.

Long texts are bounded, queued and done elsewhere; templates, which come with the model, are rendered elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import msgspec

from tandem.engine.limits import TokenLimit, too_long
from tandem.server.errors import overloaded
from tandem.server.limits import (
    CHARS_OF_TOKEN,
    INLINE_DECODE_TOKENS,
    INLINE_TOKENIZE_CHARS,
    LARGE_TOKENIZE_CHARS,
    MAX_WAITING_CHARS,
)
from tandem.server.prompts.template_process import TemplateProcess
from tandem.text.chat_template import ChatTemplate

T = TypeVar("T")

_THREADS = 2  # more would take the engine's cores


class PromptTokenizer(Protocol):
    """Part of `tandem.text.tokenizer.Tokenizer` that prompts need."""

    @property
    def chat_template(self) -> ChatTemplate | None: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_guarded(self, text: str, sign: str) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def fewest_tokens(self, text: str) -> int: ...
    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...


class PromptReader:
    """Lives on the event loop. A text that cannot fit is refused before it is tokenised.

    A long text is tokenised on a thread, which lets other threads run. It cannot be stopped, so few run at a time;
    those whose client has left while they wait are dropped.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self.limit: TokenLimit | None = None  # of prompt and answer together; the engine's
        self._tokenizer = tokenizer
        self._long = ThreadPoolExecutor(_THREADS, "tokenize")
        self._large = ThreadPoolExecutor(1, "tokenize-large")  # gigabytes each, and behind them nobody waits
        self._chars = 0  # waiting or being tokenised on threads
        template = tokenizer.chat_template
        self._template = None if template is None else TemplateProcess(template)

    def start(self) -> None:
        """Raises CheckpointError where the chat template cannot be used."""
        if self._template is not None:
            self._template.start()

    def close(self) -> bool:
        """True: a thread is still tokenising, and cannot be stopped."""
        if self._template is not None:
            self._template.close()
        return self.busy

    @property
    def busy(self) -> bool:
        return self._chars > 0

    async def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text, by the model's chat template. Raises RequestError, ApiError 500."""
        variables["add_generation_prompt"] = add_generation_prompt
        if self._template is None:
            return self._tokenizer.apply_chat_template(messages, **variables)
        return await self._template.render(messages, **variables)

    def render_now(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The same off the event loop, while the server starts."""
        variables["add_generation_prompt"] = add_generation_prompt
        if self._template is None:
            return self._tokenizer.apply_chat_template(messages, **variables)
        return self._template.render_now(messages, **variables)

    def check_length(self, ids: bytes | msgspec.Raw | None, param: str) -> None:
        """ids: JSON, lists of token ids or whatever else was sent. Millions of ids are refused before they are decoded,
        which would hold up others. Raises RequestError."""
        data = bytes(ids or b"")
        if self.limit is None or data[:1] != b"[" or b'"' in data:
            return
        lists = max(1, data.count(b"[") - 1)
        longest = -(-(data.count(b",") + 1) // lists)  # at least
        if longest >= self.limit.tokens:
            raise too_long(f"at least {longest}", self.limit, param)

    async def encode_all(
        self, texts: Sequence[str], add_special_tokens: bool, sign: str = ""
    ) -> list[list[int]]:
        """Token ids of each text. `sign`: what messages in it were guarded with (`MarkerGuard`); then no begin-of-text
        is added. Raises RequestError, with `param` "prompt", and ApiError 429."""
        chars, cancelled = sum(map(len, texts)), threading.Event()
        if chars <= INLINE_TOKENIZE_CHARS:
            return self._encode_each(texts, add_special_tokens, cancelled, sign)
        self._check_room(chars)
        threads = self._large if chars > LARGE_TOKENIZE_CHARS else self._long
        job = threads.submit(self._encode_each, texts, add_special_tokens, cancelled, sign)
        self._count(job, chars)
        try:
            return await asyncio.wrap_future(job)
        finally:
            cancelled.set()

    async def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The ids' text. Raises ApiError 429."""
        return await self._on_thread(self._tokenizer.decode, ids, skip_special_tokens)

    async def texts_of(self, ids: list[int]) -> list[str]:
        """Text of each token by itself. Raises ApiError 429."""
        return await self._on_thread(self._texts_of, ids)

    def _texts_of(self, ids: list[int]) -> list[str]:
        return [self._tokenizer.token_text(i) for i in ids]

    async def _on_thread(self, work: Callable[..., T], ids: list[int], *more: Any) -> T:
        """Many ids hold up nobody else: of a token's few characters each counts."""
        if len(ids) <= INLINE_DECODE_TOKENS:
            return work(ids, *more)
        chars = len(ids) * CHARS_OF_TOKEN
        self._check_room(chars)
        job = self._long.submit(work, ids, *more)
        self._count(job, chars)
        return await asyncio.wrap_future(job)

    def _check_room(self, chars: int) -> None:
        """Raises ApiError 429."""
        if self._chars and self._chars + chars > MAX_WAITING_CHARS:
            raise overloaded("too many long prompts are waiting to be tokenised; try again later")

    def _count(self, job: Future[Any], chars: int) -> None:
        """A text counts until its job is done, even if its client has left: it takes memory until then."""
        loop = asyncio.get_running_loop()
        self._chars += chars

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._uncount, chars)

        job.add_done_callback(done)

    def _uncount(self, chars: int) -> None:
        self._chars -= chars

    def _encode_each(
        self, texts: Sequence[str], special: bool, cancelled: threading.Event, sign: str
    ) -> list[list[int]]:
        return [self._encode(text, special, sign) for text in texts if not cancelled.is_set()]

    def _encode(self, text: str, special: bool, sign: str) -> list[int]:
        if len(text) <= INLINE_TOKENIZE_CHARS:
            return self._ids(text, special, sign)
        fewest = self._tokenizer.fewest_tokens(text.replace(sign, "") if sign else text)
        if self.limit is not None and fewest >= self.limit.tokens:
            raise too_long(f"at least {fewest}", self.limit)
        ids = self._ids(text, special, sign)
        if len(text) > LARGE_TOKENIZE_CHARS:
            give_back_memory()
        return ids

    def _ids(self, text: str, special: bool, sign: str) -> list[int]:
        return self._tokenizer.encode_guarded(text, sign) if sign else self._tokenizer.encode(text, special)


def give_back_memory() -> None:
    """Gives free memory back to the system; glibc would keep it for the next large text."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
