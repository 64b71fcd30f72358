"""The command lines of README.md, CONTRIBUTING.md and docs/: what people paste from fenced and indented blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("kt", "pip", "make", "curl", "python")

# what a line begins with, and why no test runs it
NOT_RUN = {
    "docker": "no Docker where tests run: tests/cli/test_containers.py builds the image with buildah",
    "sudo": "installs or restarts, as root",
    "git": "changes the repository",
    "source": "changes the shell that it runs in",
    "rm": "removes an environment",
    "npm": "downloads",
    "lm_eval": "another project's program: tests/clients/test_lm_eval.py calls its library",
    "modelscope": "another project's program, which downloads",
    "nvidia-smi": "comes with NVIDIA's driver",
    "smg": "another project's program: tests/clients/test_smg.py starts it",
    "ray": "another project's program: tests/ray starts a cluster of its own",
    "llama-server": "another project's program",
    "python -m sglang.launch_server": "another project's program",
    "python -m vllm.entrypoints.openai.api_server": "another project's program",
    "vllm serve": "another project's program: `make test-vllm` has one with the plug-in",
    "python -m pip uninstall": "removes a package",
    "python -m pip install": "builds a second distribution",
    "python -m venv": "makes an environment, as scripts/make_venv.sh does for make",
    "python -m pytest": "would be these tests",
    "python benchmarks/random_model.py": "writes gigabytes",
    "kt serve --models": "starts processes: tests/front runs real ones",
    "python scripts/check_wheels.py": "there are no wheels: tests/cli/test_wheels.py makes some",
    "python benchmarks/soak.py": "takes half an hour",
}
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*$")
HIDDEN = "…"  # stands for what a reader puts there


@dataclass
class Line:
    """words: as a shell divides them; shown: what the page prints below it, of lines that begin with `$`."""

    page: str
    text: str
    settings: dict[str, str]
    words: list[str]
    shown: list[str] = field(default_factory=list)

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def refused(self) -> bool:
        """Whether the page shows an error."""
        return any(text.startswith("error: ") for text in self.shown)

    @property
    def not_run(self) -> str:
        """The key of `NOT_RUN`; empty: it is run."""
        return next((key for key in NOT_RUN if self.words[: len(key.split())] == key.split()), "")


def lines_of(page: Path) -> list[Line]:
    """In their order. Raises ValueError for a line of a block of commands that is none."""
    blocks = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    name = page.relative_to(ROOT).as_posix()
    return [
        line
        for block in blocks
        if block.type in ("fence", "code_block") and _has_commands(block.content)
        for line in _block_lines(name, block.content)
    ]


def spans_of(page: Path) -> list[str]:
    """Its `spans`."""
    parsed = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return [each.content for one in parsed for each in one.children or () if each.type == "code_inline"]


def _has_commands(block: str) -> bool:
    return bool(_words(block.removeprefix("$ ").split("\n", 1)[0], whole=False)[1])


def _block_lines(page: str, block: str) -> Iterator[Line]:
    prompts, line = block.startswith("$ "), None
    for text in _joined(block):
        if prompts and not text.startswith("$ "):
            assert line is not None
            line.shown.append(text)
            continue
        settings, words = _words(text.removeprefix("$ "))
        if not words and text.startswith((HIDDEN, "#")):
            continue
        if not words:
            raise ValueError(f"{page}: no known program: {text}")
        if line is not None:
            yield line
        line = Line(page, text, settings, words)
    if line is not None:
        yield line


def _joined(block: str) -> Iterator[str]:
    """Lines, each with what a backslash or an open quotation mark brings in. What a program prints stays as it is."""
    text, prompts = "", block.startswith("$ ")
    for line in block.rstrip("\n").split("\n"):
        if prompts and not text and not line.startswith("$ "):
            yield line
            continue
        text = f"{text}\n{line}" if text else line
        if not line.endswith("\\") and _is_closed(text):
            yield text.replace("\\\n", " ")
            text = ""
    if text:
        raise ValueError(f"never closed: {text}")


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return text.startswith(HIDDEN)
    return True


def _words(text: str, whole: bool = True) -> tuple[dict[str, str], list[str]]:
    """Variables that are set, and the words behind them, the program without its folder. No words: no program of ours,
    and none that is listed."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = [] if whole else text.split()
    settings = {}
    while words and ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    if words[:2] == ["taskset", "-c"]:
        words = words[3:]
    if not words:
        return {}, []
    words[0] = re.sub(r"^python3$", "python", words[0].removeprefix(".venv/bin/"))
    known = {*RUN, *(key.split()[0] for key in NOT_RUN)}
    return settings, words if words[0] in known else []
