"""DSpark's layers as the hub stores them, and as `kt convert` leaves them."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from block_draft_models import SIZE, BlockDrafted, block_drafted
from draft_models import PROMPTS, chunks_of, engine_of
from fake_model import request
from hub_v4 import both_forms, hub_config, saved
from tandem.checkpoint import open_checkpoint
from tandem.cli.app import app
from tiny import file_tensors

MARKOV = [f"mtp.2.markov_head.markov_w{i}.weight" for i in (1, 2)]


@pytest.fixture(scope="module")
def hub(tiny_models, tmp_path_factory) -> BlockDrafted:
    """And the numbers that it stands for."""
    folder = tmp_path_factory.mktemp("hub")
    made = block_drafted(tiny_models["deepseek_v4-hub"], folder / "source")
    packed, plain = both_forms(file_tensors(made.path))
    said = json.loads((made.path / "config.json").read_text())
    drafts = {key: said[key] for key in said if key.startswith("dspark_")}
    path = saved(folder / "hub", packed, made.path, hub_config(made.path) | drafts)
    with torch.no_grad():
        own = {name.removeprefix("model."): tensor for name, tensor in made.model.named_parameters()}
    assert {name for name in plain if name.startswith("mtp.")} == set(made.weights) and len(own) > 20
    numbers = {name: plain[name].to(torch.float64) for name in made.weights}
    exact = block_drafted(saved(folder / "numbers", {n: t for n, t in plain.items() if not n.startswith("mtp.")},
                                tiny_models["deepseek_v4-hub"]), folder / "exact")  # fmt: skip
    return replace(exact, path=path, weights=numbers)


def off(model: BlockDrafted, path: Path, tmp_path: Path) -> list[float]:
    """Of every draft token: how far below the best one the reference has it, in deviations of the row."""
    engine, found = engine_of(path, tmp_path, page_size=128, max_total_tokens=1024), []
    asks = [request(name, prompt, max_tokens=10, ignore_eos=True) for name, prompt in PROMPTS.items()]
    for tokens, draft_tokens in chunks_of(engine, *asks):
        for token, logits in zip(draft_tokens, model.logits(tokens, len(draft_tokens), draft_tokens), strict=True):
            found.append(float((logits.max() - logits[token]) / logits.std()))
    assert len(found) > 15 * SIZE
    return found


def test_the_hubs_own_format_is_computed_as_stored(hub: BlockDrafted, tmp_path: Path) -> None:
    """Kernels round activations to bfloat16 beside codes: now and then another draft token is as likely. Every expert
    is chosen, so rounding chooses none differently. Of random logits the best is 2.8 deviations off."""
    found = off(hub, hub.path, tmp_path)
    assert sum(found) / len(found) < 0.02 and max(found) < 0.5


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_conversion_keeps_the_layers(hub: BlockDrafted, tmp_path: Path, method: str) -> None:
    """Their experts are rounded as others are; all else stays."""
    out = tmp_path / method
    line = f"convert --input-path {hub.path} --output {out} --quant-method {method} --cpuinfer-threads 2"
    done = CliRunner().invoke(app, shlex.split(f"{line} --threadpool-count 1 --input-type fp4 --no-merge-safetensor"))
    assert done.exit_code == 0, done.output
    before, after = open_checkpoint(hub.path), open_checkpoint(out)
    for name in MARKOV:
        assert torch.equal(before.get(name), after.get(name))
    experts = [name for name in after.names() if name.startswith("mtp.1.mlp.experts.0.")]
    assert any("packed" in name for name in experts)
    found = off(hub, out, tmp_path)
    assert sum(found) / len(found) < (0.05 if method == "int8" else 0.6)
