"""Memories of constant size and convolutions on a GPU: recurrences of prompts in chunks and row by row, and errors.

    PYTHONPATH=src python benchmarks/folds.py --keep benchmarks/results

Shapes are of Nemotron-3-Nano, Granite-4.0-H-Small and Kimi-Linear, whose memory is corrected. An error is the root mean
square over float64's. The least time is that of the tokens' bytes, or of the products of a chunk in three parts, at an
H100's peaks. A row that decodes is timed in a graph of one call for each of so many layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.bench.rows import print_and_keep
from tandem.mechanisms.channel_delta.shape import ChannelDelta
from tandem.mechanisms.recurrence.gpu import folds
from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import Taps
from tandem.mechanisms.state_space.shape import StateSpace
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState
from tandem.spec.norm import Norm

Shape = StateSpace | ChannelDelta
SHAPES: dict[str, Shape] = {
    "nemotron-3-nano": StateSpace(64, 64, 8, 128, 4, Norm(1e-5)),
    "granite-4.0-h-small": StateSpace(128, 64, 1, 128, 4, Norm(1e-5)),
    "kimi-linear-48b": ChannelDelta(32, 128, 4, Norm(1e-5)),
}
ROWS, REPLAYS, LAYERS = (256, 512, 2048, 8192), 10, 24
EXACT_ROWS = 256
CHUNK, TF32_FLOPS, HBM_BYTES = 64, 495e12, 3.35e12  # the last two: a second, of an H100


def step_of(sequences: int, new: int, before: int) -> ForwardState:
    none = torch.zeros(sequences * new, dtype=torch.int64, device="cuda")
    count = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    lens = torch.full((sequences,), before + new, dtype=torch.int32, device="cuda")
    batch = ForwardBatch(none, none, none, count * new, lens, none[:1, None].int(), none[:1], count[1:])
    return ForwardState(batch, torch.empty(0))


def tokens_of(shape: Shape, rows: int) -> RecurrentTokens:
    return corrected_tokens(shape, rows) if isinstance(shape, ChannelDelta) else added_tokens(shape, rows)


def corrected_tokens(shape: ChannelDelta, rows: int) -> RecurrentTokens:
    sizes = rows, shape.heads, shape.dim
    asked, written, values = torch.randn(3, *sizes, device="cuda").unbind()
    rates = torch.logspace(-3, 0, shape.inner, device="cuda").view(sizes[1:])
    decay, beta = -torch.rand(sizes, device="cuda") * rates, torch.rand(sizes[:2], device="cuda")
    return RecurrentTokens(F.normalize(asked, dim=-1), F.normalize(written, dim=-1), values, decay, beta)


def added_tokens(shape: StateSpace, rows: int) -> RecurrentTokens:
    def made(*sizes: int) -> Tensor:
        return torch.randn(rows, *sizes, device="cuda")

    shared, heads = (shape.groups, shape.state), shape.heads
    rates = torch.logspace(-3, 0, heads, device="cuda")[:, None]
    decay = -torch.rand(rows, heads, 1, device="cuda") * rates
    asked, written = (made(*shared).bfloat16().float() for _ in range(2))
    return RecurrentTokens(asked, written, made(heads, shape.head_dim), decay)


def memory_of(tokens: RecurrentTokens) -> Tensor:
    (_, heads, width), keys = tokens.values.shape, tokens.queries.shape[2]
    return torch.zeros(2, heads, keys, width, device="cuda")


def least_ms(tokens: RecurrentTokens) -> float:
    """Lower bound by chunks: each row with the memory, with the other rows' keys and with what they add."""
    (rows, heads, width), keys = tokens.values.shape, tokens.queries.shape[2]
    nbytes = 4 * (sum(part.numel() for part in tokens if part is not None) + tokens.values.numel())
    corrects = tokens.beta is not None
    of_row = (3 if corrects else 2) * keys * width + CHUNK * (width + keys) * (2 if corrects else 1)
    return 1e3 * max(nbytes / HBM_BYTES, 3 * 2 * rows * heads * of_row / TF32_FLOPS)


def row_by_row(tokens: RecurrentTokens, step: ForwardState, memory: Tensor) -> Tensor:
    out = torch.empty_like(tokens.values)
    folds._row_by_row(tokens, step.batch, 1, memory, out)
    return out


WAYS: dict[str, Callable[[RecurrentTokens, ForwardState, Tensor], Tensor]] = {
    "row by row": row_by_row, "in chunks": GpuStateUpdates().folded,
}  # fmt: skip


def milliseconds(call: Callable[[], object]) -> float:
    """The median of some."""
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.median(times[2:])


def exact(tokens: RecurrentTokens) -> Tensor:
    asked, written, values, decay = (part.double() for part in tokens[:4])
    beta = None if tokens.beta is None else tokens.beta.double()[..., None]
    shared = values.shape[1] // asked.shape[1]
    asked, written = (part.repeat_interleave(shared, 1)[..., None] for part in (asked, written))
    memory, rows = torch.zeros_like(asked[0] * values[0][:, None]), []
    for t in range(len(values)):
        memory = memory * decay[t].exp()[..., None]
        added = values[t] if beta is None else (values[t] - (memory * written[t]).sum(1)) * beta[t]
        memory = memory + written[t] * added[:, None]
        rows.append((memory * asked[t]).sum(1))
    return torch.stack(rows)


def recurrences(name: str, shape: Shape) -> Iterator[dict[str, Any]]:
    few = tokens_of(shape, EXACT_ROWS)
    wanted = exact(few)
    for way, call in WAYS.items():
        found = call(few, step_of(1, EXACT_ROWS, 0), memory_of(few)).double()
        row = {"bench": "fold", "config": name, "way": way, "error": float((found - wanted).norm() / wanted.norm())}
        for rows in ROWS:
            tokens, step = tokens_of(shape, rows), step_of(1, rows, 0)
            memory = memory_of(tokens)
            took = milliseconds(lambda: call(tokens, step, memory))  # noqa: B023
            row |= {f"ms_{rows}": round(took, 4), f"share_{rows}": round(least_ms(tokens) / took, 3)}
        yield row


def convolutions(name: str, shape: StateSpace) -> Iterator[dict[str, Any]]:
    channels, made = shape.channels, GpuStateUpdates()
    taps = Taps(torch.randn(shape.taps + 1, channels, device="cuda"), biased=True)
    ring = torch.zeros(33, shape.taps, channels, device="cuda", dtype=torch.bfloat16)
    row: dict[str, Any] = {"bench": "convolution", "config": name}
    for rows in ROWS:
        new, step = torch.randn(rows, channels, device="cuda").bfloat16(), step_of(1, rows, 0)
        row[f"ms_{rows}"] = round(milliseconds(lambda: made.convolved(new, step, ring, taps)), 4)  # noqa: B023
    for sequences in (1, 32):
        new, step = torch.randn(sequences, channels, device="cuda").bfloat16(), step_of(sequences, 1, 100)
        made.convolved(new, step, ring, taps)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAYERS):
                made.convolved(new, step, ring, taps)
        row[f"us_decode_{sequences}"] = round(milliseconds(graph.replay) * 1e3 / LAYERS, 2)
    yield row


def measured() -> Iterator[dict[str, Any]]:
    for name, shape in SHAPES.items():
        if isinstance(shape, StateSpace):
            yield from convolutions(name, shape)
        yield from recurrences(name, shape)


if __name__ == "__main__":
    print_and_keep(measured, __doc__)
