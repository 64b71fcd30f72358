"""Sizes of CUDA graphs: the numbers of rows for which steps are captured."""

from __future__ import annotations

from tandem.flags.engine_config import EngineConfig
from tandem.mechanisms.cost import cost_of
from tandem.planner.choices.speculation import DRAFT_ALGORITHMS
from tandem.spec.gpu_scratch import MLP_BYTES, MOST_ROW_BYTES, pair_bytes
from tandem.spec.model_config import ModelConfig

GRAPH_FLAGS = ("disable_cuda_graph", "cuda_graph_bs", "cuda_graph_max_bs")
SMALL_GRAPH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DEFAULT_LARGEST_GRAPH = 256  # each graph keeps its logits; larger ones have to be asked for
MOST_DRAFT_ROWS = 128  # with drafts, if more sequences do not run together: longer steps gain little from them
FEW_ROWS = tuple(range(1, 9))  # a step with drafts may have any number of rows, and a copy costs as much as a draft
LEAST_FILLED = 0.5  # of a prompt's graph's rows: copies cost as much as others
PROMPT_SIZES = (128, 256, 512, 1024, 2048)  # longer chunks keep a GPU busy whatever the host does
PROMPT_SEQUENCES = 8  # of a chunk that is replayed, at most
GRAPH_BYTES, KERNEL_BYTES = 112_000, 2200  # of GPU memory that CUDA keeps of a graph, and of each kernel (an H100)
CHUNK_KERNELS, PART_KERNELS = 40, 8  # of a prompt's layer; and of each more part in which its experts are streamed
DRAFT_SIZES = (1, 2, 4, 8, 16, 32)
GRAPH_STEPS = ((64, 8), (128, 16), (1 << 30, 32))  # up to a size, beyond the small ones: steps between graphs


def captured_sizes(
    config: EngineConfig, model: ModelConfig, running: int, draft_tokens: int, step_tokens: int
) -> tuple[int, ...]:
    """As `graph_sizes`, of this model."""
    return () if model.foreign is not None else graph_sizes(config, running, draft_tokens, step_tokens)


def graph_sizes(config: EngineConfig, running: int, draft_tokens: int, step_tokens: int) -> tuple[int, ...]:
    """Rows, ascending: no more than sequences run together, or than they have with so many draft tokens of each.
    step_tokens: of the largest step; no graph has more rows, for which there would be no memory."""
    if config.disable_cuda_graph:
        return ()
    sizes = config.cuda_graph_bs
    largest = min(running, config.cuda_graph_max_bs or (running if sizes else DEFAULT_LARGEST_GRAPH))
    sizes = sizes or (*_sizes_to(largest), largest)
    if draft_tokens:
        few = tuple(size for size in sizes if size <= largest)
        largest = max(largest, min(largest * (1 + draft_tokens), MOST_DRAFT_ROWS, step_tokens))
        sizes = (*few, *FEW_ROWS, *_sizes_to(largest), largest)
    return tuple(sorted({size for size in sizes if size <= largest}))


def plain_graph_sizes(
    config: EngineConfig, model: ModelConfig, running: int, draft_tokens: int
) -> tuple[int, ...]:
    """Rows of graphs that are captured a second time where steps may draft: for steps without drafts that follow none.
    Only layers that fold tokens into a memory have faster kernels then. Their last bits are others."""
    has_plain_kernels = any(cost_of(mixer).has_plain_kernels for mixer in model.mixers)
    if not draft_tokens or not has_plain_kernels or config.enable_deterministic_inference:
        return ()
    return captured_sizes(config, model, running, 0, running)


def draft_sizes(sizes: tuple[int, ...], draft_tokens: int) -> tuple[int, ...]:
    """Sequences of the graphs that draft, ascending; sizes: of the graphs of steps, which compute the draft tokens."""
    most = max(sizes, default=0) // (1 + draft_tokens)
    return tuple(size for size in DRAFT_SIZES if size <= most)


def _sizes_to(largest: int) -> list[int]:
    """A batch between two sizes is filled up, so the steps between them grow with the sizes."""
    sizes = [size for size in SMALL_GRAPH_SIZES if size <= largest]
    for end, step in GRAPH_STEPS:
        sizes += range(sizes[-1] + step, min(end, largest) + 1, step)
    return sizes


def graph_reason(config: EngineConfig, model: ModelConfig, running: int) -> str:
    if model.foreign is not None:
        return "Transformers' modules may wait for the GPU in a step, which a graph cannot"
    if config.disable_cuda_graph:
        return "--disable-cuda-graph"
    if running > DEFAULT_LARGEST_GRAPH and not (config.cuda_graph_max_bs or config.cuda_graph_bs):
        return "decode steps are replayed whole; larger ones only with --cuda-graph-max-bs"
    largest = max((config.cuda_graph_max_bs or 0, *(config.cuda_graph_bs or ())))
    if largest > running:
        return f"decode steps are replayed whole; no more than {running} requests run together"
    return "decode steps are replayed whole"


def prompt_sizes(config: EngineConfig, model: ModelConfig, streamed: int = 0) -> tuple[int, ...]:
    """Rows of prompts' chunks that are captured where the GPU computes them alone. streamed: of a step in which experts
    are streamed. Only where lengths of sequences do not decide which kernels run."""
    plain = all(cost_of(mixer).prompt_graphs for mixer in model.mixers)
    drafts = config.speculative_algorithm in DRAFT_ALGORITHMS
    attention = config.attention_backend in ("auto", "triton")
    if config.enable_deterministic_inference:  # every row is a sequence of its own
        return ()
    if config.pipeline_parallel_size > 1:  # stages' prompts are computed kernel by kernel
        return ()
    if model.shard.ranks > 1:  # passes beside steps would sum in another order on each rank
        return ()
    if config.disable_cuda_graph or model.foreign is not None or not plain or drafts or not attention:
        return ()
    chunk, context = config.chunked_prefill_size or streamed or PROMPT_SIZES[-1], config.context_length
    most = min(context or model.max_positions, chunk if chunk > 0 else model.max_positions)
    return (min(streamed, most),) if streamed else tuple(size for size in PROMPT_SIZES if size <= most)


def split_sizes(prompts: tuple[int, ...]) -> tuple[int, ...]:
    """Rows of chunks whose experts CPU and bus share, where nobody decodes. They use the memory of other graphs of
    prompts, of so many rows."""
    return tuple(size for size in PROMPT_SIZES if size <= max(prompts, default=0))


def prefill_graph_rows(sizes: tuple[int, ...], rows: int) -> int:
    """Rows of the graph that a chunk of `rows` rows is replayed in; 0: it fits none. sizes: ascending."""
    size = next((size for size in sizes if size >= rows), 0)
    return size if rows >= LEAST_FILLED * size else 0


def prompt_graph_bytes(
    model: ModelConfig, sizes: tuple[int, ...], parts: int, reserved_sms: int = 0, row_bytes: int = MOST_ROW_BYTES
) -> int:
    """GPU bytes of prompt graphs and their buffers: rows between a chunk's kernels, and each size's logits. parts:
    graphs of a layer's experts, which are streamed, so there are those of `split_sizes`, too; 0: none is. reserved_sms:
    multiprocessors that prompts leave to steps. Prompts that run alone have graphs of their own then. row_bytes: of
    experts' rows at a time, as the GPU has room for (`expert_row_bytes`)."""
    if not sizes:
        return 0
    captured = [*sizes, *split_sizes(sizes)] if parts else [*sizes, *sizes] if reserved_sms else sizes
    layers, cuts = len(model.layers), len(model.moe_layers) * (parts + 1) if parts else 0
    kernels = layers * CHUNK_KERNELS + len(model.moe_layers) * max(0, parts - 1) * PART_KERNELS
    each = (layers + 1 + cuts) * GRAPH_BYTES + kernels * KERNEL_BYTES + PROMPT_SEQUENCES * model.vocab * 4
    return len(captured) * each + (2 if reserved_sms else 1) * _chunk_bytes(model, max(sizes), row_bytes)


def _chunk_bytes(model: ModelConfig, rows: int, row_bytes: int) -> int:
    """GPU bytes of rows between kernels, which all sizes and all layers share."""
    heads = max((cost_of(mixer).row_bytes for mixer in model.mixers), default=0)
    return fed_bytes(model, rows, row_bytes) + rows * (16 * model.hidden + heads)


def fed_bytes(model: ModelConfig, rows: int, row_bytes: int) -> int:
    """GPU bytes of a step's rows between the matrices of feed-forwards: experts and dense parts take turns."""
    top_k = model.moe.router.top_k + model.moe.fusible_shared
    experts = top_k * pair_bytes(model.expert_channels, model.moe.experts.width) if model.moe_layers else 0
    between = max((cost_of(body).between_bytes for body in model.bodies), default=0)
    return max(min(rows * experts, row_bytes), min(rows * between, MLP_BYTES))
