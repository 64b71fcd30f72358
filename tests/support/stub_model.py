"""A model's server without a model: `python stub_model.py SOCKET NAME FOLDER`, for tests and measurements of the front.

It says its name and what it was asked. Prompts: "count N S": N events, S seconds between two; "halt": waits for the
file FOLDER/go; "hold": likewise, before anything is sent; "die": the process ends in mid-stream. FOLDER/NAME.held: the
processes that wait so. FOLDER/NAME.halted: those that began to halt. FOLDER/NAME.broken: it cannot be loaded.
FOLDER/NAME.log: what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import uvicorn


class Stub:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def note(self, what: object, file: str = "log") -> None:
        with (self.folder / f"{self.name}.{file}").open("a") as lines:
            lines.write(f"{what}\n")

    async def __call__(self, scope, receive, send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] in FACTS:
            await whole(send, FACTS[scope["path"]](self.name), "text/plain" if scope["path"] == "/metrics" else JSON)
            return
        fields = json.loads(body or b"{}")
        prompt = fields["messages"][-1]["content"] if "messages" in fields else fields.get("prompt", "")
        if prompt == "hold":
            await self.hold(receive)
        if not fields.get("stream"):
            await self.wait(prompt, receive)
            said = {"model": self.name, "said": prompt, "path": scope["path"], "pid": os.getpid()}
            await whole(send, json.dumps(said).encode(), JSON)
            return
        await self.stream(prompt, receive, send)

    async def stream(self, prompt, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENTS)]})
        _, events, pace = prompt.split(" ") if prompt.startswith("count ") else ("", "3", "0")
        for number in range(int(events)):
            await send(event({"model": self.name, "number": number, "pid": os.getpid()}))
            if prompt in ("halt", "die"):
                await self.wait(prompt, receive)
            elif float(pace):
                await asyncio.sleep(float(pace))
            if prompt == "die":
                os._exit(1)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def hold(self, receive) -> None:
        self.note(os.getpid(), "held")
        await self.wait("halt", receive)

    async def wait(self, prompt, receive) -> None:
        leaving = asyncio.create_task(receive())
        if prompt == "halt":
            self.note(os.getpid(), "halted")
        while prompt == "halt" and not (self.folder / "go").exists():
            await asyncio.wait({leaving}, timeout=0.01)
            if leaving.done():
                self.note("left")
                raise asyncio.CancelledError
        leaving.cancel()


def event(said: dict) -> dict:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % json.dumps(said).encode(), "more_body": True}


async def whole(send, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


JSON, EVENTS = "application/json", b"text/event-stream; charset=utf-8"
FACTS = {
    "/health": lambda name: b'{"status": "ok"}',
    "/v1/models": lambda name: json.dumps({"data": [{"id": name, "max_model_len": 128}]}).encode(),
    "/api/ps": lambda name: json.dumps({"models": [{"name": name, "model": name, "size": 7}]}).encode(),
    "/api/show": lambda name: b'{"capabilities": ["completion"]}',
    "/metrics": lambda name: b"# TYPE tandem_steps_total counter\ntandem_steps_total 5\n",
    "/tandem/live": lambda name: json.dumps({"model": name}).encode(),
    "/abort_request": lambda name: b'{"aborted": true}',
    "/flush_cache": lambda name: b"ok",
}


def main() -> None:
    path, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    stub = Stub(name, folder)
    if (folder / f"{name}.broken").exists():
        print(f"error: {name} needs 99 GiB of 7", flush=True)
        sys.exit(2)
    stub.note("began")
    config = uvicorn.Config(stub, uds=path, log_level="error", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # it would end this process by the signal, before the note
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    server.run()
    stub.note("ended")


if __name__ == "__main__":
    main()
