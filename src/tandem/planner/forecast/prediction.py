"""How fast a plan will be: tokens per second of decoding and of prompts, as ranges, from a machine's speeds alone.

Decoding is bound by the bytes that a step reads; prompts by products, or by reading every expert once per chunk. What
the kernels reach of a machine's speeds are the constants here: they are the engine's, none is a model's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.mechanisms.cost import cost_of
from tandem.planner.cuda_graphs import prefill_graph_rows, split_sizes
from tandem.planner.forecast.attention import attention_flops
from tandem.planner.forecast.bound import distinct_experts, experts_seconds
from tandem.planner.forecast.speeds import Speeds
from tandem.planner.forecast.stream_rates import GRAPH_BASE, StreamRates
from tandem.planner.forecast.sums import gpu_lane, step_sums
from tandem.planner.plan import Plan
from tandem.planner.ranks.cut import cut
from tandem.planner.stages.speeds import border_seconds, pipelined_share, stage_speeds
from tandem.spec.gpu_scratch import CODES_PAIRS, WGMMA_LEAST_PAIRS, WGMMA_PAIRS
from tandem.spec.layers import Layer
from tandem.spec.model_config import STORED, ModelConfig, past_bytes
from tandem.spec.shard import RankShard
from tandem.spec.stored import StoredFormats

WIDTH = 1.4  # of a range: high ÷ low
WORTH = 1.15  # times as fast: for less nothing is advised or given up
CONTEXT, PROMPT = 1024, 2048  # tokens, where none are said

DRAM_SHARE = 0.92  # of the reading speed that the CPU's experts reach
FLOAT_CODES_DRAM_SHARE = 0.79  # likewise, of codes that are small floats: FP8, MXFP4, NVFP4
# Of the tier's peak, with many rows; the scalar tier's was never timed. The others: docs/lab/forecasts.md.
CPU_SHARE = {"scalar": 0.55, "avx2": 0.75, "avx512": 0.75, "avx512_bf16": 0.65, "amx": 0.42}
# Of the same peak, where attention's own speed was not measured. It is computed in float32; on AMX with AVX-512, whose
# figure is to be measured: it lies between 0.06 and 0.09. The others: docs/lab/forecasts.md.
CPU_ATTENTION_SHARE = {"scalar": 0.55, "avx2": 0.42, "avx512": 0.64, "avx512_bf16": 0.31, "amx": 0.075}
CPU_LAYER_SECONDS = 6e-5  # without a GPU: norms, router, attention's small parts
HANDOFF_LAYER_SECONDS = 2.1e-5  # beside one: from the GPU to the CPU's experts and back
GRAPH_KERNELS, EXPERT_KERNELS = 11, 3  # of a decode layer; of experts on the GPU beyond these
# Of a layer outside of graphs, in launches' time. It has 12 kernels of Triton's, each of which takes the host about as
# long as eight of PyTorch's, and some 20 of PyTorch's and cuBLAS's.
EAGER_KERNELS = 150
GPU_CHUNK_SECONDS = 2e-3  # of a prompt's chunk beyond its layers: inputs, the head, the first token
STEP_LAUNCHES = 45  # of a step beyond its kernels, in launches' time: inputs, the graph's start, tokens back, text
GPU_ROWS_GROWTH = 0.18  # of the GPU's dense step each time the batch doubles
GPU_CODE_SHARE, GPU_NUMBER_SHARE = 0.5, 0.8  # of GPU memory's speed, experts of codes and of numbers
GPU_PEAK_SHARE = 0.7  # of the GPU's measured peak, in prompts
# Of prompts on a GPU, counted kernel by kernel on an H100. Experts' weights are read at so much of the memory's speed.
# So much of their products' time is not hidden behind that. Rows between the products pass at so much of the memory's
# speed. A row of the residual is read or written so often in a layer, by so many kernels.
GROUPED_READ_SHARE, GROUPED_PRODUCTS = 0.9, 0.75
CODES_PRODUCTS, CODE_BYTES = 2.7, 1.2  # where codes are decoded for each tile of rows; bytes of a weight, at most
WGMMA_PRODUCTS = 1.7  # where whole warpgroups share them (an H200)
BETWEEN_SHARE, ROW_PASSES, PROMPT_KERNELS = 0.85, 48, 40
GPU_ATTENTION_SHARE = 0.7
SUMS = "sums of ranks"
"""The part of a step's time in which ranks meet."""


@dataclass(frozen=True, slots=True)
class Case:
    """Input of a prediction: a model as it is stored, the plan for it, and the machine's speeds."""

    model: ModelConfig
    stored: StoredFormats
    plan: Plan
    speeds: Speeds

    @classmethod
    def of_plan(cls, model: ModelConfig, stored: StoredFormats, plan: Plan, speeds: Speeds) -> Case:
        """model and speeds: of all ranks together. The case is one rank's: all take as long."""
        if plan.ranks == 1:
            return cls(model, stored, plan, stage_speeds(plan.gpu, speeds))
        return cls(cut(model, RankShard(0, plan.ranks)), stored, plan, speeds.of_rank(plan.ranks))

    def sums(self, rows: int, logits: int) -> dict[str, float]:
        """Seconds that ranks meet in a step, or that it takes from stage to stage; nothing: there are no others."""
        if borders := border_seconds(self.plan.gpu):
            return {"between stages": borders}
        if self.model.shard.ranks == 1:
            return {}
        lane = gpu_lane(self.plan.gpu, self.model.shard.ranks, self.speeds.pcie_gbps)
        return {SUMS: step_sums(lane, self.model, rows, logits)}

    @property
    def expert_bytes(self) -> int:
        return self.model.expert_bytes(self.plan.expert_format, self.stored.experts)

    @property
    def dense_bytes(self) -> int:
        """Read in every step: on a GPU without the embedding."""
        model, dtype = self.model, self.plan.dtype
        if self.plan.gpu is None:
            return model.dense_bytes(dtype, self.stored)
        return model.dense_bytes(dtype, self.stored, for_gpu=True)

    @property
    def dram_share(self) -> float:
        """Share of DRAM's reading speed that experts reach: their codes are decoded in the same time."""
        floats = self.plan.expert_format == STORED and "fp" in self.stored.experts.name
        return FLOAT_CODES_DRAM_SHARE if floats else DRAM_SHARE

    @property
    def gpu_share(self) -> float:
        """Share of the routed experts that is on the GPU."""
        everyone = self.model.routed_experts
        return 0.0 if self.plan.gpu is None or not everyone else self.plan.gpu.sizes.experts / everyone

    def state_bytes(self, batch: int, context: int) -> float:
        """That a step reads of so many sequences' past, or writes anew."""
        layout = self.model.state_layout(self.plan.dtype)
        slots = layout.slot_bytes + layout.rewritten_bytes
        return float(batch * (past_bytes(self.model, self.plan.dtype, context) + slots))


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens per second. bound: what the machine's memories allow at best. parts: seconds of a step or a prompt, by
    what takes them."""

    low: float
    high: float
    bound: float
    parts: Mapping[str, float]

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


@dataclass(frozen=True, slots=True)
class Prediction:
    """decode: by how many sequences are decoded together; context: tokens that each has; prompt: of so many tokens."""

    decode: Mapping[int, Range]
    prompt: Range
    context: int
    prompt_tokens: int


def predict(
    case: Case, batches: tuple[int, ...] = (1, 8), context: int = CONTEXT, prompt: int = PROMPT
) -> Prediction:
    """context and prompt are cut to what the plan allows."""
    most = case.plan.context_length
    context, prompt = min(context, most), min(prompt, most)
    batches = tuple(b for b in batches if b <= case.plan.max_running_requests) or (1,)
    decode = {batch: _decode(case, batch, context) for batch in batches}
    parts = _prompt_parts(case, prompt)
    bound = prompt / max(1e-12, _prompt_bound(case, prompt))
    return Prediction(decode, _range(prompt, parts, bound), context, prompt)


def _range(tokens: float, parts: Mapping[str, float], bound: float) -> Range:
    rate, half = tokens / sum(parts.values()), WIDTH**0.5
    return Range(rate / half, min(rate * half, bound), bound, parts)


def _decode(case: Case, batch: int, context: int) -> Range:
    decode = _cpu_decode if case.plan.gpu is None else _gpu_decode
    parts = decode(case, batch, context) | case.sums(batch, batch)
    return _range(batch, parts, batch / _decode_bound(case, batch, context))


def _decode_bound(case: Case, batch: int, context: int) -> float:
    """Seconds: all bytes at the memories' full speed, and nothing else."""
    cpu_reads, gpu_reads = _sides(case, batch)
    others, speeds = case.dense_bytes + case.state_bytes(batch, context), case.speeds
    gbps = speeds.dram_gbps if case.plan.gpu is None else speeds.gpu_gbps
    experts = experts_seconds(cpu_reads, gpu_reads, case.expert_bytes, speeds.dram_gbps, speeds.gpu_gbps)
    return others / gbps / 1e9 + experts


def _sides(case: Case, batch: int) -> tuple[float, float]:
    """Experts that a step uses in all layers: those in CPU memory, those on the GPU."""
    used = distinct_experts(case.model, batch) * len(case.model.moe_layers)
    return used * (1 - case.gpu_share), used * case.gpu_share


def _cpu_decode(case: Case, batch: int, context: int) -> dict[str, float]:
    cpu_reads, _ = _sides(case, batch)
    rate, model = case.speeds.dram_gbps * 1e9 * DRAM_SHARE, case.model
    return {
        "dense layers": case.dense_bytes / rate,
        "KV cache": case.state_bytes(batch, context) / rate,
        "experts": cpu_reads * case.expert_bytes / case.speeds.dram_gbps / 1e9 / case.dram_share,
        "between layers": len(model.layers) * CPU_LAYER_SECONDS,
    }


def _gpu_decode(case: Case, batch: int, context: int) -> dict[str, float]:
    cpu_reads, gpu_reads = _sides(case, batch)
    speeds, model, moe = case.speeds, case.model, len(case.model.moe_layers)
    doublings = (batch - 1).bit_length()
    dense = (
        case.dense_bytes / speeds.gpu_gbps / 1e9 + sum(map(_kernels, model.layers)) * speeds.kernel_seconds
    )
    gpu_seconds = gpu_reads * case.expert_bytes / speeds.gpu_gbps / 1e9 / _gpu_experts_share(case)
    gpu_seconds += moe * EXPERT_KERNELS * speeds.kernel_seconds if case.gpu_share else 0.0
    cpu_seconds = cpu_reads * case.expert_bytes / speeds.dram_gbps / 1e9 / case.dram_share
    cpu_seconds += moe * HANDOFF_LAYER_SECONDS if case.gpu_share < 1 and moe else 0.0
    side = "experts in CPU memory" if cpu_seconds > gpu_seconds else "experts on the GPU"
    return {
        "dense layers": dense * (1 + GPU_ROWS_GROWTH * doublings) + STEP_LAUNCHES * speeds.launch_seconds,
        "KV cache": case.state_bytes(batch, context) / speeds.gpu_gbps / 1e9,
        side: max(cpu_seconds, gpu_seconds),
    }


def _kernels(layer: Layer) -> int:
    """Kernels of a layer, for a decode step in a CUDA graph."""
    return GRAPH_KERNELS + _stream_kernels(layer) + (0 if layer.mixer is None else cost_of(layer.mixer).kernels)


def _eager_kernels(layer: Layer) -> int:
    return EAGER_KERNELS + _stream_kernels(layer) + (0 if layer.mixer is None else cost_of(layer.mixer).launches)


def _stream_kernels(layer: Layer) -> int:
    """Kernels that mix residual streams; half as many again predict the next layer's experts."""
    return sum(cost_of(block.hyper).kernels for block in layer.blocks if block.hyper is not None) * 3 // 2


def _gpu_experts_share(case: Case) -> float:
    plain = case.plan.expert_format == "bf16" or (
        case.plan.expert_format == STORED and not case.stored.experts.quantised
    )
    return GPU_NUMBER_SHARE if plain else GPU_CODE_SHARE


def _prompt_parts(case: Case, tokens: int) -> dict[str, float]:
    """Seconds of all chunks of a prompt, those of a step at a time."""
    parts: dict[str, float] = {}
    most = max(1, case.plan.max_step_tokens)
    for first in range(0, tokens, step := most * _pipelined(case)):
        rows = [min(most, tokens - start) for start in range(first, min(tokens, first + step), most)]
        chunks = [_chunk(case, count, first + i * most) | case.sums(count, 1) for i, count in enumerate(rows)]
        starts = len(rows) * sum(map(_eager_kernels, case.model.layers)) * case.speeds.launch_seconds
        share = pipelined_share([sum(chunk.values()) for chunk in chunks], case.plan.gpu, starts)
        for chunk in chunks:
            parts |= {what: parts.get(what, 0.0) + seconds * share for what, seconds in chunk.items()}
    return parts


def _pipelined(case: Case) -> int:
    """Chunks of a step of a prompt that is alone, at most."""
    return 1 if case.plan.gpu is None else case.plan.gpu.pipelined_chunks


def _chunk(case: Case, rows: int, before: int) -> dict[str, float]:
    model, speeds = case.model, case.speeds
    dense_flops = 2.0 * rows * (model.dense_params - model.vocab * model.hidden)
    attention = attention_flops(model, rows, before, per_head=case.plan.gpu is not None)
    on_cpu = _experts_on_cpu(case, rows)
    if case.plan.gpu is None:
        peak, rate = speeds.cpu_flops * _cpu_share(case), speeds.dram_gbps * 1e9 * DRAM_SHARE
        return {
            "dense layers": max(dense_flops / peak, case.dense_bytes / rate) + len(model.layers) * CPU_LAYER_SECONDS,
            "attention": attention / _cpu_attention_flops(case),
            "experts": on_cpu,
        }
    return _gpu_chunk(case, rows, attention, on_cpu)


def _gpu_chunk(case: Case, rows: int, attention_flops: float, on_cpu: float) -> dict[str, float]:
    """Whatever takes longest: the GPU, the host that starts its kernels, or experts that are in CPU memory. on_cpu:
    seconds that the CPU would take for those. A graph computes all of its rows, and the host starts nothing."""
    model, speeds, replayed = case.model, case.speeds, _replayed(case, rows)
    rows = replayed or rows
    streamed_share, ram_seconds = _ram_experts(case, rows, on_cpu)
    shared = 0.0 < streamed_share < 1.0 and _may_be_shared(case, rows)
    starts = 0.0 if replayed or shared else sum(map(_eager_kernels, model.layers)) * speeds.launch_seconds
    dense_flops = 2.0 * rows * (model.dense_params - model.vocab * model.hidden)
    passes = 2.0 * rows * model.hidden * ROW_PASSES / speeds.gpu_gbps / 1e9 + PROMPT_KERNELS * speeds.kernel_seconds
    others = {
        "dense layers": dense_flops / speeds.gpu_flops / GPU_PEAK_SHARE + len(model.layers) * passes,
        "attention": attention_flops / speeds.gpu_flops / GPU_ATTENTION_SHARE
        + sum(cost_of(mixer).prompt_seconds(rows, speeds.gpu_gbps) for mixer in model.mixers),
    }
    gpu_share = case.gpu_share + (1 - case.gpu_share) * streamed_share
    ways = [
        others | {"experts on the GPU": _gpu_experts(case, rows, gpu_share)},
        {"starting kernels": starts},
        {"experts over the bus": ram_seconds}
        if streamed_share == 1.0
        else others | {"experts in CPU memory": ram_seconds},
    ]
    longest = max(ways, key=lambda parts: sum(parts.values()))
    return longest | {"its start and end": GPU_CHUNK_SECONDS}


def _replayed(case: Case, rows: int) -> int:
    """Rows of the graph in which a chunk is replayed that nobody decodes beside: where no expert is elsewhere."""
    gpu = case.plan.gpu
    return 0 if gpu is None or case.gpu_share < 1.0 else prefill_graph_rows(gpu.sizes.prompt_sizes, rows)


def _ram_experts(case: Case, rows: int, on_cpu: float) -> tuple[float, float]:
    """Share of the experts in CPU memory that is streamed to the GPU, and seconds until all are computed."""
    plan, moe = case.plan, len(case.model.moe_layers)
    if case.gpu_share == 1.0 or not moe or plan.gpu is None:
        return 0.0, 0.0
    bus = (1 - case.gpu_share) * case.model.routed_experts * case.expert_bytes / case.speeds.pcie_gbps / 1e9
    rates = StreamRates(bus / moe, on_cpu / moe, 0.0, plan.gpu.stream_from)
    share = rates.share(rows, in_graphs=True) if _may_be_shared(case, rows) else 0.0
    if 0.0 < share < 1.0:
        return share, moe * (GRAPH_BASE + rates.seconds(rows, share, in_graphs=True))
    share = rates.share(rows) if plan.gpu.streams_experts else 0.0
    return share, moe * rates.seconds(rows, share)


def _may_be_shared(case: Case, rows: int) -> bool:
    """Whether such a chunk fits graphs of layers whose experts bus and CPU share."""
    gpu = case.plan.gpu
    if gpu is None or not gpu.streams_experts:
        return False
    return prefill_graph_rows(split_sizes(gpu.sizes.prompt_sizes), rows) > 0


def _gpu_experts(case: Case, rows: int, share: float) -> float:
    """Codes are decoded for each tile of few rows. With more they become bfloat16 in scratch, and products read that.
    Rows are brought together before, and added after."""
    model, speeds = case.model, case.speeds
    used = share * distinct_experts(model, rows) * len(model.moe_layers)
    flops = 2.0 * rows * model.moe.router.top_k * model.expert_params * len(model.moe_layers) * share
    bf16_bytes = 2.0 * model.expert_params * used
    between = rows * model.moe.router.top_k * share * len(model.moe_layers)
    between *= 4.0 * model.expert_channels + 6.0 * model.moe.experts.width
    pairs = rows * model.moe.router.top_k / model.moe.router.num_experts
    by_warpgroups = case.plan.gpu is not None and case.plan.gpu.has_wgmma and WGMMA_LEAST_PAIRS < pairs <= WGMMA_PAIRS
    if by_warpgroups or (pairs <= CODES_PAIRS and case.expert_bytes <= CODE_BYTES * model.expert_params):
        read = (used * case.expert_bytes + between / BETWEEN_SHARE) / 1e9
        products = WGMMA_PRODUCTS if by_warpgroups else CODES_PRODUCTS
        return read / speeds.gpu_gbps + flops / speeds.gpu_flops * products
    unpacked = (used * case.expert_bytes + bf16_bytes + bf16_bytes / GROUPED_READ_SHARE + between / BETWEEN_SHARE) / 1e9
    return unpacked / speeds.gpu_gbps + flops / speeds.gpu_flops * GROUPED_PRODUCTS


def _experts_on_cpu(case: Case, rows: int) -> float:
    """Seconds of a chunk's experts that are not on the GPU: each is read once, or its products take longer."""
    model, speeds, share = case.model, case.speeds, 1 - case.gpu_share
    moe = len(model.moe_layers)
    flops = 2.0 * rows * model.moe.router.top_k * model.expert_params * moe
    nbytes = distinct_experts(model, rows) * moe * case.expert_bytes
    reading = nbytes / speeds.dram_gbps / 1e9 / case.dram_share
    return share * max(reading, flops / speeds.cpu_flops / _cpu_share(case))


def _cpu_share(case: Case) -> float:
    return CPU_SHARE[case.plan.tier]


def _cpu_attention_flops(case: Case) -> float:
    return case.speeds.cpu_attention_flops or case.speeds.cpu_flops * CPU_ATTENTION_SHARE[case.plan.tier]


def _prompt_bound(case: Case, tokens: int) -> float:
    """Seconds at the machine's full speeds: the products of each side, at the same time."""
    model, speeds, share = case.model, case.speeds, case.gpu_share
    routed = 2.0 * tokens * model.moe.router.top_k * model.expert_params * len(model.moe_layers)
    dense = 2.0 * tokens * (model.dense_params - model.vocab * model.hidden)
    if case.plan.gpu is None:
        return (routed + dense) / speeds.cpu_flops
    computed = (1 - share) * routed / speeds.cpu_flops
    if case.plan.gpu.streams_experts and share < 1:  # the bus and the CPU at the same time
        brought = (1 - share) * model.routed_experts * case.expert_bytes / speeds.pcie_gbps / 1e9
        computed = 1 / (1 / computed + 1 / brought)
    pipelined = case.plan.gpu.pipelined_chunks > 1 and tokens > case.plan.max_step_tokens
    gpus = len(case.plan.gpu.stages) if pipelined else 1
    return max(computed, (dense + share * routed) / speeds.gpu_flops / gpus)
