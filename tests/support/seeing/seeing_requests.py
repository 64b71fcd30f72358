"""Requests with images, and whether their answers are Transformers' own."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tiny_seeing import IMAGE, Prompt, image, prompt, reference, text

WIDE, TALL, OTHER = image(16, 40), image(32, 8, 1), image(16, 40, 2)  # 10, 4 and 10 tokens
ONE = prompt(text(6), WIDE, text(5, 2))
TWO = prompt(text(3), TALL, text(2, 3), WIDE, text(4, 2))
ENDS = prompt(TALL, text(6), WIDE)
PLAIN = prompt(text(14, 9))
PROMPTS = {"one": ONE, "two": TWO, "ends": ENDS, "plain": PLAIN}
ANSWER = 12


def request(name: str, asked: Prompt, **sampling: object) -> GenerateRequest:
    usual = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True, "logit_bias": {IMAGE: -100.0}}
    return GenerateRequest(
        id=name, prompt_ids=list(asked.ids), images=asked.images, sampling=SamplingSettings(**(usual | sampling))
    )


def check(path: Path, asked: Prompt, answer: list[int]) -> None:
    """Each token of a greedy answer is Transformers' own behind those before it. A placeholder, which it would take for
    an image, never comes."""
    assert len(answer) == ANSWER
    logits = reference(path, asked, tuple(answer))[len(asked.ids) - 1 : -1].clone()
    logits[:, IMAGE] = -torch.inf
    assert logits.argmax(-1).tolist() == answer
