"""One conversation with a server over OpenAI's chat API: what was said, and the answer as it comes."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tandem.errors import TandemError

_TIMEOUT = httpx.Timeout(10.0, read=600.0)  # a long prompt on a slow machine takes minutes to its first token


class ChatError(TandemError):
    """The server could not be reached or refused; the text says what to do."""


@dataclass
class Speed:
    """Speed of the last answer; tokens as the server counted them."""

    tokens: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding: the first token's time is the prompt's."""
        span = self.seconds - self.first_token_seconds
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0


class ReasoningText(str):
    """A piece of reasoning: shown, and not sent again."""


@dataclass
class ChatClient:
    """Holds the history; `ask` adds a question and its answer."""

    url: str
    api_key: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    system: str | None = None
    model: str | None = None  # named in requests; None: the only one there is
    history: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # data URLs, shown with the next question
    speed: Speed = field(default_factory=Speed)
    _http: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False)
        except httpx.InvalidURL as error:
            raise ChatError(f"{self.url} is no address ({error}); give another --host") from error

    def model_name(self) -> str:
        """Which model answers: of several the one that was asked for, else one that is loaded. Raises ChatError when
        there is no server, or no such model."""
        try:
            answer = self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self._check(answer)
        try:
            cards = {str(card["id"]): card for card in answer.json()["data"]}
            self._choose(cards)
            return self.model or min(cards)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ChatError(
                f"what answers at {self.url} is not Tandem; give the --host and --port that `kt serve` printed"
            ) from error

    def _choose(self, cards: Mapping[str, Any]) -> None:
        """cards: of the server's models, by name. Raises ChatError."""
        aliases = {alias for card in cards.values() for alias in card.get("aliases", ())}
        if self.model is not None and self.model not in {*cards, *aliases}:
            raise ChatError(f"--model {self.model} is not served at {self.url}; there are {', '.join(cards)}")
        if self.model is None and len(cards) > 1:
            loaded = (name for name, card in cards.items() if card.get("status", {}).get("value") == "loaded")
            self.model = next(loaded, next(iter(cards)))

    def not_ready(self) -> str:
        """Why the server, which is there, takes no requests yet; nothing if it does, or has no such route."""
        try:
            answer = self._http.get("/health")
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            return ""
        try:
            return str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return "it answers 503"

    def reset(self) -> None:
        """Forgets what was said; the system prompt stays."""
        self.history.clear()
        self.images.clear()

    def attach(self, path: str) -> int:
        """Shows a picture with the next question: here its file is read, for the server opens none. How many there are
        now. Raises ChatError."""
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ChatError(f"{path or 'no file'} cannot be read ({error.strerror}); give a picture's path") from error
        kind = mimetypes.guess_type(path)[0] or "image/png"
        self.images.append(f"data:{kind};base64,{base64.b64encode(content).decode()}")
        return len(self.images)

    def _content(self, question: str) -> str | list[dict[str, Any]]:
        """With the pictures that were attached: before the text, as models saw them in training."""
        images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.images = []
        return [*images, {"type": "text", "text": question}] if images else question

    def ask(self, question: str) -> Generator[str, None, None]:
        """Pieces of the answer. When the caller stops early, what was said so far stays in the history and the
        server stops generating; when the server refuses, the question is taken back. Raises ChatError."""
        self.history.append({"role": "user", "content": self._content(question)})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                if not isinstance(piece, ReasoningText):
                    pieces.append(piece)
                yield piece
        finally:
            self._remember("".join(pieces))

    def _remember(self, answer: str) -> None:
        if answer:
            self.history.append({"role": "assistant", "content": answer})
        else:
            self.history.pop()

    def _stream(self) -> Iterator[str]:
        started, self.speed = time.monotonic(), Speed()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=self._body()) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                self._check(answer)
                yield from self._pieces(answer, started)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {
            "messages": [*system, *self.history],
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if self.model is None else {"model": self.model}),
            **{name: value for name, value in sampling.items() if value is not None},
        }

    def _pieces(self, answer: httpx.Response, started: float) -> Iterator[str]:
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"].get("message", "the answer broke off"))
            self._measure(event, started)
            yield from _texts(event)

    def _measure(self, event: dict[str, Any], started: float) -> None:
        self.speed.seconds = time.monotonic() - started
        if not self.speed.first_token_seconds and any(_texts(event)):
            self.speed.first_token_seconds = self.speed.seconds
        if event.get("usage"):
            self.speed.tokens = event["usage"]["completion_tokens"]

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise ChatError(f"the server at {self.url} wants an API key: kt chat --api-key KEY")
        if answer.status_code != httpx.codes.OK:
            raise ChatError(_error_text(answer))

    def _unreachable(self, error: httpx.TransportError) -> ChatError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ChatError(
                f"no server answers at {self.url}; start one with: kt serve demo (it says when it is ready)"
            )
        return ChatError(
            f"the connection to {self.url} broke off ({type(error).__name__}); is the server alive?"
        )


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if thought := delta.get("reasoning_content"):
            yield ReasoningText(thought)
        if text := delta.get("content"):
            yield text


def _error_text(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        hint = "; /reset forgets what was said" if error.get("code") == "context_length_exceeded" else ""
        return f"{error['message']}{hint}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server answered {answer.status_code}"
