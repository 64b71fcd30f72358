"""lm-eval's scores through `local-completions` are those of Transformers: a task of our own, the demo in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from server_harness import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

TOLERANCE = 1e-3  # of a sum of log-probabilities; both add in float32, in another order
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " a large city in Spain"], "answer": 0},
    {"question": "Two and two are", "choices": [" five.", " four.", " blue."], "answer": 1},
    {"question": "Water boils at 100 degrees", "choices": [" Celsius", " kilometres", " of 水 ünïcödé"], "answer": 0},
    {"question": "The opposite of hot is", "choices": [" cold", " warm and sunny, most days", "!"], "answer": 0},
    {"question": "A week has", "choices": [" seven days", " ten days", " nine days"], "answer": 0},
]  # fmt: skip


def own_task(folder: Path) -> Any:
    """Multiple choice, from a file beside the test."""
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    config = {
        "task": "ours", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": str(folder / "questions.jsonl"), "cache_dir": str(folder)},
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(config=config)


def sums(model: Any, tokenizer: Any) -> list[list[tuple[float, bool]]]:
    """Of each question's choices: the sum of their tokens' log-probabilities, and whether they are the greedy ones."""
    return [[_sum(model, tokenizer, q["question"], choice) for choice in q["choices"]] for q in QUESTIONS]


def _sum(model: Any, tokenizer: Any, context: str, choice: str) -> tuple[float, bool]:
    ids, begin = tokenizer(context + choice).input_ids, len(tokenizer(context).input_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    scores = logits.log_softmax(-1)[begin - 1 : -1]
    chosen = torch.tensor(ids[begin:])
    total = float(scores.gather(1, chosen[:, None]).sum())
    return total, bool((scores.argmax(-1) == chosen).all())


@pytest.mark.parametrize("batch", [1, 4])
def test_scores_equal_transformers(demo_dir: Path, demo_server: ServerProcess, tmp_path: Path, batch: int):
    lm_eval: Any = pytest.importorskip("lm_eval")
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    expected = sums(AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32), tokenizer)
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "demo", "base_url": f"{demo_server.url}/v1/completions", "tokenizer": str(demo_dir),
            "num_concurrent": 1, "max_retries": 1,
        },
        tasks=[own_task(tmp_path)], batch_size=batch, bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    samples = sorted(found["samples"]["ours"], key=lambda sample: sample["doc_id"])
    ours = [[(float(value), bool(greedy)) for value, greedy in each["filtered_resps"]] for each in samples]
    assert len(ours) == len(QUESTIONS)
    for one, other in zip(ours, expected, strict=True):
        for (value, greedy), (right, is_greedy) in zip(one, other, strict=True):
            assert value == pytest.approx(right, abs=TOLERANCE)
            assert greedy == is_greedy
    best = [max(range(3), key=lambda i: each[i][0]) for each in expected]
    accuracy = sum(b == q["answer"] for b, q in zip(best, QUESTIONS, strict=True)) / len(QUESTIONS)
    assert found["results"]["ours"]["acc,none"] == pytest.approx(accuracy)
