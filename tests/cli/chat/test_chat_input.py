"""Messages of several lines in `kt chat`: pasted and typed in a real terminal (a pty), and piped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chat_terminal import CTRL_C, CTRL_D, Terminal, kt_chat
from fake_chat_server import FakeChatServer, fake_chat_server

CODE = "def f(x):\n    return x\n\n\n# a comment"
NO_READLINE = "import sys; sys.modules['readline'] = None; from tandem.cli import main; main()"


def paste(terminal: Terminal, text: str) -> None:
    """As terminals do: between the marks that the program has asked for, and with a CR for each new line."""
    terminal.type("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")


def questions(server: FakeChatServer) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.bodies]


@pytest.mark.parametrize("end", ["", "\n"], ids=["open", "closed by a new line"])
def test_a_paste_is_one_message(end: str) -> None:
    with fake_chat_server() as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        terminal.type("Explain this: ")
        paste(terminal, CODE + end)
        terminal.type("\r")
        terminal.expect("m1 word1")
        terminal.expect("you ›")
        terminal.type("next\r")
        terminal.expect("m3 word1")
    assert questions(server) == ["Explain this: " + CODE, "next"]


@pytest.mark.parametrize("start", [("-m", "tandem"), ("-c", NO_READLINE)], ids=["readline", "no readline"])
def test_lines_that_come_at_once_are_one_message(start: tuple[str, ...]) -> None:
    """GNU screen and Python's libedit mark no pastes. A last line without its end waits for Enter."""
    with fake_chat_server() as server, kt_chat(server.port, start=start) as terminal:
        terminal.expect("you ›")
        terminal.type(CODE.replace("\n", "\r"))
        terminal.expect("# a comment")
        terminal.type(" of mine\r")
        terminal.expect("m1 word1")
        terminal.expect("you ›")
        terminal.type("one\rtwo\r")
        terminal.expect("m3 word1")
    assert questions(server) == [CODE + " of mine", "one\ntwo"]


def test_a_long_paste_is_whole() -> None:
    """Longer than the 4096 bytes that a terminal's line has otherwise."""
    text = "\n".join(f"line {i}: " + "x" * 200 for i in range(100))
    with fake_chat_server() as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        for start in range(0, len(text), 2000):
            part = text[start : start + 2000]
            first, last = start == 0, start + 2000 >= len(text)
            terminal.type(("\x1b[200~" if first else "") + part.replace("\n", "\r") + ("\x1b[201~" if last else ""))
            terminal.settle()
        terminal.type("\r")
        terminal.expect("m1 word1")
    assert questions(server) == [text]


def test_lines_are_typed_behind_backslashes_and_between_quotation_marks() -> None:
    with fake_chat_server() as server, kt_chat(server.port) as terminal:
        for line in ("one\\", "two\\", "three"):
            terminal.expect("you ›|···")
            terminal.type(line + "\r")
        terminal.expect("m1 word1")
        for line in ('"""', "/exit", "", "  indented", '"""'):
            terminal.expect("you ›|···")
            terminal.type(line + "\r")
        terminal.expect("m3 word1")
        terminal.expect("you ›")
        terminal.type('"""all on one line"""\r')
        terminal.expect("m5 word1")
        terminal.expect("you ›")
        terminal.type("even numbers \\\\ stay \\\\\r")
        terminal.expect("m7 word1")
    assert questions(server) == [
        "one\ntwo\nthree", "/exit\n\n  indented", "all on one line", "even numbers \\\\ stay \\\\"
    ]  # fmt: skip


def test_ctrl_c_drops_an_open_message_and_ctrl_d_sends_it() -> None:
    with fake_chat_server() as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        terminal.type('"""\r')
        terminal.expect("···")
        terminal.type("dropped\r")
        terminal.expect("···")
        terminal.press(CTRL_C, shows="Ctrl.D or /exit leaves")
        terminal.expect("you ›")
        terminal.type('"""kept\r')
        terminal.expect("···")
        terminal.type(CTRL_D)
        terminal.expect("m1 word1")
        assert terminal.process.wait(60) == 0
    assert questions(server) == ["kept"]


def test_a_paste_that_begins_with_a_slash_is_a_command_only_if_it_is_one() -> None:
    with fake_chat_server() as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        paste(terminal, "// C++\nint x;")
        terminal.type("\r")
        terminal.expect("m1 word1")
        terminal.expect("you ›")
        paste(terminal, "/system Be brief.\nBe kind.")
        terminal.type("\r")
        terminal.expect("system prompt: Be brief.\r\nBe kind.")
        terminal.type("hello\r")
        terminal.expect("m2 word1")
    assert questions(server) == ["// C++\nint x;", "hello"]
    assert server.bodies[1]["messages"][0] == {"role": "system", "content": "Be brief.\nBe kind."}


def test_a_pasted_text_keeps_its_quotation_marks_and_indentation() -> None:
    text = '"""A module."""\n\nimport os'
    with fake_chat_server() as server, kt_chat(server.port) as terminal:
        terminal.expect("you ›")
        paste(terminal, text)
        terminal.type("\r")
        terminal.expect("m1 word1")
        terminal.expect("you ›")
        paste(terminal, "    if x:\n        y()\n")
        terminal.type("\r")
        terminal.expect("m3 word1")
    assert questions(server) == [text, "    if x:\n        y()"]


@pytest.mark.parametrize(
    ("piped", "wanted"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ('"""one\ntwo"""\nthree\n', ["one\ntwo", "three"]),
        ('"""\none\n\ntwo', ["one\n\ntwo"]),
        ("one\\\ntwo\n\n", ["one\ntwo"]),
        ("one\\", ["one"]),
        ('"""', []),
        ('"""\n"""\n', []),
    ],
)
def test_piped_lines_are_messages_each_unless_they_say_otherwise(piped: str, wanted: list[str]) -> None:
    with fake_chat_server() as server:
        command = [sys.executable, "-m", "tandem", "chat", "--port", str(server.port)]
        done = subprocess.run(command, input=piped, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr
    assert questions(server) == wanted
