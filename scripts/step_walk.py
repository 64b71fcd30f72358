"""Files and lines that a step of the engine runs through: what a reader has to open to follow it.

    python scripts/step_walk.py DIRECTORY --kt-gpu-experts-ratio 0.5

loads a model with these flags of `kt serve`, and prints a row for a prompt's step and one for a decode step: files of
the package that ran, their lines, and how many of both belong to the engine and the server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import tandem

PACKAGE = Path(tandem.__file__).parent
ENGINE_ROOMS = "engine", "server"


class Walk(NamedTuple):
    """files: of the package, relative to it, in which a function ran."""

    files: frozenset[str]

    @property
    def of_engine(self) -> frozenset[str]:
        return frozenset(file for file in self.files if file.split("/")[0] in ENGINE_ROOMS)

    def row(self, step: str) -> dict[str, Any]:
        own = self.of_engine
        return {
            "step": step, "files": len(self.files), "lines": _lines(self.files), "engine_files": len(own),
            "engine_lines": _lines(own), "of_engine": sorted(own),
        }  # fmt: skip


def _lines(files: frozenset[str]) -> int:
    return sum(len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in files)


@contextmanager
def walked() -> Iterator[Callable[[], Walk]]:
    """Notes each call in this thread. The function returns what has run until then."""
    names, root = set[str](), str(PACKAGE)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    def walk() -> Walk:
        own = (name for name in names if name.startswith(root))
        return Walk(frozenset(str(Path(name).relative_to(PACKAGE)) for name in own))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(before)


def steps(engine: Any, prompt: list[int]) -> Iterator[tuple[str, Walk]]:
    """A prompt's step, and the second of its decode steps: the first finds nothing as it was left."""
    from tandem.engine.protocol import GenerateRequest, SamplingSettings

    sampling = SamplingSettings(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add(GenerateRequest(id="walk", prompt_ids=prompt, sampling=sampling))
    for name in ("prefill", "", "decode"):
        with walked() as walk:
            engine.step()
        if name:
            yield name, walk()
    engine.abort("")


def main(arguments: list[str]) -> None:
    from tandem.engine.engine import Engine
    from tandem.flags.engine_config import EngineConfig

    engine = Engine(EngineConfig.from_args(arguments))
    for name, walk in steps(engine, list(range(1, 40))):
        print(json.dumps(walk.row(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
