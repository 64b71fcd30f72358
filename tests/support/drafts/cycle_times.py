"""`python tests/support/drafts/cycle_times.py`: what the host does while a GPU would stand still, by a model that is
small everywhere but in its vocabulary. Between a step's end and the launch of the draft tokens behind it, and between
these draft tokens and the next step. Chains are run by the CPU as GPUs record them (`recorded_chains`); their time is
left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import scripted_path  # noqa: F401
from recorded_chains import CPU, recording
from scripted_drafts.parts import ScriptedSetup, told_parts
from scripted_drafts.rows import ScriptedFlags, _config
from scripted_drafts.turns import ScriptedDrafts, ScriptedLoad, TimedTurns
from tandem.bench.architectures import CONFIGS
from tandem.bench.gaps.made_up import write_folder
from tandem.engine.engine import Engine
from tandem.engine.sampling.logits import DeviceLogits, HostRows, best_of
from tandem.engine.step.step import Running, StepOutput

SMALL = {
    "hidden_size": 256, "num_attention_heads": 2, "head_dim": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16,
    "o_groups": 2, "o_lora_rank": 64, "moe_intermediate_size": 64, "n_routed_experts": 16, "num_hash_layers": 0,
    "index_n_heads": 2,
}  # fmt: skip
TOKENS, DRAFT_TOKENS, ACCEPTANCE = 600, 3, 0.9
Ends = dict[str, list[tuple[float, float]]]


def told() -> ScriptedSetup:
    asked = ScriptedFlags(
        "small-v4", ("MXFP4",), (0.0,), (1,), (ACCEPTANCE,), 0.33, DRAFT_TOKENS, False, (), 1, 64, TOKENS, 1, 1, "auto",
        "bf16", 0.0, "NEXTN",
    )  # fmt: skip
    small = {"small-v4": CONFIGS["deepseek-v4-flash"] | SMALL}
    with TemporaryDirectory() as folder, patch.dict(CONFIGS, small):
        write_folder(Path(folder), asked.config, asked.layers)
        return told_parts(_config(asked, folder, "MXFP4", 0.0), "bf16", 0.33)


def watched(owner: Any, name: str, label: str, ends: Ends) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*args: Any) -> Any:
        started = perf_counter()
        try:
            return inner(*args)
        finally:
            ends.setdefault(label, []).append((started, perf_counter()))

    setattr(owner, name, outer)


def as_on_gpu(engine: Engine, ends: Ends) -> None:
    """Its layer's draft tokens from a recording; of logits the best of each row is there when a step has ended."""
    drafter: Any = engine._speculation._drafter  # type: ignore[union-attr]
    stand_in: Any = SimpleNamespace(
        _runner=engine._runner, plan=engine.plan, model_config=engine.model_config,
        _speculation=SimpleNamespace(_drafter=drafter._layer),
    )  # fmt: skip
    recording(stand_in, (1,))
    runner, rows = engine._runner, HostRows(CPU)
    start: Any = runner.start

    def started(*args: Any) -> Running[StepOutput]:
        output = start(*args).result()
        made = torch.from_numpy(output.logits._array)
        return Running(lambda: StepOutput(output.step, DeviceLogits(made, best_of(made), rows)))

    runner.start = started  # type: ignore[method-assign]
    watched(runner, "start", "step", ends)
    chains = drafter._layer._chain
    watched(chains, "_replayed", "draft_tokens", ends)
    for chain, *_ in chains._recorded:
        watched(chain.inputs, "fill", "filled", ends)


def main(tokens: int = TOKENS) -> None:
    turns: Any = TimedTurns.__new__(TimedTurns)
    turns._told, turns._asked, ends = told(), ScriptedLoad(1, 64, tokens), Ends()
    engine = turns._engine(ScriptedDrafts("NEXTN", ACCEPTANCE, DRAFT_TOKENS, False, 0.0))
    as_on_gpu(engine, ends)
    turns.timed(engine)
    steps, filled, draft_tokens = (ends[label] for label in ("step", "filled", "draft_tokens"))
    behind = [fill[1] - max(end for _, end in steps if end < fill[1]) for fill in filled[8:]]
    before = [min(first for first, _ in steps if first > end) - end for _, end in draft_tokens[8:-1]]
    for what, seconds in (("a step's end to the drafts' launch", behind), ("drafts to the next step", before)):
        print(f"{what}: {1e6 * statistics.median(seconds):.0f} us, the least {1e6 * min(seconds):.0f}")


if __name__ == "__main__":
    main()
