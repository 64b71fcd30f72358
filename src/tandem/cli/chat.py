"""`kt chat`: a conversation in the terminal with a running server."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.cli.chat_client import ChatClient
    from tandem.cli.chat_input import MessageReader

_POLL_SECONDS = 0.25
_LOADING = "the server is loading its model …"
HELP = '''  /help           this list
  /reset          forget what was said
  /system TEXT    set the system prompt and start afresh; alone: show it
  /image FILE     show a picture with the next message, if the model sees
  /exit           leave (also Ctrl+D)
  Ctrl+C          stop the answer
Several lines are one message when they are pasted, when each but the last ends in a
backslash, or between """ and """.'''
_COMMANDS = ("/help", "/reset", "/system", "/image", "/exit", "/quit", "/bye")


def chat(
    host: Annotated[
        str, typer.Option(help="The server's address, HOST:PORT, or its whole URL.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The server's port, where --host has none.", min=1, max=65535)] = 30000,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest token.", min=0)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, tokens.", min=1)] = None,
    api_key: Annotated[str | None, typer.Option(help="If the server wants one; or TANDEM_API_KEY.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(help="Which of several; default: a loaded one.")] = None,
) -> None:
    """Chat with a running server. Ctrl+C stops an answer, Ctrl+D leaves, /help lists the commands.

    Example: kt chat --temperature 0.7
    """
    from rich.console import Console

    from tandem.cli.chat_client import ChatClient
    from tandem.flags import env

    client = ChatClient(_url(host, port), api_key or env.api_key(), temperature, max_tokens, system, model)
    ChatSession(client, Console(highlight=False, soft_wrap=True)).run()


def _url(host: str, port: int) -> str:
    """URL of a name or an address, perhaps with its port; a whole URL, as the server prints it, is taken as it is."""
    if "://" in host:
        return host.rstrip("/").removesuffix("/v1")  # the base URL that other clients want
    if re.fullmatch(r"[^:]+:\d+|\[.*\]:\d+", host):
        return f"http://{host}"
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_command(text: str) -> bool:
    """A pasted comment or path begins with a slash, too: of several lines only a known command is one."""
    from tandem.cli.chat_input import Quoted

    if isinstance(text, Quoted):
        return False
    return text.startswith("/") and ("\n" not in text or text.split(maxsplit=1)[0] in _COMMANDS)


class ChatSession:
    """Reads messages, runs commands, prints answers as they come."""

    def __init__(self, client: ChatClient, console: Console) -> None:
        self._client = client
        self._console = console

    def run(self) -> None:
        """Until /exit or the end of input. Raises ChatError when no server answers at the start."""
        self._wait_for_model()
        from tandem.cli.chat_input import MessageReader

        name = self._client.model_name()
        reader = MessageReader(self._prompt("you ›"), self._prompt("  ···"))
        self._console.print(f"[bold]{name}[/]  [dim]{self._client.url} · /help for commands[/]\n")
        while self._turn(reader):
            pass

    def _wait_for_model(self) -> None:
        if why := self._client.not_ready():
            with self._console.status("") as status:
                while why:
                    status.update(_LOADING if "starting" in why else f"the server is not ready: {why} …")
                    time.sleep(_POLL_SECONDS)
                    why = self._client.not_ready()

    def _turn(self, reader: MessageReader) -> bool:
        try:
            text = reader.read()
        except KeyboardInterrupt:
            self._console.print("\n[dim]Ctrl+D or /exit leaves[/]")
            return True
        if text is None:
            self._console.print()
            return False
        if _is_command(text):
            return self._command(text)
        if text.strip():
            self._answer(text)
        return True

    def _prompt(self, text: str) -> str:
        # \001 and \002 tell readline which bytes take no space on the line.
        coloured = sys.stdin.isatty() and self._console.is_terminal
        return f"\001\033[1;36m\002{text}\001\033[0m\002 " if coloured else ""

    def _command(self, text: str) -> bool:
        name, _, rest = re.sub(r"\s", " ", text, count=1).partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/reset":
            self._client.reset()
            self._console.print("[dim]forgotten[/]")
        elif name == "/system":
            self._system(rest.strip())
        elif name == "/image":
            self._image(rest.strip())
        elif name == "/help":
            self._console.print(HELP, markup=False)
        else:
            self._console.print(f"{name} is no command; these are:\n{HELP}", markup=False)
        return True

    def _system(self, text: str) -> None:
        if text:
            self._client.system = text
            self._client.reset()
        self._console.print(f"system prompt: {self._client.system or '(none)'}", markup=False, style="dim")

    def _image(self, path: str) -> None:
        from tandem.cli.chat_client import ChatError

        with contextlib.suppress(ValueError):  # terminals write the path of what is dropped as a shell wants it
            [path] = shlex.split(path)
        try:
            count = self._client.attach(path)
        except ChatError as error:
            self._console.print(f"error: {error}\n", style="red", markup=False)
        else:
            self._console.print(f"[dim]{count} with the next message[/]")

    def _answer(self, question: str) -> None:
        from tandem.cli.chat_client import ChatError, ReasoningText

        thinking = False
        try:
            with contextlib.closing(self._client.ask(question)) as pieces:
                for piece in pieces:
                    thought = isinstance(piece, ReasoningText)
                    if thinking and not thought:
                        self._console.print("\n")
                    thinking = thought
                    self._console.print(piece, end="", markup=False, style="dim" if thought else None)
            self._console.print(f"\n{self._speed_text()}\n", style="dim", markup=False)
        except KeyboardInterrupt:
            self._console.print("\n[dim]stopped[/]\n")
        except ChatError as error:
            self._console.print(f"\nerror: {error}\n", style="red", markup=False)

    def _speed_text(self) -> str:
        speed = self._client.speed
        rate = f" · {speed.tokens_per_second:.1f} tokens/s" if speed.tokens_per_second else ""
        return f"{speed.tokens} tokens{rate} · first after {speed.first_token_seconds:.2f} s"
