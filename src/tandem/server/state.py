"""`ServerState`: what every route needs, and the one door through which requests reach the engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from tandem.engine import limits as engine_limits
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.vision.spans import check_images
from tandem.errors import RequestError
from tandem.flags.engine_config import EngineConfig
from tandem.hub.names import shown_name
from tandem.planner.choices.images import TEXT_ONLY
from tandem.planner.plan import Plan
from tandem.server.chat.attachments import Sight
from tandem.server.chat.model import ChatModel
from tandem.server.engine_client import EngineClient
from tandem.server.errors import ApiError, overloaded, unavailable
from tandem.server.guard.traces import traces_of
from tandem.server.info.model_files import ModelFiles, model_files
from tandem.server.limits import MAX_OPEN_ANSWERS
from tandem.server.messages import EngineReady
from tandem.server.metrics import ServerMetrics
from tandem.server.prompts.images import ImageReader, Pixels
from tandem.server.prompts.reader import PromptReader, PromptTokenizer
from tandem.server.request_stream import RequestStream
from tandem.text.chat_template import chat_template_text
from tandem.text.markers import MarkerGuard


class TextTokenizer(PromptTokenizer, Protocol):
    """Part of `tandem.text.tokenizer.Tokenizer` that the server needs."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    @property
    def guard(self) -> MarkerGuard | None: ...
    def special_ids_in(self, texts: set[str]) -> tuple[int, ...]: ...
    def use_chat_template(self, source: str) -> None: ...


T = TypeVar("T")
TokenizerLoader = Callable[[Path], TextTokenizer]


class ServerState:
    """Lives on the event loop; `engine_ready` alone is called from another thread, before the engine is attached."""

    def __init__(self, config: EngineConfig, load_tokenizer: TokenizerLoader) -> None:
        self.config = config
        self.metrics = ServerMetrics()
        self.traces = traces_of(config, lambda: self.model_name)
        self.client = EngineClient(self.metrics, config.sleep_idle_seconds)
        self.started_at = int(time.time())
        self.drains = asyncio.Event()
        self.http_active = 0
        self.sampling_defaults: dict[str, float] = {}
        self.restarts: Callable[[], int] = lambda: 0
        self._load_tokenizer = load_tokenizer
        self._tokenizer: TextTokenizer | None = None
        self._prompts: PromptReader | None = None
        self._chat: ChatModel | None = None
        self.images: ImageReader | None = None  # of a model that sees
        self._engine: EngineReady | None = None
        self.files = ModelFiles()
        self.metrics.watch_engine(lambda: self.client.stats, lambda: self.client.ready, self._restarts)
        self.metrics.watch_sleep(self.client.sleep)
        self.metrics.watch_images(lambda: self.images.counts if self.images else None, lambda: self.client.stats)

    @property
    def draining(self) -> bool:
        return self.drains.is_set()

    def _restarts(self) -> int:
        return self.restarts()

    def engine_ready(self, ready: EngineReady) -> None:
        """A (new) engine is loaded. The tokenizer is read once, from the directory that the engine resolved."""
        if self._prompts is None or self._chat is None:
            self.sampling_defaults = ready.sampling_defaults
            self.files = model_files(Path(ready.model_path))
            self._tokenizer = self._load_tokenizer(Path(ready.model_path))
            if self.config.chat_template is not None:
                self._tokenizer.use_chat_template(chat_template_text(self.config.chat_template))
            self._prompts = PromptReader(self._tokenizer)
            self._prompts.start()
            parsers = self.config.tool_call_parser, self.config.reasoning_parser
            limits = ready.plan.image_tokens, ready.plan.image_pixel_bytes
            reader = None if ready.vision is None else ImageReader(ready.vision, *limits)
            self._chat = ChatModel(self._tokenizer, self._prompts, *parsers, images=reader)
            self.images = reader if self._chat.sees else None
        self._prompts.limit = engine_limits.token_limit(*_room(ready.plan))
        if self.images is not None:
            self.images.limit = self._prompts.limit
        self._engine = ready

    @property
    def engine(self) -> EngineReady:
        return _loaded(self._engine, self.client)

    @property
    def tokenizer(self) -> TextTokenizer:
        return _loaded(self._tokenizer, self.client)

    @property
    def chat(self) -> ChatModel:
        return _loaded(self._chat, self.client)

    @property
    def prompts(self) -> PromptReader:
        return _loaded(self._prompts, self.client)

    def close(self) -> bool:
        """The server ends. True: a thread is still at a long prompt."""
        self.traces.close()
        if self.images is not None:
            self.images.close()
        return self._prompts is not None and self._prompts.close()

    def sight(self, unread: list[str]) -> Sight:
        """Kinds of attachments that the model takes of messages. unread: gets the places of what it does not."""
        blind = self.engine.plan.blind
        return Sight(unread, self.chat.sees, blind="" if blind == TEXT_ONLY else blind)

    def pixels_of(self, requests: Sequence[GenerateRequest]) -> list[Pixels]:
        """Whoever has them keeps them where the engine looks for them."""
        if self.images is None:
            return []
        return [pixels for request in requests for pixels in self.images.held(request.images)]

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or shown_name(self.config.model)

    def check_model(self, name: str | None) -> None:
        """Refuses a model that a route names and nobody serves. Requests may say any name: one model is served. Raises
        ApiError 404."""
        if name not in (None, self.model_name, self.config.model):
            message = f"the model {name[:100]!r} is not served here; use {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_up(self) -> None:
        """Raises ApiError 503 unless requests are taken: an engine that is asleep wakes for them."""
        if self.draining:
            raise unavailable("the server is shutting down")
        if not self.client.takes_requests:
            raise unavailable(self.client.why_down)

    @property
    def engine_status(self) -> str:
        """"ok", "sleeping" or "waking"; of an engine that takes requests."""
        if self.client.ready:
            return "ok"
        return "waking" if self.client.sleep.waking else "sleeping"

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Around all work for a request; the engine does not fall asleep meanwhile. Raises ApiError 503 or 429."""
        self._check_places(1)
        with self.client.admitted():
            yield

    def _check_places(self, answers: int) -> None:
        """Raises ApiError 503 or 429."""
        self.check_up()
        if self.client.open_answers + answers > self._most_answers:
            raise overloaded(f"{self._most_answers} answers may run or wait; try again later")
        waiting, places = self.client.stats.waiting, self.config.max_queued_requests
        if places is not None and waiting and waiting + answers > places:  # the KV cache is full
            raise overloaded(f"{places} answers may wait (--max-queued-requests); try again later")

    @property
    def _most_answers(self) -> int:
        """That run or wait. An engine's counts are late, so a burst is counted here."""
        places = self.config.max_queued_requests
        if places is None:
            return MAX_OPEN_ANSWERS
        return min(MAX_OPEN_ANSWERS, self.engine.plan.max_running_requests + places)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises RequestError."""
        return (await self.encode_all([text], add_special_tokens))[0]

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Off the event loop when there is much of it. Raises RequestError, ApiError 429 and 503."""
        return await self.prompts.encode_all(texts, add_special_tokens)

    def answer_room(self, prompt_tokens: int) -> int:
        """How many tokens an answer to such a prompt may have."""
        return self._token_limit - prompt_tokens

    @property
    def _token_limit(self) -> int:
        return engine_limits.token_limit(*_room(self.engine.plan)).tokens

    def check_ids(self, prompt_ids: list[int]) -> None:
        """Raises RequestError."""
        engine_limits.check_prompt_ids(prompt_ids, self.engine.vocab_size)

    def check(self, requests: Sequence[GenerateRequest]) -> None:
        """The engine's own checks, made here so that the answer has its status at once. Raises RequestError."""
        room, checked = _room(self.engine.plan), None
        for request in requests:
            if (
                request.sampling != checked
            ):  # comparing is much cheaper, and the prompts of a batch ask for the same
                engine_limits.validate(request.sampling, self.engine.vocab_size)
                checked = request.sampling
            self.check_ids(request.prompt_ids)
            check_images(request.images, request.prompt_ids, self.engine.vision, self.engine.plan.blind)
            engine_limits.answer_limit(request, *room)

    def submit(
        self, requests: Sequence[GenerateRequest], name: str = "", probe: bool = False
    ) -> RequestStream:
        """name: of all of them. probe: as `RequestStream` has it. Raises RequestError, EngineError, ApiError 503
        and 429."""
        self.check(requests)
        answers = sum(request.sampling.n for request in requests)
        if answers > self._most_answers:  # there will never be room
            raise RequestError(f"at most {self._most_answers} answers in one request, not {answers}", "n")
        self._check_places(answers)
        return self.client.submit(requests, name, probe)


def _room(plan: Plan) -> tuple[int, int]:
    """Tokens of the context, and of the KV cache."""
    return plan.context_length, plan.num_pages * plan.page_size


def _loaded(part: T | None, client: EngineClient) -> T:
    """Raises ApiError 503 while the first engine is loading."""
    if part is None:
        raise unavailable(client.why_down)
    return part


def cut_to_room(state: ServerState, sampling: SamplingSettings, prompt_tokens: int) -> SamplingSettings:
    """Agents ask for 32,000 tokens and more, whatever the model is: an answer then ends where the context does. A
    prompt that leaves no room is refused by the engine's own checks."""
    room = max(1, state.answer_room(prompt_tokens))
    if sampling.max_tokens is None or sampling.max_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)
