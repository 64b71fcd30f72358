"""The real engine around a model that repeats its prompt: the fast double for tests of the server.

Text is bytes (token = byte), END closes every prompt, EOS follows the repetition. A prompt may start with a command:
"crash!" kills the process, "stuck!" sleeps, "raise!" fails the step, "gpu is" does so for good. Answers of token-id
prompts count up from "a".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from echo_tokenizer import END, EOS, VOCAB, EchoTokenizer
from fake_model import fake_config, fake_plan
from tandem.engine.engine import Engine
from tandem.engine.expert_statistics import ExpertMeter
from tandem.engine.protocol import ExpertStats
from tandem.engine.start.parts import EngineParts
from tandem.errors import EngineError
from tandem.experts.usage.expert_usage import ExpertUsage
from tandem.flags.engine_config import EngineConfig
from tandem.planner.choices.decision import Decision
from tandem.planner.choices.speculation import SpeculationPlan
from tandem.planner.forecast.ledger import RAM, VRAM, Ledger, LedgerEntry
from tandem.server.engine_process import LoadedEngine

PAGES, CONTEXT = 2048, 4096
HELD_TOKENS = 20


class EchoModel:
    """Keeps its tokens in the KV pages, so that wrong pages give wrong answers."""

    def __init__(self, seconds_per_step: float = 0.0) -> None:
        self.seconds_per_step = seconds_per_step

    def forward(self, batch, kv) -> torch.Tensor:
        time.sleep(self.seconds_per_step)
        for k_pages, _ in kv:
            k_pages.view(-1)[batch.cache_slots] = batch.input_ids.to(k_pages.dtype)
        rows = [self._row(batch, kv[-1][0], int(row)) for row in batch.logits_rows]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)

    def _row(self, batch, k_pages, row: int) -> np.ndarray:
        s = int(np.searchsorted(batch.query_starts.numpy(), row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        pages = batch.block_tables[s, : -(-length // k_pages.shape[1])].long()
        return self._logits(k_pages[pages].flatten()[:length].to(torch.int64).tolist())

    def _logits(self, tokens: list[int]) -> np.ndarray:
        return echo_logits(tokens)


class HaltingEcho(EchoModel):
    def __init__(self, gate: Path) -> None:
        super().__init__()
        self._gate, self._steps = gate, 0

    def forward(self, batch, kv) -> torch.Tensor:
        self._steps += 1
        while self._steps >= 5 and not self._gate.exists():
            time.sleep(0.01)
        return super().forward(batch, kv)


def echo_logits(tokens: list[int]) -> np.ndarray:
    _obey(bytes(t for t in tokens[:6] if t < 256))
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[_next_token(tokens)] = 40.0  # certain at any usual temperature
    return logits


def _next_token(tokens: list[int]) -> int:
    if END not in tokens:
        return 97 + len(tokens) % 26
    end = tokens.index(END)
    place = len(tokens) - end - 1
    return tokens[place] if place < end else EOS


def _obey(command: bytes) -> None:
    if command == b"crash!":
        os.kill(os.getpid(), signal.SIGKILL)
    if command == b"stuck!":
        time.sleep(3600)
    if command == b"gpu is":
        raise DeadGpu("an illegal memory access was encountered")
    if command == b"raise!":
        raise RuntimeError("the echo model was told to fail")


class DeadGpu(RuntimeError):
    """As `GpuRunner.after_failure` finds out."""


def after_failure() -> None:
    if isinstance(sys.exc_info()[1], DeadGpu):
        raise EngineError("the GPU stopped working")


def build(
    seconds_per_step: float = 0.0, context_length: int = CONTEXT, speculation: SpeculationPlan | None = None
) -> LoadedEngine:
    plan = fake_plan(
        context_length=context_length, num_pages=PAGES, max_running_requests=64, max_step_tokens=512,
        speculation=speculation,
    )  # fmt: skip
    config = fake_config()
    object.__setattr__(config, "vocab", VOCAB)
    object.__setattr__(config, "eos_ids", (EOS,))
    engine = Engine.from_parts(EngineParts(plan, config, EchoModel(seconds_per_step), EchoTokenizer()))
    engine._runner.after_failure = after_failure
    engine.grammars.be_patient()  # no test depends on how busy the machine is
    return LoadedEngine(engine, plan, "echo", "echo", VOCAB)


def load(config: EngineConfig) -> LoadedEngine:
    """For the engine process: "echo_engine:load"."""
    return build(seconds_per_step=0.002)


def load_unless_held(config: EngineConfig) -> LoadedEngine:
    """When the file `served_model_name` is not there."""
    while Path(str(config.served_model_name)).exists():
        time.sleep(0.02)
    return load(config)


def load_short(config: EngineConfig) -> LoadedEngine:
    """Whose longest answers are soon over."""
    return build(context_length=200)


def load_slow(config: EngineConfig) -> LoadedEngine:
    return build(seconds_per_step=0.1)


def load_halting(config: EngineConfig) -> LoadedEngine:
    """Whose fifth and later steps wait for the file `served_model_name`."""
    loaded = build()
    loaded.engine._runner._model = HaltingEcho(Path(str(config.served_model_name)))
    return loaded


class RoutedEcho(EchoModel):
    """Counts as a model with experts on both sides of a GPU would, and moves one of them every few steps. While the
    file `held` is there, no answer has more than HELD_TOKENS."""

    def __init__(self, seconds_per_step: float, layers: int, experts: int, held: Path | None = None) -> None:
        super().__init__(seconds_per_step)
        self._held = held
        rng = np.random.default_rng(7)
        self._rng, self._steps = rng, 0
        popular = rng.zipf(1.4, (layers, experts)).clip(1, 60).astype(np.float64)
        self._chances = popular / popular.sum(1, keepdims=True)
        on_gpu = torch.from_numpy(popular >= np.quantile(popular, 0.7, axis=1, keepdims=True))
        self.usage = ExpertUsage(layers, experts, gpu_experts=on_gpu)
        for layer in range(layers):
            self.usage.weigh(layer, 2_400_000)

    def forward(self, batch, kv) -> torch.Tensor:
        self._steps += 1
        self.usage.begin(len(batch.input_ids))
        for layer, chances in enumerate(self._chances):
            ids = torch.from_numpy(self._rng.choice(len(chances), (len(batch.input_ids), 8), p=chances))
            tally = self.usage.tally(layer)
            tally.tokens.index_add_(0, ids.flatten(), torch.ones(ids.numel(), dtype=torch.int64))
            tally.used[ids.flatten()] = 1
        if self._steps % 10 == 0:
            self._exchange()
        return super().forward(batch, kv)

    def _logits(self, tokens: list[int]) -> np.ndarray:
        while self._held is not None and tokens[:-HELD_TOKENS].count(END) and self._held.exists():
            time.sleep(0.01)
        return super()._logits(tokens)

    def _exchange(self) -> None:
        layer = int(self._rng.integers(len(self._chances)))
        here = self.usage.gpu_experts[layer].numpy()
        comes, goes = (int(self._rng.choice(np.flatnonzero(side))) for side in (~here, here))
        self.usage.moved(lambda: [(layer, comes, True), (layer, goes, False)], 1)


class DividedMeter(ExpertMeter):
    """Says of each step that a quarter of it was waiting for the GPU, and half the experts of the CPU."""

    def __init__(self, model: RoutedEcho, layers: int) -> None:
        super().__init__(model.usage, range(1, layers + 1), None)
        self._model = model

    def stats(self, idle: bool) -> ExpertStats:
        seconds = self._model.seconds_per_step * self._model._steps
        found = super().stats(idle)
        return msgspec.structs.replace(
            found, handoff_wait_seconds=seconds / 4, handoff_serve_seconds=seconds / 2
        )


LEDGERS = (
    Ledger(
        RAM,
        (LedgerEntry("experts", 6 << 30, "of the CPU"), LedgerEntry("KV cache", 1 << 30, "tokens")),
        20 << 30,
        24 << 30,
    ),
    Ledger(VRAM, (LedgerEntry("GPU experts", 3 << 30, "the most used"),), 10 << 30, 12 << 30),
)
DECISIONS = (Decision("kernel tier", "avx2", "the best that this CPU has"),)


def load_routed(config: EngineConfig, layers: int = 6, experts: int = 32) -> LoadedEngine:
    """`RoutedEcho`, held by a file of the recorder's folder, where one is given."""
    folder = config.expert_distribution_recorder_dir
    loaded = build(seconds_per_step=0.02)
    assert isinstance(loaded.engine, Engine)
    model = RoutedEcho(0.02, layers, experts, None if folder is None else Path(folder) / "held")
    loaded.engine._runner._model = model
    loaded.engine._meter = DividedMeter(model, layers)
    return replace(loaded, plan=replace(loaded.plan, ledgers=LEDGERS, decisions=DECISIONS))
