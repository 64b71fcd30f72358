"""A few layers of a model, with made-up weights, run by the engine: what `kt plan --verify` measures.

A model whose weights can be made up in the time is timed whole. Of others, two samples of different depth are; their
difference is what a layer takes. The deeper they are, the less of it is what starts and ends a step. The head is
counted by its bytes.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch

from tandem import models
from tandem.bench.ceilings import DramReader, last_level_cache_bytes
from tandem.bench.probes import MachineProbe, buffer_reader, read_beside
from tandem.bench.stored import FORMATS, stored_as
from tandem.bench.synthetic import FAR, SyntheticCheckpoint, SyntheticStore
from tandem.engine.engine import Engine
from tandem.engine.expert_statistics import expert_usage
from tandem.engine.protocol import GenerateRequest, SamplingSettings
from tandem.engine.start.loader import use_one_torch_thread
from tandem.engine.start.parts import EngineParts
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.workers import planned_pool
from tandem.mechanisms.cost import cost_of
from tandem.planner.choices.cached import cached_as
from tandem.planner.forecast.advice import PlanQuestion
from tandem.planner.forecast.machine_spec import MachineWish, wished_speeds
from tandem.planner.forecast.prediction import Prediction
from tandem.planner.forecast.report import ForecastSizes
from tandem.planner.plan import Plan
from tandem.planner.resolve import resolve
from tandem.spec.layers import Layer
from tandem.spec.model_config import STORED, ModelConfig

VOCAB = 4096  # a small head, which is counted apart
LEAST_DEPTH = 3  # periods of layers of the deeper sample, where the model has as many
SHALLOW_SHARE = 3  # the other has the third of them
LONGEST_PERIOD = 4  # layers after which they repeat
BUILD_BYTES = 18e9  # of all samples' weights: about ten seconds of copying
EXPERT_BYTES = 12e9  # of the experts of LEAST_DEPTH periods, at most
STEP_SECONDS = 6.0  # of the deeper sample's context and steps, about
WARM_STEPS, STEPS = 3, 16  # at least, and at most MOST_STEPS where they are short
MOST_STEPS, SHORT_SECONDS, LONG_SECONDS = 96, 0.5, 2.5
PROMPTS, MOST_PROMPTS = 2, 8  # likewise, after one that touches memory for the first time
PROMPT_SECONDS = 6.0  # of all prompts, about

_log = logging.getLogger(__name__)


Figures = Mapping[str, float]
"""Speeds of a machine, by their names in `Speeds`."""


class RunningSample(NamedTuple):
    """A sample's engine, and what reads the machine's speeds where its experts lie."""

    engine: Engine
    figures: Callable[[], Figures]


class NoText:
    """A tokenizer of numbers: nobody reads the answers."""

    eos_ids: tuple[int, ...] = ()
    bos_id = None
    chat_template = None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False


class Verified(NamedTuple):
    """rates: measured tokens per second, by the names of the prediction. question: with the machine's speeds of the
    same moments. asked: of a shorter prompt, where one of all its tokens would take too long."""

    rates: dict[str, float]
    question: PlanQuestion
    sizes: ForecastSizes


def verified(question: PlanQuestion, probe: MachineProbe, load: ForecastSizes) -> Verified:
    """Measures what is asked, of one sequence."""
    use_one_torch_thread()
    decode, prompt, tokens = _measured_rates(question, load.context, load.prompt, probe.add)
    speeds = wished_speeds(MachineWish(), question.machine, probe.speeds())
    rates = {"decoding, 1 sequence": decode, f"prompt of {tokens}": prompt}
    shorter = dataclasses.replace(load, prompt=tokens)
    return Verified(rates, dataclasses.replace(question, speeds=speeds), shorter)


def _measured_rates(
    question: PlanQuestion, context: int, prompt: int, heard: Callable[[Figures], None]
) -> tuple[float, float, int]:
    """Tokens per second of decoding and of a prompt, and its tokens. heard: called with the machine's speeds, several
    times in between."""
    plan = question.plan()
    predicted = question.predicted(plan, (1,))
    context = min(context, plan.context_length)
    layers, depths = len(question.model.layers), depths_of(question, plan, predicted, context)
    affordable = int(PROMPT_SECONDS * predicted.prompt.middle / (depths[-1] / layers) / 2 / (1 + PROMPTS))
    tokens, times = min(plan.context_length, prompt, max(16, affordable)), list[tuple[float, float]]()
    for depth in depths:
        times.append(_times(question, plan, depth, (context, tokens), heard))
        _free()
    decode, prefill = (whole_seconds(layers, depths, [time[i] for time in times]) for i in (0, 1))
    decode += _head_seconds(question, plan)
    return 1 / decode, tokens / prefill, tokens


def depths_of(question: PlanQuestion, plan: Plan, predicted: Prediction, context: int) -> list[int]:
    """Layers of both samples, or of one: all of them where the time allows that. What a sample takes of any memory is a
    part of what the plan's ledger says, so time alone bounds it: to make its weights, and to run its steps."""
    layers, period = len(question.model.layers), _period(question.model.layers)
    ledger = sum(entry.total_bytes for entry in plan.ledgers) / layers
    weights = max(1.0, min(ledger, _sample_bytes(question, plan)))  # of a layer
    steps = (WARM_STEPS + STEPS) / predicted.decode[1].middle + context / predicted.prompt.middle
    affordable = min(BUILD_BYTES / weights, layers * STEP_SECONDS / steps)
    if affordable >= layers or layers <= period:
        return [layers]
    deeper = max(LEAST_DEPTH, int(affordable * SHALLOW_SHARE / (SHALLOW_SHARE + 1) / period))
    deeper = min(layers // period, deeper)
    return [period * depth for depth in sorted({max(1, deeper // SHALLOW_SHARE), deeper})]


def _sample_bytes(question: PlanQuestion, plan: Plan) -> float:
    """Bytes of a layer of a sample."""
    model = question.model
    nbytes = model.expert_bytes(plan.expert_format, question.stored.experts)
    experts = _expert_count(model, nbytes, plan.gpu is not None) * nbytes * len(model.moe_layers)
    return (model.dense_bytes(plan.dtype, question.stored) + experts) / len(model.layers)


def whole_seconds(layers: int, depths: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds of all layers, from those of samples of so many."""
    deepest, longest = depths[-1], seconds[-1]
    each = longest / deepest
    if len(depths) > 1:  # a quarter of the mean at least: two times that are nearly equal say little
        each = max((longest - seconds[0]) / (deepest - depths[0]), each / 4)
    return longest + each * (layers - deepest)


def _head_seconds(question: PlanQuestion, plan: Plan) -> float:
    nbytes = 2 * question.model.vocab * question.model.hidden
    return nbytes / 1e9 / (question.speeds.dram_gbps if plan.gpu is None else question.speeds.gpu_gbps)


def _period(layers: Sequence[Layer]) -> int:
    """After so many layers they repeat, at the model's end."""
    periods = range(1, min(LONGEST_PERIOD, len(layers) // 2) + 1)
    return next((p for p in periods if layers[-p:] == layers[-2 * p : -p]), 1)


def _free() -> None:
    """Frees the memory that a sample took."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _times(
    question: PlanQuestion, plan: Plan, depth: int, tokens: tuple[int, int], heard: Callable[[Figures], None]
) -> tuple[float, float]:
    """Seconds of a decode step at a context of so many tokens, and of a prompt."""
    started, (context, prompt) = perf_counter(), tokens
    running = _running(question, plan, depth, max(context, prompt) + WARM_STEPS + MOST_STEPS + 16)
    engine, built = running.engine, perf_counter() - started
    heard(running.figures())  # captures a graph, before which PyTorch lets go of its free memory
    first = prompt_seconds(engine, prompt)  # takes memory
    prompts = repeated(lambda: prompt_seconds(engine, prompt), PROMPTS, MOST_PROMPTS, [first])
    prompt_seconds(engine, context, keep=True)
    heard(running.figures())
    for _ in range(WARM_STEPS):
        engine.step()
    steps = repeated(lambda: step_seconds(engine), STEPS, MOST_STEPS)
    heard(running.figures())
    engine.abort("")
    engine.step()
    _log.info("%d layers in %.1f s; prompts %s; steps %s", depth, built, _spread(prompts), _spread(steps))
    return statistics.median(steps), statistics.median(prompts)


def repeated(seconds: Callable[[], float], least: int, most: int, before: Sequence[float] = ()) -> list[float]:
    """Until they have taken SHORT_SECONDS together. before: what counts only if it took so long that no other is
    waited for."""
    times = [each for each in before if each > LONG_SECONDS]
    least = 1 if times else least
    while len(times) < least or (len(times) < most and sum(times) < SHORT_SECONDS):
        times.append(seconds())
    return times


def _spread(times: Sequence[float]) -> str:
    low, middle, high = min(times), statistics.median(times), max(times)
    return f"{middle * 1e3:.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}, {len(times)})"


def step_seconds(engine: Engine) -> float:
    started = perf_counter()
    engine.step()
    return perf_counter() - started


def prompt_seconds(engine: Engine, tokens: int, keep: bool = False) -> float:
    """Until the first token. keep: the sequence goes on."""
    ids = [(7919 * i + tokens) % VOCAB for i in range(tokens)]
    limit = None if keep else 1
    sampling = SamplingSettings(temperature=0.0, ignore_eos=True, max_tokens=limit)
    engine.add(GenerateRequest(id=f"{tokens}-{keep}", prompt_ids=ids, sampling=sampling))
    started = perf_counter()
    while not any(output.token_ids for output in engine.step()):
        pass
    return perf_counter() - started


def _running(question: PlanQuestion, plan: Plan, depth: int, tokens: int) -> RunningSample:
    model = _sample(question, plan, depth)
    return running_plan(question, _small_plan(question, plan, model, tokens), model)


def running_plan(question: PlanQuestion, small: Plan, model: ModelConfig) -> RunningSample:
    """An engine of this plan, with made-up weights as the question's are stored."""
    dense, experts = _dense_format(question), _experts_format(question, small)
    workers = planned_pool(small)
    ops, checkpoint = (
        CpuOps(workers, small.tier, small.int8_activations, deterministic=small.deterministic),
        cast(Any, SyntheticCheckpoint(dense, experts, FAR)),
    )
    text = cast(Any, NoText())
    if small.gpu is None:
        built = models.build(model, small, checkpoint, ops)
        reader = buffer_reader(question.machine, workers, small.tier)
        figures = partial(read_beside, workers, small.tier, reader, None)
        return RunningSample(Engine.from_parts(EngineParts(small, model, built, text, workers)), figures)
    from tandem.engine.start.gpu_side import (  # Triton is there only where a GPU is
        begin_step,
        expert_stream,
        gpu_side,
        registered,
    )

    side = gpu_side(small, model, ops)
    usage = expert_usage(question.config, small, model, side.ops.device, side.placement.gpu_experts)
    store = SyntheticStore(side.store, side.handoff)
    built = models.build(model, small, checkpoint, side.ops, None, store, usage=usage)
    copies = registered(small, side) if small.gpu.streams_experts else None
    stream = expert_stream(small, side, copies, usage=usage)
    parts = EngineParts(
        small, model, built, text, workers, usage, handoff=side.handoff, begin_step=begin_step(side, stream)
    )
    layers = side.handoff.layers
    experts_reader = DramReader.of(layers, workers, small.tier) if layers else None
    bus = None if stream is None else stream.deliveries.copied_gbps
    return RunningSample(Engine.from_parts(parts), partial(read_beside, workers, small.tier, experts_reader, bus))


def _small_plan(question: PlanQuestion, plan: Plan, model: ModelConfig, tokens: int) -> Plan:
    """Plan of a sample, for a sequence of so many tokens. Made-up weights draft nothing, and have no draft layer."""
    dense, experts = _dense_format(question), _experts_format(question, plan)
    share = 0.0 if plan.gpu is None else plan.gpu.sizes.experts / max(1, question.model.routed_experts)
    config = dataclasses.replace(
        question.config, kt_method=_method(question, plan), kt_weight_path=None, context_length=tokens,
        max_total_tokens=tokens + question.config.page_size, max_running_requests=1, kt_num_gpu_experts=None,
        kt_gpu_experts_ratio=share, packed_cache=None, map_experts="never", disable_radix_cache=True,
        kt_expert_placement_strategy="uniform", init_expert_location="trivial",
        kt_enable_dynamic_expert_update=False, disable_dynamic_expert_update=True, speculative_algorithm=None,
        device="cpu" if plan.gpu is None else "cuda",
    )  # fmt: skip
    small = resolve(config, model, question.machine, stored_as(model, dense, experts))
    return dataclasses.replace(small, max_step_tokens=plan.max_step_tokens)


def _sample(question: PlanQuestion, plan: Plan, depth: int) -> ModelConfig:
    """The last layers, with fewer experts: enough that no cache holds them."""
    model = cached_as(question.config, question.model)
    count = _expert_count(model, model.expert_bytes(plan.expert_format, question.stored.experts), plan.gpu is not None)
    layers = tuple(_smaller(layer, count) for layer in _cut(model.layers, depth))
    return dataclasses.replace(
        model, layers=layers, vocab=VOCAB, eos_ids=(), tied_embeddings=False, max_positions=1 << 20
    )


def _cut(layers: Sequence[Layer], depth: int) -> Iterator[Layer]:
    """The last ones. The first that would take another's choice of tokens makes its own, which others then take."""
    first, chooser = len(layers) - depth, None
    for number, layer in enumerate(layers[first:]):
        reader = next((block.body for block in layer.blocks if cost_of(block.body).reads_choice), None)
        if reader is not None:
            cost = cost_of(reader)
            chooser = number if cost.chosen_by is None or chooser is None else chooser
            own = cost.choosing_as(_unless(chooser, number))
            layer = Layer(tuple(
                dataclasses.replace(block, body=own) if block.body is reader else block for block in layer.blocks
            ))  # fmt: skip
        yield layer


def _unless(chooser: int, number: int) -> int | None:
    return None if chooser == number else chooser


def _expert_count(model: ModelConfig, nbytes: int, gpu: bool) -> int:
    """All, where a GPU may bring them and they fit: what the bus takes depends on how many there are."""
    most, experts = _experts_that_fit(model, nbytes), model.moe.experts.count
    least = experts if gpu else max(2 * model.moe.router.top_k, 2 * last_level_cache_bytes() // max(1, nbytes))
    return max(model.moe.router.top_k, min(experts, least, most))


def _experts_that_fit(model: ModelConfig, nbytes: int) -> int:
    layers = min(LEAST_DEPTH * _period(model.layers), len(model.layers))
    return int(EXPERT_BYTES / max(1, nbytes * layers))


def with_experts(model: ModelConfig, count: int) -> ModelConfig:
    """With so many experts in each layer, chosen without groups; without a draft layer."""
    layers = tuple(_smaller(layer, count) for layer in model.layers)
    return dataclasses.replace(model, layers=layers, drafts=None, drafter=None)


def _smaller(layer: Layer, count: int) -> Layer:
    moe = layer.moe
    blocks = (
        block if moe is None or block.body is not moe else dataclasses.replace(block, body=moe.with_experts(count))
        for block in layer.blocks
    )
    return Layer(tuple(blocks))


def _method(question: PlanQuestion, plan: Plan) -> str | None:
    """None: as they are stored; else the format that is made while loading and comes nearest in bytes."""
    if _experts_format(question, plan) != "bf16":
        return None
    if plan.expert_format != STORED:
        return {"bf16": "BF16", "f32": "BF16", "int8": "INT8", "int4": "INT4"}[plan.expert_format]
    each = question.stored.experts.bytes_per_weight
    return "BF16" if each > 1.5 else "INT8" if each > 0.8 else "INT4"


def _experts_format(question: PlanQuestion, plan: Plan) -> str:
    """Format of the sample's experts as stored, of FORMATS; "bf16" where they are made while loading, or are stored as
    nothing that can be made up."""
    stored = question.stored.experts.name if plan.expert_format == STORED else "bf16"
    return next((name for name in FORMATS if stored.split()[0] == name.split("-")[0]), "bf16")


def _dense_format(question: PlanQuestion) -> str:
    """Likewise, of dense matrices."""
    dense = question.stored.dense
    if not dense.quantised:
        return "bf16"
    return min(FORMATS, key=lambda name: abs(FORMATS[name].bytes_per_weight - dense.bytes_per_weight))
