"""`python -m tandem.bench.gaps.made_up FOLDER flags`: `kt serve` of a named architecture with made-up weights.

The folder has a config.json and a vocabulary, but no weights. Each process makes them: an expert's are packed once and
copied to the others, so that gigabytes take seconds and no disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tandem.bench.architectures import named_config, named_keys
from tandem.bench.stored import experts_of, stored_as
from tandem.bench.synthetic import FAR, SyntheticCheckpoint, SyntheticStore
from tandem.checkpoint import load_model_config
from tandem.engine.engine import Engine
from tandem.engine.start.loader import Start, for_loading, use_one_torch_thread
from tandem.engine.start.packed_start import PackedStart
from tandem.engine.start.parts import EngineParts
from tandem.experts import CpuExperts, ExpertStore
from tandem.experts.feed import LayerFeed
from tandem.flags.engine_config import EngineConfig
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.kernel_loads import kernel_loads, watch_triton
from tandem.kernels.ops import Ops
from tandem.kernels.packed.cache import KeptLayer
from tandem.kernels.this_machine import this_machine
from tandem.kernels.workers import planned_pool
from tandem.planner.choices.requested import as_asked
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.server.engine_process import LoadedEngine, print_plan, take_cpus, warm_gpu, warm_up
from tandem.spec.activation import SILU, Activation
from tandem.spec.model_config import ModelConfig
from tandem.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.experts.handoff import Handoff
    from tandem.experts.hybrid_store import HybridStore

PROGRAM = ("tandem.bench.gaps.made_up",)
LOADER = "tandem.bench.gaps.made_up:load_engine"


def write_folder(folder: Path, config: str, layers: int | None) -> None:
    """Writes a named architecture's config.json and tokenizer into `folder`, for a server. Raises ConfigError."""
    vocab = named_config(config, layers).vocab
    (folder / "config.json").write_text(json.dumps(named_keys(config, layers)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    _vocabulary(vocab).save(str(folder / "tokenizer.json"))


def _vocabulary(size: int) -> tokenizers.Tokenizer:
    """ASCII, and numbers as words: every token is text of its own, so that readers get it at once. A byte of a longer
    character would wait for the others."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = decoders.ByteLevel()
    tokens = [each if "\ufffd" not in whole.decode([each]) else f"Ġ{i}" for i, each in enumerate(letters)]
    tokens += [f"Ġ{i}" for i in range(len(letters), size)]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = whole
    return tokenizer


class CopiedExperts(CpuExperts):
    """One expert is packed; the others are copies of its bytes."""

    def load(self, feed: LayerFeed, cache: KeptLayer | None = None) -> None:
        layer: Any = self._layer
        layer.load(0, *feed(0))
        packed = layer.packed(0)
        for expert in range(1, feed.count):
            layer.load_packed(expert, packed)


class CopiedStore:
    """Every layer's experts in CPU memory."""

    def __init__(self, ops: Ops, hidden: int) -> None:
        self._ops, self._hidden = ops, hidden

    def layer(
        self, index: int, count: int, width: int, fmt: str, activation: Activation = SILU
    ) -> CopiedExperts:
        return CopiedExperts(self._ops.experts(count, self._hidden, width, fmt, activation))


class MadeUpStart(Start):
    """Copies in place of a checkpoint's experts."""

    def cpu_store(self) -> ExpertStore:
        return CopiedStore(self.ops, self.model_config.expert_channels)

    def gpu_store(self, store: HybridStore, handoff: Handoff) -> ExpertStore:
        return SyntheticStore(store, handoff)


def load_engine(config: EngineConfig) -> LoadedEngine:
    """In the engine's process, instead of `engine_process.load_engine`."""
    watch_triton()
    parts = made_up_parts(config, lambda plan: print_plan(plan, config.notices()), embedded=FAR)
    model, engine = parts.model_config, Engine.from_parts(parts)
    take_cpus(parts)
    if not config.skip_server_warmup:
        warm_up(engine, model.vocab)
        warm_gpu(engine, parts)
    kernel_loads.ready()
    return LoadedEngine(engine, engine.plan, config.model, model.model_type, model.vocab)


def made_up_parts(
    config: EngineConfig,
    planned: Callable[[Plan], None] | None = None,
    dense: str = "bf16",
    start: Callable[..., MadeUpStart] = MadeUpStart,
    embedded: float = 1.0,
) -> EngineParts:
    """Engine parts of the folder `config.model`, with made-up weights. planned: called before anything is made.
    dense: what projections are stored as.
    embedded: as `SyntheticCheckpoint`; FAR: a prompt's tokens choose among all experts."""
    model = as_asked(config, load_model_config(Path(config.model)))
    stored = dense, experts_of(config.kt_method or "BF16")
    checkpoint = SyntheticCheckpoint(*stored, embedded)
    plan = resolve(config, model, this_machine(), stored_as(model, *stored))
    if planned is not None:
        planned(plan)
    return _parts(config, plan, model, checkpoint, start)


@for_loading()
def _parts(
    config: EngineConfig,
    plan: Plan,
    model: ModelConfig,
    checkpoint: Any,
    make: Callable[..., MadeUpStart],
) -> EngineParts:
    use_one_torch_thread()
    directory, workers = Path(config.model), planned_pool(plan)
    ops = CpuOps(workers, plan.tier, plan.int8_activations, deterministic=plan.deterministic)
    with PackedStart(config, directory, workers, None) as packed:  # which keeps nothing
        parts = config, plan, model, checkpoint, Tokenizer.load(directory), ops, packed, None
        start = make(*parts)
        return start.cpu_parts() if plan.gpu is None else start.gpu_parts()


if __name__ == "__main__":
    from tandem.server.launch import serve

    sys.exit(serve(EngineConfig.from_args(sys.argv[1:]), loader=LOADER))
