"""Starts vLLM as its users do, and prints a line of JSON for each engine: its tokens, or what it said instead.

    python vllm_tokens.py '[{"model": "directory", "enforce_eager": true}, ...]'

Keys are keywords of `vllm.LLM`; "kill": true kills the process of the experts while it works; "score": true gives the
logarithms of the probabilities of the prompts' tokens instead of new ones.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

LENGTHS, NEW_TOKENS = (5, 17, 40), 12
ALIKE = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 64 << 20}
"""Prompts are computed in chunks beside rows that decode."""


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * j) % 250 for j in range(length)] for i, length in enumerate(LENGTHS)]


def run(wishes: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    kill, score = wishes.pop("kill", False), wishes.pop("score", False)
    try:
        engine = LLM(**ALIKE, enable_prefix_caching=False, skip_tokenizer_init=True, **wishes)
        if kill:
            threading.Thread(target=kill_workers, daemon=True).start()
        tokens = NEW_TOKENS if not kill else 80
        asked = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, prompt_logprobs=0 if score else None
        )
        while True:
            given = engine.generate([{"prompt_token_ids": each} for each in prompts()], asked, use_tqdm=False)
            if score:
                return {"scores": [list(scores(each)) for each in given]}
            if not kill:
                return {"tokens": [list(each.outputs[0].token_ids) for each in given]}
    except Exception as error:
        return {"error": type(error).__name__, "said": str(error)}


def scores(given: Any) -> Iterator[float]:
    """Scores of all tokens of a prompt but the first."""
    pairs = zip(given.prompt_token_ids, given.prompt_logprobs, strict=True)
    return (by_token[token].logprob for token, by_token in pairs if by_token is not None)


def kill_workers() -> None:
    """The deepest processes compute."""
    import psutil

    time.sleep(0.5)
    for child in psutil.Process().children(recursive=True):
        if not child.children() and "resource_tracker" not in " ".join(child.cmdline()):
            child.kill()


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print("RESULT", json.dumps(run(each)), flush=True)
