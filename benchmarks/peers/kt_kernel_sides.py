"""Both sides of `kt_kernel_turns.py`: made-up weights, kt-kernel's experts, Tandem's, and what both should give.

An expert e has the weights of set e % SETS: those of set 0 with their rows rolled by 128 * set. Each side keeps a copy
of its own for every expert, in its own layout. Nothing here starts threads before it is used, so that processes may be
forked after the import.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.bench.formats import NO_INTEGERS
from tandem.bench.kernels.experts import ExpertShape
from tandem.formats import codes as stored_codes
from tandem.formats import reference
from tandem.formats.codes import Weight, WeightCodes
from tandem.formats.gguf_blocks import GGUF_CODES
from tandem.kernels.cpu import PackedExperts, Workspace
from tandem.kernels.fit import as_packed
from tandem.kernels.workers import caller_on, machine_pool
from tandem.machine.machine import Machine

SETS, ROLL = 4, 128  # distinct experts; rows between two of them: whole blocks of fp8's scales
ROUTINGS, STEP = 16, 64  # routing r of T tokens: rows [STEP * r, STEP * r + T) of one table
CHECKED = 4  # rows whose errors are measured
SPREAD = 0.02  # of weights
PEER_STEP = 32  # kt-kernel's buffers have room for a multiple of so many rows


@dataclass(frozen=True)
class Kind:
    """A format. ours, group: how Tandem packs it (group 0: one scale per row); peer: kt-kernel's class. blocks: both
    sides take these blocks of GGUF, as bytes."""

    ours: str
    group: int
    peer: str
    bits: int
    peer_group: int = 0
    peer_int8: bool = False  # activations are rounded there
    stored: bool = False  # both sides take the same codes and scales
    blocks: str = ""

    @property
    def int8_here(self) -> bool:
        """Whether Tandem is measured with rounded activations, too."""
        return self.peer_int8 and self.ours not in NO_INTEGERS


KINDS = {
    "BF16": Kind("bf16", 0, "AMXBF16_MOE", 16),
    "INT4": Kind("int4", 256, "AMXInt4_MOE", 4, peer_int8=True),
    "INT8": Kind("int8", 0, "AMXInt8_MOE", 8, peer_int8=True),
    "FP8": Kind("fp8", 128, "AMXFP8_MOE", 8, peer_group=128, stored=True),
    "RAWINT4": Kind("int4", 32, "AMXInt4_KGroup_MOE", 4, peer_group=32, peer_int8=True, stored=True),
    "MXFP4": Kind("mxfp4", 32, "AMXFP4_KGroup_MOE", 4, peer_group=32, stored=True),
    "Q4_K": Kind("q4_k", 32, "MOE", 4, peer_group=32, peer_int8=True, stored=True, blocks="Q4_K"),
}
Call = Callable[[], object]
Matrices = tuple[Weight, Weight, Weight]  # gate, up [width, hidden]; down [hidden, width]


@dataclass(frozen=True)
class Work:
    """The input of both sides: x bf16 [T, hidden]; ids int64, weights float32 [rows of routings, top_k]."""

    shape: ExpertShape
    kind: Kind
    sets: tuple[Matrices, ...]
    x: Tensor
    ids: Tensor
    weights: Tensor
    layers: int

    def routing(self, tokens: int, number: int) -> tuple[Tensor, Tensor]:
        first = number % ROUTINGS * STEP
        return self.ids[first : first + tokens], self.weights[first : first + tokens]


def made_up(shape: ExpertShape, kind: Kind, tokens: int, working_set: int) -> Work:
    """Random weights, activations and routings, for steps of at most so many tokens; as many layers as have the bytes
    of the working set, so that weights come from memory and not from a cache."""
    torch.manual_seed(7)
    sizes = ((shape.width, shape.hidden),) * 2 + ((shape.hidden, shape.width),)
    gate, up, down = (_matrix(kind, *size) for size in sizes)
    sets = tuple((_rolled(gate, n), _rolled(up, n), _rolled(down, n)) for n in range(SETS))
    rows = tokens + STEP * (ROUTINGS - 1)
    ids = torch.rand(rows, shape.experts).topk(shape.top_k).indices.contiguous()
    weights = torch.rand(rows, shape.top_k) + 0.5
    layers = -(-working_set // (shape.experts * shape.weights_per_expert * kind.bits // 8))
    x = torch.randn(tokens, shape.hidden).bfloat16()
    return Work(shape, kind, sets, x, ids, weights / weights.sum(1, keepdim=True), layers)


def _matrix(kind: Kind, rows: int, depth: int) -> Weight:
    """Numbers to be rounded by each side, or codes; random ones, as making them of numbers takes seconds."""
    if kind.blocks:
        return _blocks(rows, depth)
    if not kind.stored:
        return (torch.randn(rows, depth) * SPREAD).bfloat16()
    if kind.ours == "fp8":
        scales = torch.rand(rows // 128, depth // 128) * SPREAD / 100 + SPREAD / 200
        codes = (torch.randn(rows, depth) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return stored_codes.fp8_blocks(codes, scales)
    nibbles = torch.randint(0, 256, (rows, depth // 2), dtype=torch.uint8)
    if kind.ours == "mxfp4":
        return stored_codes.mxfp4(nibbles, torch.randint(119, 122, (rows, depth // 32), dtype=torch.uint8))
    scales = ((torch.rand(rows, depth // 32) + 0.5) * SPREAD / 5).bfloat16()
    return WeightCodes(nibbles, scales, "int4", 32, depth)


def _blocks(rows: int, depth: int) -> Tensor:
    """Random blocks of Q4_K, uint8 [rows, bytes]; offsets such that weights are 0 on average."""
    blocks = torch.randint(0, 256, (rows, depth // 256, 144), dtype=torch.uint8)
    scale = (torch.rand(rows, depth // 256, 1) + 0.5) * SPREAD / 200
    blocks[..., :4] = torch.cat((scale, 7.5 * scale), 2).half().view(torch.uint8)
    return blocks.flatten(1)


def weight_of(matrix: Weight, kind: Kind) -> Weight:
    """As a checkpoint's reader gives it."""
    return GGUF_CODES[kind.blocks](matrix) if kind.blocks else matrix


def _rolled(weight: Weight, number: int) -> Weight:
    if isinstance(weight, Tensor):
        return weight.roll(ROLL * number, 0)
    scales = weight.scales.view(torch.uint8).roll(ROLL * number // weight.block_rows, 0)
    codes = weight.codes.roll(ROLL * number, 0)
    return dataclasses.replace(weight, codes=codes, scales=scales.view(weight.scales.dtype))


def expected(work: Work) -> dict[str, list[list[float]]]:
    """[CHECKED, hidden] in float64 of the weights as they are made up, and of those that each side rounds them to."""
    torch.set_num_threads(4)
    first, kind = work.sets[0], work.kind
    whole = [weight_of(each, kind) for each in first]
    exact = _product(work, [w if isinstance(w, Tensor) else reference.decoded(w) for w in whole])
    if kind.stored or kind.ours == "bf16":
        return {"exact": exact, "ours": exact, "peer": exact}
    numbers = [weight for weight in first if isinstance(weight, Tensor)]
    return {
        "exact": exact, "ours": _product(work, [as_packed(weight, kind.ours, kind.group) for weight in numbers]),
        "peer": _product(work, [_peer_rounded(weight, kind.bits) for weight in numbers]),
    }  # fmt: skip


def _peer_rounded(weight: Tensor, bits: int) -> Tensor:
    """As kt-kernel rounds numbers: a scale for each row; 4 bits are the upper ones of 8, rounded half away from 0."""
    numbers = weight.float()
    scale = numbers.abs().amax(1, keepdim=True) / (112 if bits == 4 else 127)
    codes = (numbers / scale).round()
    if bits == 4:
        codes = codes.sign() * ((codes.abs() + 8) / 16).floor() * 16
    return codes * scale


def _product(work: Work, matrices: list[Tensor]) -> list[list[float]]:
    gate, up = (matrix.double() for matrix in matrices[:2])
    x, ids, weights = work.x[:CHECKED].double(), work.ids[:CHECKED], work.weights[:CHECKED].double()
    hidden, down = F.silu(x @ gate.T) * (x @ up.T), matrices[2].double()
    out = torch.zeros_like(x)
    for number in range(SETS):
        shares = (weights * (ids % SETS == number)).sum(1)[: len(x)]
        out += shares[:, None] * (hidden.roll(ROLL * number, 1) @ down.T).roll(ROLL * number, 1)
    return [list(map(float, row)) for row in out]


class Ours:
    """Tandem's experts on `threads` workers; the calling thread has worker 0's CPU, as in the server."""

    def __init__(self, work: Work, machine: Machine, threads: int) -> None:
        pool = machine_pool(machine, threads)
        self._cpu = machine.pinned(machine.spread(threads, machine.nodes))[0]
        self._work, self._space, self.note = work, Workspace(pool, machine.tiers[-1]), machine.tiers[-1]
        first = self._empty(False)
        sets = [tuple(weight_of(each, work.kind) for each in matrices) for matrices in work.sets]
        first.load_all(0, [sets[e % SETS] for e in range(work.shape.experts)])
        exact = [first, *(self._copy(first, False) for _ in range(1, work.layers))]
        self._layers = {"exact": exact}
        if work.kind.int8_here:
            self._layers["int8"] = [self._copy(first, True) for _ in exact]

    def _empty(self, int8: bool) -> PackedExperts:
        shape, kind = self._work.shape, self._work.kind
        numbers = ("bf16", 32) if kind.stored else (kind.ours, kind.group)
        return PackedExperts(
            self._space, shape.experts, shape.hidden, shape.width, numbers[0], group=numbers[1],
            int8_activations=int8,
        )  # fmt: skip

    def _copy(self, other: PackedExperts, int8: bool) -> PackedExperts:
        layer = self._empty(int8)
        layer.load_from(other, range(self._work.shape.experts))
        return layer

    def caller(self) -> AbstractContextManager[None]:
        return caller_on(self._cpu)

    def calls(self, way: str, tokens: int, out: Tensor) -> list[Call]:
        x = self._work.x[:tokens]

        def call(layer: PackedExperts, ids: Tensor, weights: Tensor) -> Call:
            narrow = ids.int()
            return lambda: layer.forward(x, narrow, weights, out)

        each = [self._work.routing(tokens, number) for number in range(ROUTINGS)]
        return [call(layer, *routing) for routing in each for layer in self._layers[way]]


class Peer:
    """kt-kernel's experts: its C++ classes, driven as its own Python wrapper drives them."""

    def __init__(self, work: Work, folder: Path, variant: str, threads: int) -> None:
        self._ext = extension(folder, variant)
        config = self._ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        self._work, self._cpu, self.note = work, self._ext.CPUInfer(config), self._ext.__cpu_variant__
        self._order = torch.arange(work.shape.experts)
        self._room = -(-len(work.x) // PEER_STEP) * PEER_STEP
        self._kept: list[Any] = []  # addresses are all that it has of them
        self._layers = [self._loaded(number) for number in range(work.layers)]
        self._kept.clear()

    def _loaded(self, number: int) -> Any:
        shape = self._work.shape
        config = self._ext.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.width, 0)
        config.layer_idx, config.pool, config.max_len = number, self._cpu.backend_, self._room
        self._give(config)
        layer = getattr(self._ext.moe, self._work.kind.peer)(config)
        self._cpu.submit(layer.load_weights_task(self._order.data_ptr()))
        self._cpu.sync()
        return layer

    def _give(self, config: Any) -> None:
        """Addresses of the weights: one for all experts where it rounds numbers itself, else one of each."""
        kind, experts = self._work.kind, self._work.shape.experts
        for place, name in enumerate(("gate", "up", "down")):
            matrices = [matrices[place] for matrices in self._work.sets]
            if kind.stored and not kind.blocks:
                pairs = [peer_codes(matrix, kind) for matrix in matrices]
                self._kept.append(pairs)
                for part, suffix in enumerate(("projs", "scales")):
                    places = [pairs[e % SETS][part].data_ptr() for e in range(experts)]
                    setattr(config, f"{name}_{suffix}", [places])
            else:
                numbers = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
                self._kept.append(repeated := Repeated(numbers, experts))
                setattr(config, f"{name}_proj", repeated.address)
        if kind.blocks:
            self._take_blocks(config)
        elif kind.stored:
            quantised = self._ext.QuantConfig()
            quantised.bits, quantised.group_size, quantised.zero_point = kind.bits, kind.peer_group, False
            config.quant_config = quantised

    def _take_blocks(self, config: Any) -> None:
        """Settings of its wrapper for files of GGUF."""
        types = self._ext.kvcache.ggml_type
        config.gate_type = config.up_type = config.down_type = getattr(types, self._work.kind.blocks)
        config.hidden_type, config.m_block, config.group_min_len = types.BF16, 32, 10
        config.group_max_len = self._room

    def caller(self) -> AbstractContextManager[None]:
        return nullcontext()

    def calls(self, _way: str, tokens: int, out: Tensor) -> list[Call]:
        count = torch.tensor([tokens], dtype=torch.int32)
        top_k, submit, sync = self._work.shape.top_k, self._cpu.submit, self._cpu.sync
        self._kept.append((count, out))

        def call(layer: Any, ids: Tensor, weights: Tensor) -> Call:
            arrays = [each.data_ptr() for each in (ids, weights, self._work.x, out)]

            def run() -> None:
                submit(layer.forward_task(count.data_ptr(), top_k, *arrays, False))
                sync()

            return run

        each = [self._work.routing(tokens, number) for number in range(ROUTINGS)]
        return [call(layer, *routing) for routing in each for layer in self._layers]


def extension(folder: Path, variant: str) -> ModuleType:
    """kt-kernel's extension for a kind of CPU. It lies somewhere in `folder`, its libraries as in the wheel."""
    files = sorted(folder.rglob(f"_kt_kernel_ext_{variant}.*.so"))
    if not files:
        raise FileNotFoundError(f"{folder}: no _kt_kernel_ext_{variant}.*.so; unpack the wheel of kt-kernel there")
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", files[0])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer_codes(weight: Weight, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and scales in its own form: 4-bit integers from 0 on, scales of groups in bfloat16."""
    assert isinstance(weight, WeightCodes)
    if kind.ours == "fp8":
        return weight.codes, weight.scales.float().contiguous()
    codes = weight.codes ^ 0x88 if kind.ours == "int4" else weight.codes
    return codes, weight.scales.float().bfloat16().contiguous()


class Repeated:
    """Matrices one after another, over and over: `experts` of them from `address` on, in the memory of one each.

    Sizes are whole pages: the same file is mapped again and again."""

    def __init__(self, matrices: list[Tensor], experts: int) -> None:
        size = matrices[0].nbytes
        if size % mmap.PAGESIZE:
            raise ValueError(f"{size} bytes of a matrix are no whole pages")
        file = os.memfd_create("experts")
        os.ftruncate(file, size * len(matrices))
        with mmap.mmap(file, size * len(matrices)) as written:
            written[:] = b"".join(matrix.view(torch.uint8).numpy().tobytes() for matrix in matrices)
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.restype, number = ctypes.c_void_p, ctypes.c_size_t
        call.argtypes = [ctypes.c_void_p, number, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
        self.address = call(None, size * experts, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        shared = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        for expert in range(experts):
            place, start = self.address + expert * size, expert % len(matrices) * size
            if call(place, size, mmap.PROT_READ, shared, file, start) != place:
                raise OSError(ctypes.get_errno(), "mmap")
        os.close(file)
