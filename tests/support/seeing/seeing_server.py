"""A server whose model sees, without a model: a real template, tokenizer and decoder of images; what reaches the engine
is kept, with its pixels, and answered at once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from chat_models import chat_tokenizer
from fake_model import fake_plan
from tandem.engine.protocol import AbortRequest, GenerateRequest, TokenOutput
from tandem.flags.engine_config import EngineConfig
from tandem.server.app import create_app
from tandem.server.messages import EngineReady, StepOutputs
from tandem.server.state import ServerState
from tandem.spec.vision import Processor, Tower
from tandem.text.tokenizer import Tokenizer

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
CONTROLS = ("<|turn|>", "<|done|>", START, PAD, END)
SEEN = START + PAD + END
_PART = "{% if part.type == 'image' %}" + SEEN + "{% elif part.text is defined %}{{ part.text }}{% endif %}"
_SHOW = (
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}" + _PART + "{% endfor %}{% endif %}"
)
SEES_ALL = (
    "{% for m in messages %}<|turn|>{{ m.role }}:" + _SHOW + "<|done|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
USER_ONLY = SEES_ALL.replace("{% for part in m.content %}", "{% for part in m.content if m.role == 'user' %}")
PROCESSOR = Processor(min_pixels=4 * 32 * 32, max_pixels=4096 * 32 * 32)


class Shown(NamedTuple):
    """A request as the engine got it: the prompt's text with each image once, and the images' pixels."""

    request: GenerateRequest
    text: str
    pixels: list[bytes]


class Seeing:
    """`seen`: all requests so far. `answers` False: none is answered until `finish`. `aborted`: ids of requests."""

    def __init__(self, state: ServerState, tokenizer: Tokenizer, client: httpx.AsyncClient, pad: int) -> None:
        self.state, self.client, self.pad = state, client, pad
        self.seen: list[Shown] = []
        self.aborted: list[str] = []
        self.answers = True
        self._tokenizer = tokenizer

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    def send(self, message: Any) -> None:
        if isinstance(message, AbortRequest):
            self.aborted.append(message.id)
        if not isinstance(message, GenerateRequest):
            return
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=GenerateRequest)
        self.seen.append(Shown(message, self._text(message), [read(span) for span in message.images]))
        if self.answers:
            asyncio.get_running_loop().call_soon(self.finish, message)

    def finish(self, request: GenerateRequest) -> None:
        out = TokenOutput(
            id=request.id, index=0, text="ok", token_ids=[65, 66], finish_reason="stop",
            prompt_tokens=len(request.prompt_ids), completion_tokens=2,
        )  # fmt: skip
        self.state.client.deliver(StepOutputs(outputs=[out]))

    def _text(self, request: GenerateRequest) -> str:
        ids = list(request.prompt_ids)
        for span in reversed(request.images):
            assert ids[span.first : span.end] == [self.pad] * span.rows
            ids[span.first : span.end] = [self.pad]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def last(self) -> Shown:
        return self.seen[-1]


def read(span: Any) -> bytes:
    return Path(span.pixels.path).read_bytes()


def tower(tokenizer: Tokenizer, processor: Processor = PROCESSOR) -> Tower:
    start, pad, end = (tokenizer.encode(text, False)[0] for text in (START, PAD, END))
    return Tower(
        depth=1, hidden=8, heads=1, width=8, side=4, out=8, placeholder=pad, start=start, end=end, processor=processor
    )  # fmt: skip


@contextlib.asynccontextmanager
async def seeing(
    template: str = SEES_ALL, *, context: int = 4096, sees: bool = True, **flags: Any
) -> AsyncIterator[Seeing]:
    tokenizer = chat_tokenizer(template, CONTROLS)
    state = ServerState(EngineConfig(model="echo", **flags), lambda path: tokenizer)
    one = tower(tokenizer)
    plan = fake_plan(context_length=context, num_pages=4096, max_running_requests=64, max_step_tokens=512)
    plan = replace(plan, image_tokens=1024, image_pixel_bytes=1 << 30)
    state.engine_ready(
        EngineReady(
            plan=plan, model_path="echo", model_type="echo", vocab_size=300,
            vision=one if sees else None,
        )
    )  # fmt: skip
    state.client.sleep.released.set()
    transport = httpx.ASGITransport(app=create_app(state), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://tandem", timeout=60) as client:
            made = Seeing(state, tokenizer, client, one.placeholder)
            state.client.attach(made.send)
            yield made
    finally:
        state.close()


def run_seeing(
    scenario: Callable[[Seeing], Coroutine[Any, Any, None]], template: str = SEES_ALL, **options: Any
) -> None:
    async def running() -> None:
        async with seeing(template, **options) as server:
            await scenario(server)

    asyncio.run(running())


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text_part(part) if isinstance(part, str) else part for part in parts]}
