"""`warm_kernels`: GPU kernels that prompts, large batches and sampling need are loaded before the engine is ready.

The driver loads a kernel's code at its first launch, and waits until the GPU is idle to do so. Libraries take another
kernel for another number of rows. So steps of many sizes run once. Layers of one kind use the same kernels, so one of
each kind is run; and the CPU computes no experts for them. Steps whose experts are streamed have kernels of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from tandem.engine.gpu_runner import GpuRunner
from tandem.engine.protocol import SamplingSettings
from tandem.engine.sampling.masks import RowMasks, bits_but
from tandem.engine.sequence import Chunk, Sequence, Status
from tandem.engine.start.parts import EngineParts
from tandem.engine.step.prefill import PausingModel
from tandem.kernels.kernel_loads import kernel_loads
from tandem.mechanisms.cost import cost_of
from tandem.models.batch import ForwardBatch
from tandem.models.staged import StagedModel, stage_of

MOST_SECONDS = 3.0  # of a start, for kernels that a cache has
STEP = 1.25  # between two numbers of rows
MOST_SAMPLED = 256
STREAMED_ROWS = 128, 1024  # each step takes as long as the bus needs for a layer, which can be half a second

_log = logging.getLogger(__name__)

_ROW = SamplingSettings(temperature=0.0)
_SAMPLINGS = (
    _ROW,
    SamplingSettings(),
    SamplingSettings(top_p=0.9, top_k=40),
    SamplingSettings(min_p=0.1, typical_p=0.9),
    SamplingSettings(top_k=1000, logprobs=5),
    SamplingSettings(temperature=0.0, logprobs=3),
    SamplingSettings(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={1: 1.0}),
)


class WarmStep(NamedTuple):
    """A step that loads kernels. streams: experts are streamed in it."""

    rows: int
    decodes: bool
    streams: bool = False


class SomeLayers:
    """A model cut to one layer of each kind."""

    def __init__(self, model: PausingModel, layers: Rows[int]) -> None:
        self._model, self._layers = model, layers

    def forward(self, batch: ForwardBatch, states: Rows[tuple[Tensor, ...]]) -> Tensor:
        """As `StepModel.forward`; what it returns means nothing."""
        p = self._model.begin(batch)
        for index in self._layers:
            self._model.layer(p, index, states)
        return self._model.logits(p, states)


def kinds_of_layers(model: Any, described: Rows[object]) -> list[int]:
    """The first layer of each kind on each GPU, and those whose choice of tokens it takes. described: layers'
    configurations."""
    first: dict[object, int] = {}
    for index, layer in enumerate(described):
        experts = getattr(getattr(model.layers[index], "moe", None), "experts", None)
        sides = [getattr(experts, side, None) is None for side in ("gpu", "cpu")]
        device = model.stages[stage_of(model.stages, index)].device if isinstance(model, StagedModel) else None
        first.setdefault((_kind(layer), *sides, device), index)
    sources = (_source(described[index]) for index in first.values())
    return sorted({*first.values(), *(each for each in sources if each is not None)})


def _source(layer: Any) -> int | None:
    """The layer whose choice of tokens this one takes; None: it takes none."""
    mixer = getattr(layer, "mixer", None)
    return None if mixer is None else cost_of(mixer).chosen_by


def _kind(layer: Any) -> object:
    """The same of layers that differ only in whose choice they take."""
    if _source(layer) is None:
        return layer
    mixer = layer.mixer
    bodies = [cost_of(mixer).choosing_as(0) if block.body is mixer else block.body for block in layer.blocks]
    return replace(layer, blocks=tuple(replace(b, body=body) for b, body in zip(layer.blocks, bodies, strict=True)))


def row_counts(most: int) -> list[int]:
    """From 1 to `most`, each about STEP times the one before, powers of two first."""
    spread, rows = {most}, 1.0
    while rows < most:
        spread.add(round(rows))
        rows *= STEP
    powers = [1 << bit for bit in range(most.bit_length())]
    return [*powers, *sorted(spread - set(powers))]


def warm_kernels(runner: GpuRunner, parts: EngineParts, seconds: float = MOST_SECONDS) -> None:
    """Ends after about so many seconds, besides those in compilers. What is missing then is loaded when it is needed,
    and counts as late."""
    plan = parts.plan
    most = min(plan.max_step_tokens, plan.context_length - 1)
    steps = warm_steps(most, plan.max_running_requests, parts.begin_step is not None)
    started, done = perf_counter() - kernel_loads.seconds, 0  # on a clock that compilers stop
    with warming(runner, parts) as streamed:
        for step in steps:
            if step.streams and not streamed:
                continue
            if perf_counter() - kernel_loads.seconds - started > seconds:
                break
            try:
                _run(runner, parts, step, streamed if step.streams else ())
                done += 1
            except Exception:
                runner.after_failure()
                _log.exception("a step of %d rows failed before the start", step.rows)
    took = perf_counter() - kernel_loads.seconds - started
    _log.info("ran steps of %d of %d sizes in %.1f s, besides compiling", done, len(steps), took)


def warm_steps(most: int, running: int, streams: bool) -> list[WarmStep]:
    """Prompts of 1 to `most` rows, batches of 1 to `running`, and prompts whose experts are streamed, in turn."""
    prompts = [WarmStep(rows, False) for rows in row_counts(most)]
    batches = [WarmStep(rows, True) for rows in row_counts(running)]
    longer = sorted({most, max(1, most - 1), *(min(rows, most) for rows in STREAMED_ROWS)}) if streams else []
    streaming = [WarmStep(rows, False, True) for rows in longer]
    return [step for group in zip_longest(prompts, batches, streaming) for step in group if step is not None]


@contextmanager
def warming(runner: GpuRunner, parts: EngineParts) -> Iterator[list[int]]:
    """Meanwhile its steps run through one layer of each kind, nobody counts them, and the CPU computes no experts.
    Yields the layers, as streams count them, whose experts can be streamed."""
    model, cut, handoff = parts.model, parts.model, parts.handoff
    assert handoff is not None
    streamed: list[int] = []
    if isinstance(model, PausingModel) and hasattr(model, "layers"):
        layers: Any = model.layers
        kinds = kinds_of_layers(model, parts.model_config.layers)
        cut, streamed = SomeLayers(model, kinds), streamed_layers([layers[index] for index in kinds])
    with runner.unseen(cut), handoff.computing_nothing():
        yield streamed


def streamed_layers(layers: Rows[Any]) -> list[int]:
    """Numbers among the layers with experts of those whose experts a stream can bring."""
    experts: list[Any] = [getattr(getattr(layer, "moe", None), "experts", None) for layer in layers]
    return [each.index for each in experts if getattr(each, "stream", None) is not None]


def _run(runner: GpuRunner, parts: EngineParts, step: WarmStep, streamed: Rows[int]) -> None:
    rows, decodes = step.rows, step.decodes
    lengths = [1] * rows if decodes else [rows]
    samplings = [_SAMPLINGS[i % len(_SAMPLINGS)] if decodes else _ROW for i in range(len(lengths))]
    chunks = [_chunk(parts, length, sampling) for length, sampling in zip(lengths, samplings, strict=True)]
    logits = runner.run_kernels(chunks, streamed)
    sequences = [chunk.sequence for chunk in chunks][:MOST_SAMPLED]
    some = bits_but((), parts.model_config.vocab)  # all tokens: rows of structured output have kernels of their own
    masks = [some if row % 2 else None for row in range(len(sequences))]
    mask_sets: tuple[RowMasks, ...] = ((), masks) if decodes else ((),)
    for each in mask_sets:
        logits.chosen(list(range(len(sequences))), sequences, (), each)
    for chunk in chunks:
        chunk.sequence.status = Status.FINISHED  # other ranks forget it


def _chunk(parts: EngineParts, length: int, sampling: SamplingSettings) -> Chunk:
    """A chunk of a sequence whose pages are all page 0, before anybody uses that."""
    size, middle = parts.plan.page_size, parts.model_config.vocab // 2
    sequence = Sequence(
        "warm-up", 0, [middle] * length, sampling, arrival=0, max_len=length + 1, page_size=size, seed=1
    )
    sequence.num_pages = sequence.window_end = -(-length // size)
    return Chunk(sequence, length, 1)
