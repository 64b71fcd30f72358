"""Every key of every native family's config.json, left out and set to another value that Transformers takes: logits
equal Transformers', or the key is refused by name.

What Transformers itself refuses, or cannot compute, is no legal value and left out. All families take 118 seconds of
one core.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from sessions import Session, prompts, skip_where_outdated, worst
from tandem.architectures import FAMILIES
from tandem.errors import TandemError
from tandem.spec.json_keys import HARMLESS
from tiny import VARIANTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

Json = dict[str, Any]
Change = tuple[str, Json]
"""What was done, and the config.json that results."""

SWEPT = [name for name, (kind, _) in VARIANTS.items() if name == kind and kind in FAMILIES]
LEFT_OUT = HARMLESS - {"rope_theta"} | {
    "num_mtp_layers",
    "architectures",
    "model_type",
    "transformers_version",
}
"""Keys that say nothing about what is computed."""

OTHERS: Json = {
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu"], "hidden_activation": ["gelu", "silu"],
    "mamba_hidden_act": ["gelu"], "mlp_hidden_act": ["silu"], "rope_type": ["linear", "yarn", "default"],
    "scoring_func": ["softmax", "sigmoid"], "topk_method": ["greedy", "noaux_tc"], "gating": ["per-element", False],
    "position_embedding_type": ["rope", None], "sliding_window": [5, None], "moe_router_dtype": ["float16"],
    "q_lora_rank": [None, 8], "experts_implementation": [], "attn_implementation": [],
}  # fmt: skip

NAMED = {
    (
        "nemotron_h",
        "time_step_min",
    ): "Transformers does not let time steps of prompts be smaller, which decoding rows' may",
}
"""Differences that are decided, by model type and key."""

RELATED = {
    "rope_parameters": "rope_theta", "alpha": "'dynamic'", "use_sliding_window": "sliding_window",
    "num_hidden_layers": "_layer_types", "model_max_length": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok", "decoder_sparse_step": "no layer is MoE",
    "first_k_dense_replace": "no layer is MoE",
}  # fmt: skip
"""What a refusal may name instead: the key's word in other families, or what no longer fits it."""


def others(key: str, value: Any) -> list[Any]:
    """Values to try in turn, until Transformers takes one."""
    if key in OTHERS:
        return [other for other in OTHERS[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(1, value // 2), 0]
    if isinstance(value, float):
        return [value * 1.5 + (0.25 if value == 0 else 0.0), value / 2, 1.0]
    if isinstance(value, list) and len(value) > 1:
        return [value[1:] + value[:1], value[::-1], value[:-1] + value[:1]]
    return []


def changes(config: Json) -> Iterator[tuple[str, list[Json]]]:
    """What is done to a key, and the files to try in turn. Objects are swept inside, too."""
    for key, value in config.items():
        if key in LEFT_OUT:
            continue
        yield f"without {key}", [{k: v for k, v in config.items() if k != key}]
        if isinstance(value, dict):
            for what, tried in changes(value):
                yield f"{what} in {key}", [config | {key: inner} for inner in tried]
        elif tried := [config | {key: other} for other in others(key, value)]:
            yield f"another {key}", tried


class Theirs:
    """Transformers' logits of one prompt, for files that differ in config.json alone."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, (path / "config.json").read_text()
        self.base, self._known = self._effective(json.loads(self._before)), dict[str, torch.Tensor | None]()

    def logits(self, config: Json) -> torch.Tensor | None:
        """None where it refuses the file, or computes no numbers."""
        with contextlib.suppress(Exception):
            effective = self._effective(config)
            if effective not in self._known:
                self._known[effective] = self._computed(config)
            return self._known[effective]
        return None

    def _effective(self, config: Json) -> str:
        """What it makes of a config.json."""
        (self._path / "config.json").write_text(json.dumps(config))
        said = AutoConfig.from_pretrained(self._path).to_dict()
        return json.dumps({key: said[key] for key in sorted(said) if key not in LEFT_OUT}, default=str)

    def _computed(self, config: Json) -> torch.Tensor | None:
        plainest = {"attn_implementation": "eager", "experts_implementation": "eager"}
        try:
            model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32, **plainest)
            with torch.inference_mode():
                logits = model(torch.tensor([prompts()[0]])).logits[0].float()
        except Exception:
            return None
        return logits if bool(logits.isfinite().all()) else None


def ours(path: Path) -> torch.Tensor | str:
    """Logits, or why it is refused."""
    try:
        session = Session(path)
    except TandemError as error:
        return str(error)
    prompt = prompts()[0]
    return torch.cat([session.step([(0, part)])[0] for part in (prompt[:9], prompt[9:])])


def wrong(variant: str, path: Path) -> list[str]:
    """What differs from Transformers without a word."""
    theirs, found = Theirs(path), []
    before = json.loads((path / "config.json").read_text())
    for what, tried in changes(before):
        key = what.split()[1]
        legal = ((config, logits) for config in tried if (logits := theirs.logits(config)) is not None)
        config, expected = next(legal, (None, None))
        if config is None or (VARIANTS[variant][0], key) in NAMED:
            continue
        (path / "config.json").write_text(json.dumps(config))
        said = ours(path)
        if isinstance(said, str):
            if not any(word in said for word in (key, RELATED.get(key, key), "tensor")):
                found.append(f"{what}: refused without its name: {said}")
        elif not worst([said], [expected]) < 1e-4:
            found.append(f"{what}: {worst([said], [expected]):.1e}")
    return found


@pytest.mark.parametrize("variant", SWEPT)
def test_logits_equal_transformers_or_the_key_is_refused(tiny_models, tmp_path, variant):
    skip_where_outdated(tiny_models[variant], torch.float32)
    path = tmp_path / variant
    shutil.copytree(tiny_models[variant], path)
    logging.set_verbosity_error()
    found = wrong(variant, path)
    assert not found, "\n".join(found)
