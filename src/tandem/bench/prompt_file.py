"""`read_prompts`: prompts of people from a file in ShareGPT's form, for `kt bench serve --prompts`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.bench.load_client import LoadError

CHARS_OF_TOKEN = 4
_FORM = '[{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}, …]'


def read_prompts(path: Path, output_len: int | None) -> tuple[tuple[str, int], ...]:
    """(first question, tokens of its answer) of each conversation that has both.

    output_len: of all answers; None: those of the file, at four characters a token, for only the server has the model's
    tokenizer. Raises LoadError.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"--prompts {path} cannot be read as JSON: {error}") from error
    pairs = [pair for pair in map(_first_turns, entries if isinstance(entries, list) else []) if pair is not None]
    if not pairs:
        raise LoadError(f"--prompts {path} has no conversation; its form is {_FORM}")
    return tuple((prompt, output_len or max(1, len(answer) // CHARS_OF_TOKEN)) for prompt, answer in pairs)


def _first_turns(entry: Any) -> tuple[str, str] | None:
    """None: it does not begin with a question and its answer."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    (role, prompt), (_, answer) = ((turn.get("from"), turn.get("value")) for turn in turns[:2])
    if role not in ("human", "user") or not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    return (prompt, answer) if prompt and answer else None
