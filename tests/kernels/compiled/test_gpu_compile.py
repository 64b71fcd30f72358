"""Every Triton kernel is compiled to machine code for real GPUs, which takes Triton and no GPU; nothing is launched.

And how often: a kernel that is compiled anew for other numbers of rows or sequences would stop everybody for a second
or more while serving. Rows marked `front_end` end where Triton's types and shapes are known, unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import product
from typing import Any, get_args

import pytest
import torch

from covering import one_of_each
from folded_steps import channel_state
from gpu import HAS_TRITON, INTERPRETED
from kernel_cases import GGUF_BLOCKS, coded, gguf_codes
from paged_batches import make_batch, random_tables
from scheduling import runs_full
from tandem import _core
from tandem.formats.codes import Weight
from tandem.formats.reference import stored
from tandem.kernels.cpu_ops import CpuOps
from tandem.kernels.joined import Sum
from tandem.kernels.ops import Addend, ExpertBiases, ExpertCounts, HeadNorms, RopeTables, Routing
from tandem.kernels.step_rows import step_rows
from tandem.mechanisms.channel_delta.torch import ChannelGates, ChannelWeights
from tandem.mechanisms.compressed_attention.shape import CompressedAttention, Compression, EntryIndex
from tandem.mechanisms.compressed_attention.torch import Projected
from tandem.mechanisms.compressed_attention.weights import CompressedWeights, CompressionWeights
from tandem.mechanisms.delta_net.shape import DeltaRule
from tandem.mechanisms.delta_net.torch import DeltaState, DeltaWeights, Product
from tandem.mechanisms.gated_streams.shape import GatedStreams
from tandem.mechanisms.gated_streams.torch import GatedWeights, ReturningRows, Shares
from tandem.mechanisms.latent.absorbed import LatentSizes, LatentWeights
from tandem.mechanisms.mean_index.shape import MeanIndex
from tandem.mechanisms.mean_index.torch import MeanWeights
from tandem.mechanisms.ngrams.shape import Ngram
from tandem.mechanisms.ngrams.torch import Hashes, NgramWeights
from tandem.mechanisms.recurrence.tokens import RecurrentTokens
from tandem.mechanisms.recurrence.torch import Taps
from tandem.mechanisms.router.shape import Router
from tandem.mechanisms.state_space.torch import SpaceInputs, SpaceWeights
from tandem.mechanisms.streams.shape import Hyper
from tandem.mechanisms.streams.torch import HyperWeights, RowNorm, StreamMix, StreamResult
from tandem.mechanisms.token_index.pooled import KeyPoolWeights as IndexPoolWeights
from tandem.mechanisms.token_index.pooled import PooledKeys
from tandem.mechanisms.token_index.shape import Index
from tandem.mechanisms.token_index.torch import IndexWeights
from tandem.models.batch import ForwardBatch
from tandem.models.passing import ForwardState
from tandem.spec.activation import Activation, ActivationKind
from tandem.spec.norm import Norm
from tandem.spec.rope import Rope as RopeShape
from tandem.spec.rope import still
from tandem.spec.stored import RowTable

if HAS_TRITON and not INTERPRETED:
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from tandem.kernels import which
    from tandem.kernels.gpu import attention_decode, attention_prefill, best
    from tandem.kernels.gpu import dependent_launch as overlap
    from tandem.kernels.gpu.linear import GpuLinear
    from tandem.kernels.gpu.ops import GpuOps
    from tandem.kernels.gpu.pinned import read_rows
    from tandem.kernels.gpu.prompts import products
    from tandem.kernels.gpu.prompts.order import keyed
    from tandem.mechanisms.channel_delta.gpu import GpuChannelStateUpdates
    from tandem.mechanisms.compressed_attention.gpu import attend as shared_attend
    from tandem.mechanisms.compressed_attention.gpu import prompt as shared_prompt
    from tandem.mechanisms.delta_net.gpu import prompt
    from tandem.mechanisms.latent.gpu import decode, prompt_kernels
    from tandem.mechanisms.recurrence.gpu.folds import GpuStateUpdates
    from tandem.mechanisms.state_space.gpu import GpuSpaceStateUpdates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_TRITON or INTERPRETED, reason="Triton is not installed, or it interprets kernels"
    ),
]
PAGE = 16


class Compiler:
    """Stands in for launching: compiles what a launch would, once per variant."""

    def __init__(self, capability: int, whole: bool) -> None:
        """whole: to machine code."""
        self.target, self.whole = GPUTarget("cuda", capability, 32), whole
        self.backend = make_backend(self.target)
        self.variants: dict[str, set[str]] = {}
        self.shared_bytes = 96 << 10  # that a kernel may take

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = create_function_from_signature(function.signature, function.params, self.backend)
        bound, specialization, given = binder(*args, **options)
        variants = self.variants.setdefault(function.fn.__name__, set())
        if (key := f"{specialization} {given}") in variants:
            return
        variants.add(key)
        parsed, signature, constants, attributes = function._pack_args(
            self.backend, options, bound, specialization, given
        )
        kind = GluonASTSource if function.is_gluon() else ASTSource
        source = kind(function, signature, constants, attributes)
        if not self.whole:
            self._checked(source, parsed)
            return
        made = triton.compile(source, target=self.target, options=parsed.__dict__)
        assert len(made.asm["cubin"]) > 0
        assert made.metadata.shared <= self.shared_bytes, function.fn.__name__

    def _checked(self, source: Any, options: Any) -> None:
        """What `triton.compile` begins with. As it does, this remembers what it has seen."""
        key = f"{triton.__version__} {source.hash()} {self.backend.hash()} {options.hash()}"
        seen = get_cache_manager(sha256(key.encode()).hexdigest())
        if seen.has_file("front_end"):
            return
        context = ir.context()
        ir.load_dialects(context)
        self.backend.load_dialects(context)
        generators = self.backend.get_codegen_implementation(options)
        source.make_ir(self.target, options, generators, self.backend.get_module_map(), context)
        seen.put("", "front_end", binary=False)


def is_whole(request: pytest.FixtureRequest) -> bool:
    return runs_full(request.config) or request.node.get_closest_marker("front_end") is None


def compiled_by(
    fixture: str, cards: Iterable[int], name: str, values: Iterable[Any], others: Iterable[int] = ()
) -> Any:
    """Every value on every card: to machine code each value, and for each card but `others`."""
    rows = one_of_each(cards, values, mark=pytest.mark.front_end)
    rows += [pytest.param(*row, marks=pytest.mark.front_end) for row in product(others, values)]
    return pytest.mark.parametrize((fixture, name), rows, indirect=[fixture])


SM80 = pytest.param(80, id="sm80", marks=pytest.mark.front_end)


@pytest.fixture(params=[80, 90], ids=["sm80", "sm90"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(request.param, is_whole(request))

    def launch(function: Any, *args: Any, **options: Any) -> None:
        made.run(function, *args, **options)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(overlap, "can_overlap", lambda _: request.param >= 90)
    return made


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(torch.device("cpu"), CpuOps(_core.WorkerPool([-1]), "scalar"))


def test_rows_of_a_table_in_cpu_memory_are_read(compiler: Compiler) -> None:
    """By one variant, whatever rows there are: the number of words is no constant."""
    for rows, width in ((1, 64), (5, 7168), (16, 2880)):
        ids = torch.zeros(rows, dtype=torch.int64)
        assert read_rows(torch.zeros(9, width, dtype=torch.bfloat16), ids).shape == (rows, width)
    assert len(compiler.variants["_read_rows"]) == 1


@pytest.mark.parametrize("compiler", [SM80, 90], indirect=True)
def test_attention_is_compiled_once_for_all_mixtures_of_rows(compiler: Compiler, ops: GpuOps) -> None:
    steps = [
        ([(0, 5)], 0), ([(99, 100)], 0), ([(40, 41), (0, 30)], 1), ([(7, 8)] * 17 + [(0, 3)] * 16, 17),
        ([(0, 130), (5, 6)], 0), ([(9, 10)] * 3, 3), ([(60, 61), (0, 1), (0, 16), (300, 316)], 2),
    ]  # fmt: skip
    for spans, single in steps:
        tables, pages = random_tables(len(spans), max(end for _, end in spans))
        k, v = torch.zeros(2, pages, PAGE, 4, 128, dtype=torch.bfloat16).unbind()
        batch = replace(make_batch(spans, tables), single_rows=single)
        q = torch.zeros(len(batch.positions), 32, 128, dtype=torch.bfloat16)
        ops.attention(q, k, v, batch, 0.1, 0)
        ops.attention(q, k, v, batch, 0.1, 64)
        ops.attention(q, k, v, batch, 0.1, 64, torch.zeros(q.shape[1]))
    counts = {name: len(variants) for name, variants in compiler.variants.items()}
    # decoding: few rows, and many; without sinks, and with them
    assert counts == {"_decode": 2, "_prefill": 2, "_merge": 2}


def test_the_best_logit_is_compiled_once_for_any_number_of_rows(compiler: Compiler) -> None:
    for rows in (1, 3, 16, 300):
        best.best_of(torch.zeros(rows, 151936))
        best.best_of(torch.zeros(rows, 151936), torch.zeros(rows + 1, dtype=torch.int64))
    assert {name: len(variants) for name, variants in compiler.variants.items()} == {
        "_until_made": 1,
        "_of_part": 2,  # with masks and without
        "_of_row": 1,
    }


def heads_by_card() -> list[Any]:
    """Of consumer GPUs, A100 and H100. The widest heads to machine code, and all where there is the least memory."""
    cards, heads = [(80, 99), (80, 163), (90, 227)], [(64, 64), (128, 128), (256, 256), (192, 128)]
    return [
        pytest.param(
            arch, kilobytes << 10, *widths,
            marks=() if kilobytes == 99 or widths == (256, 256) else pytest.mark.front_end,
        )
        for (arch, kilobytes), widths in product(cards, heads)
    ]  # fmt: skip


@pytest.mark.parametrize(("compiler", "shared", "dim", "value"), heads_by_card(), indirect=["compiler"])
def test_attention_fits_the_shared_memory(
    compiler: Compiler, ops: GpuOps, monkeypatch: pytest.MonkeyPatch, shared: int, dim: int, value: int
) -> None:
    compiler.shared_bytes = shared
    for module in (attention_decode, attention_prefill):
        monkeypatch.setattr(module, "shared_bytes", lambda device: shared)
    tables, pages = random_tables(2, 30)
    k, v = (torch.zeros(pages, PAGE, 4, channels, dtype=torch.bfloat16) for channels in (dim, value))
    batch = replace(make_batch([(20, 21), (0, 30)], tables), single_rows=1)
    ops.attention(torch.zeros(31, 32, dim, dtype=torch.bfloat16), k, v, batch, 0.1)
    assert set(compiler.variants) == {"_decode", "_merge", "_prefill"}


def test_streams_that_mix(compiler: Compiler, ops: GpuOps) -> None:
    shape, hidden = Hyper(4, 20, 1e-6, 1e-6), 4096
    weights = HyperWeights(ops.linear(torch.zeros(32, 4 * hidden), fmt="f32"), torch.zeros(32), torch.zeros(32))
    for rows in (1, 5, 40):
        leaving = StreamResult(
            torch.zeros(rows, hidden).bfloat16(), StreamMix(torch.zeros(rows, 4), torch.zeros(rows, 4, 4))
        )
        norm = RowNorm(torch.zeros(hidden).bfloat16(), 1e-6, ops.rms_norm)
        streams = torch.zeros(rows, 4, hidden).bfloat16()
        ops.bound(shape, weights, hidden).advanced(streams, leaving, norm)
    assert set(compiler.variants) == {"_join", "_weigh"}


def test_a_norm_inside_a_product(compiler: Compiler) -> None:
    row, gate = torch.zeros(1, 2048).bfloat16(), torch.zeros(1, 513).bfloat16()[:, 512:]
    matrix = GpuLinear(torch.zeros(513, 2048), None, "bf16", torch.device("cpu"))
    for beside in (None, Addend(row, None), Addend(row, gate)):
        assert matrix.after_norm(Sum(row, row, torch.zeros(2048), 1e-6, beside)) is not None
    assert {name: len(variants) for name, variants in compiler.variants.items()} == {"_after_norm": 3}


EXPERTS = [
    "bf16", "int8", "int4", "fp8", "mxfp4", "nvfp4", "int4_zeros", "q2_k", "q3_k", "q4_k", "q5_1", "q6_k", "iq2_xxs",
    "iq2_xs", "iq2_s", "iq3_xxs", "iq1_m", "iq3_s",
]  # fmt: skip


def square(fmt: str) -> Weight:
    weight = torch.randn(256, 256)
    if fmt in ("bf16", "int8", "int4"):
        return weight
    return gguf_codes(fmt, 256, 256) if fmt in GGUF_BLOCKS else stored(weight, fmt)


def experts_by_format(first: int, older: list[str]) -> Any:
    """Every second format to machine code, one of them on the older card, too."""
    rows = [(80, fmt, fmt == older[first]) for fmt in older]
    rows += [(90, fmt, i % 2 == first) for i, fmt in enumerate(EXPERTS)]
    return pytest.mark.parametrize(("compiler", "fmt"), [
        pytest.param(arch, fmt, id=f"sm{arch}-{fmt}", marks=() if whole else pytest.mark.front_end)
        for arch, fmt, whole in rows
    ], indirect=["compiler"])  # fmt: skip


@experts_by_format(0, ["bf16", "int4"])
def test_experts(compiler: Compiler, ops: GpuOps, fmt: str) -> None:
    layer = ops.gpu_experts(torch.arange(2), 256, 256, fmt if fmt in ("int8", "int4") else "bf16")
    for expert in range(2):
        layer.load(expert, square(fmt), square(fmt), square(fmt))
    for tokens in (1, 2, 15, 17, 64, 100):
        ids = torch.zeros(tokens, 2, dtype=torch.int32)
        partial = layer.partial(torch.zeros(tokens, 256).bfloat16(), Routing(ids, torch.ones(tokens, 2), ids))
        partial.combined(torch.zeros(tokens, 256))
    counts = {name: len(variants) for name, variants in compiler.variants.items()}
    # few rows and tiles have kernels of the same names
    assert counts == {"_gate_up": 2, "_down": 2, "_combine": 1}


@compiled_by("compiler", (80, 90), "kind", [kind for kind in get_args(ActivationKind) if kind != "silu"])
def test_experts_of_other_shapes(compiler: Compiler, ops: GpuOps, kind: ActivationKind) -> None:
    """Every activation, with biases; a dense MLP, too."""
    how = Activation(kind, 1.702, 7.0)
    rows = 128 if how.gated else 64
    layer, mlp = ops.gpu_experts(torch.arange(2), 256, 128, "bf16", how), ops.mlp(256, 128, "bf16", how)
    matrices = torch.randn(rows, 256), torch.randn(rows, 256), torch.randn(256, 128)
    layer.load_all(0, [matrices] * 2)
    layer.set_biases(ExpertBiases(torch.zeros(2, rows), torch.zeros(2, rows), torch.zeros(2, 256)))
    mlp.load(*matrices)
    for tokens in (1, 64):
        ids = torch.zeros(tokens, 2, dtype=torch.int32)
        layer.partial(
            torch.zeros(tokens, 256).bfloat16(), Routing(ids, torch.ones(tokens, 2), ids)
        ).combined()
        mlp(torch.zeros(tokens, 256).bfloat16())
    between = "_activate" if how.gated else "_activate_all"
    assert set(compiler.variants) >= {"_gate_up", "_down", "_combine", between}


@experts_by_format(1, EXPERTS)
def test_experts_of_many_rows(
    compiler: Compiler, ops: GpuOps, monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    """Once for all numbers of rows, parts and pieces; only the first part's results are written, not added."""
    servers = compiler.target.arch // 10 in products.PYTORCHS
    monkeypatch.setattr(which, "MANY_PAIRS", 0)
    monkeypatch.setattr(products, "_row_bytes", lambda device: 1 << 21)
    monkeypatch.setattr(products, "has_pytorchs", lambda device: servers)
    monkeypatch.setattr(products, "grouped_product", lambda a, b, offs: a.new_empty(len(a), b.shape[2]))
    layer = ops.gpu_experts(torch.arange(21), 256, 256, fmt if fmt in ("int8", "int4") else "bf16")
    for expert in range(21):
        layer.load(expert, square(fmt), square(fmt), square(fmt))
    assert layer.prompts is not None
    for tokens, at_once in ((128, 1), (129, 16), (700, 5), (2048, 21)):
        layer.prompts.at_once, layer.prompts._scratch = at_once, None
        slots = keyed(*(torch.zeros(tokens, 3, dtype=torch.int32) for _ in range(2)), layer.table)
        layer.partial(torch.zeros(tokens, 256).bfloat16(), Routing(slots, torch.ones(tokens, 3), slots))
    names = ("_keyed", "_rank", "_edges", "_gather", "_between")
    # gate and up, and down
    expected = dict.fromkeys(names, 1) | {"_add": 2, "_unpack": 2} | ({} if servers else {"_grouped": 1})
    assert {name: len(variants) for name, variants in compiler.variants.items()} == expected


@compiled_by("compiler", (90,), "fmt", ["int8", "int4", "fp8", "mxfp4", "nvfp4"], others=(80,))
def test_dense_codes(compiler: Compiler, ops: GpuOps, fmt: str) -> None:
    """A row, few rows; and unpacking for more."""
    linear = ops.linear(coded(256, 512, fmt), torch.randn(256))
    for rows in (1, 2, 15, 16, 17, 300):
        linear(torch.zeros(rows, 512).bfloat16())
    counts = {name: len(variants) for name, variants in compiler.variants.items()}
    assert counts == {"_row": 1, "_tile": 1, "_unpack": 1}


def test_the_small_kernels(compiler: Compiler, ops: GpuOps) -> None:
    tables, pages = random_tables(2, 50)
    pools = torch.zeros(2, pages, PAGE, 4, 128, dtype=torch.bfloat16).unbind()
    mlp, router = ops.mlp(256, 128), Router(64, 8)
    mlp.load(torch.randn(128, 256), torch.randn(128, 256), torch.randn(256, 128))
    angles, norm = torch.rand(50, 64), torch.ones(128).bfloat16()
    for rows in (1, 3, 48):
        x, gates = torch.zeros(rows, 256).bfloat16(), torch.zeros(rows, 512).bfloat16()
        ops.gated(x, gates[:, :1], x.clone())
        ops.gated(x, None, x.clone())
        ops.gated(x, gates.unflatten(1, (4, 2, 64))[:, :, 1])
        ops.gated(x, gates[:, :4, None])
        ops.rms_norm(x, torch.ones(256).bfloat16(), 1e-6)
        ops.add_rms_norm(x, x.clone(), torch.ones(256).bfloat16(), 1e-6)
        mlp(x)
        tally = ExpertCounts(*torch.zeros(2, 64, dtype=torch.int32), rows=torch.ones(1, dtype=torch.int32))
        ops.bound(router)(torch.zeros(rows, 64), None, 1, tally)
        ops.rope_store(
            torch.zeros(rows, 40 * 128).bfloat16(), RopeTables(angles.cos(), angles.sin()),
            make_batch([(0, rows)], tables),
            *pools, 32, HeadNorms(norm, norm),
        )  # fmt: skip
    counts = {name: len(variants) for name, variants in compiler.variants.items()}
    assert counts == {
        "_rms_norm": 2,
        "_activate": 1,
        "_route": 1,
        "_rope_store": 1,
        "_one_row": 2,
        "_gated": 4,
    }


CARDS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB of shared memory that a program may have


HOPPER, LEAST = 90, 86  # LEAST: of shared memory


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Compiles for a card, as if it were there."""
    made = Compiler(request.param, is_whole(request))
    made.shared_bytes = CARDS[request.param] << 10

    def launch(function: Any, *args: Any, **options: Any) -> None:
        made.run(function, *args, **options)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(overlap, "can_overlap", lambda _: request.param >= 90)
    monkeypatch.setattr(decode, "has_tensor_memory", lambda device: request.param == 100)
    if request.param == 90:
        from tandem.mechanisms.latent.gpu.decode_hopper import decode_hopper

        monkeypatch.setattr(decode, "_hopper_kernel", lambda device: decode_hopper)
    for module in (decode, prompt_kernels, prompt, shared_attend, shared_prompt):
        monkeypatch.setattr(module, "shared_bytes", lambda device: made.shared_bytes)
    return made


@compiled_by("card", CARDS, "fmt", ["bf16", "fp8"])
def test_attention_and_experts(
    card: Compiler, ops: GpuOps, monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    """Few rows, tiles and unpacked experts, whose products PyTorch computes on servers; attention before them."""
    servers = card.target.arch // 10 in products.PYTORCHS
    for module in (attention_decode, attention_prefill):
        monkeypatch.setattr(module, "shared_bytes", lambda device: card.shared_bytes)
    monkeypatch.setattr(which, "MANY_PAIRS", 0)
    monkeypatch.setattr(products, "has_pytorchs", lambda device: servers)
    monkeypatch.setattr(products, "grouped_product", lambda a, b, offs: a.new_empty(len(a), b.shape[2]))
    layer = ops.gpu_experts(torch.arange(2), 256, 128, "bf16")
    matrices = [torch.randn(128, 256), torch.randn(128, 256), torch.randn(256, 128)]
    layer.load_all(0, [[stored(m, fmt) if fmt == "fp8" else m for m in matrices]] * 2)
    for tokens in (1, 64, 2048):
        slots = torch.zeros(tokens, 2, dtype=torch.int32)
        layer.partial(
            torch.zeros(tokens, 256).bfloat16(), Routing(slots, torch.ones(tokens, 2), slots)
        ).combined()
    tables, pages = random_tables(2, 30)
    k, v = torch.zeros(2, pages, PAGE, 4, 128, dtype=torch.bfloat16).unbind()
    batch = replace(make_batch([(20, 21), (0, 30)], tables), single_rows=1)
    ops.attention(torch.zeros(31, 32, 128, dtype=torch.bfloat16), k, v, batch, 0.1)
    made = {"_gate_up", "_down", "_combine", "_unpack", "_add", "_decode", "_prefill", "_merge"}
    assert set(card.variants) >= made | (set() if servers else {"_grouped"})


@compiled_by("card", (LEAST, HOPPER, 100), "heads", [16, 128], others=(80, 89, 120))
def test_latent_attention(card: Compiler, ops: GpuOps, heads: int) -> None:
    """Rows that decode, chunks of few rows and of many: each kernel once, whatever the numbers of rows."""
    sizes = LatentSizes(heads, 128, 64, 512, 128)
    angles, up = torch.rand(5000, 32), torch.zeros(heads, 128, 512).bfloat16()
    weights = LatentWeights(
        up.transpose(1, 2), up, torch.ones(512).bfloat16(), 1e-6, RopeTables(angles, angles), 0.1
    )
    layer = ops.bound(sizes, weights)
    for spans, single in [
        ([(99, 100)], 0), ([(40, 41)] * 3, 3), ([(9, 10)] * 17 + [(0, 30)], 17), ([(20, 21), (600, 671)], 1),
        ([(0, 65)], 0), ([(1024, 1240)], 0),
    ]:  # fmt: skip
        tables, pages = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), single_rows=single)
        rows = len(batch.positions)
        latents = torch.zeros(pages, PAGE, 1, sizes.width, dtype=torch.bfloat16)
        layer(torch.zeros(rows, heads * 192).bfloat16(), torch.zeros(rows, 576).bfloat16(), batch, latents)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    name = "decode_hopper" if heads == 128 and card.target.arch == 90 else "_decode"
    assert counts == {
        "_turn": 2, "_per_head": 2, name: 1, "_merge": 1,  # queries with keys and without; keys and values
        "_spread": 1, "_gather": 1, "_join": 1, "_prompt": 2, "_fold": 3,  # causal or not; first, last and only piece
    }  # fmt: skip


@pytest.mark.parametrize(
    ("card", "heads", "nope", "value"), [(HOPPER, 128, 128, 128), (LEAST, 64, 192, 256)],
    indirect=["card"], ids=["deepseek", "glm"],
)  # fmt: skip
def test_latent_attention_over_chosen_tokens(
    card: Compiler, ops: GpuOps, heads: int, nope: int, value: int
) -> None:
    """Indexers and attention of rows that decode, and of chunks that see all and not; lists of one and more pieces."""
    sizes, angles = LatentSizes(heads, nope, 64, 512, value), torch.rand(40001, 32)
    keys, values = torch.zeros(heads, 512, nope).bfloat16(), torch.zeros(heads, value, 512).bfloat16()
    norm, rope = torch.ones(512).bfloat16(), RopeTables(angles, angles)
    layer = ops.bound(sizes, LatentWeights(keys, values, norm, 1e-6, rope, 0.1))
    shape = Index(heads // 2, 128, 2048, RopeShape(1e4, 64, pairs="halves"))
    index = ops.bound(shape, IndexWeights(torch.ones(128), torch.ones(128), angles, angles))
    for spans, single in [
        ([(99, 100)], 0), ([(9000, 9001)] * 3, 3), ([(40000, 40001)], 0), ([(2040, 2041), (2000, 2130)], 1),
        ([(2990, 3010), (0, 5)], 0), ([(40000, 40003)], 0), ([(2999, 3000)], 0),
        ([(99, 100)] * 17 + [(5000, 5300)], 17),
    ]:  # fmt: skip
        tables, pages = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), single_rows=single)
        rows = len(batch.positions)
        cache = torch.zeros(pages, PAGE, 1, 128).bfloat16()
        q, k = torch.zeros(rows, shape.heads * 128).bfloat16(), torch.zeros(rows, 128).bfloat16()
        chosen = index(q, k, torch.zeros(rows, shape.heads), batch, cache)
        assert (chosen is None) == (spans[0] == (99, 100) and len(spans) == 1)
        latents = torch.zeros(pages, PAGE, 1, sizes.width, dtype=torch.bfloat16)
        x = torch.zeros(rows, heads * (nope + 64)).bfloat16()
        layer(x, torch.zeros(rows, 576).bfloat16(), batch, latents, chosen)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    assert (counts["_turn_index"], counts["_token_scores"]) == (1, 2)  # rows of owners, and each its own
    assert counts["_keep_best"] == 6  # the first and further times; the last one and the only one, of both
    hopper = card.target.arch == 90  # where one kernel takes any number of parts
    # Of all keys; of chosen ones.
    assert (counts["decode_hopper" if hopper else "_decode"], counts["_merge"]) == (2 if hopper else 3, 2)


POOLS = {"index": Compression(4, True, EntryIndex(64, 128, 512)), "all": Compression(16), "none": None}


@compiled_by("card", (HOPPER, LEAST), "pooled", POOLS)
def test_shared_keys(card: Compiler, ops: GpuOps, pooled: str) -> None:
    """DeepSeek-V4's widths: chunks of two sequences, with and without a choice of entries, and rows that decode."""
    pool = POOLS[pooled]
    shape = CompressedAttention(64, 512, 1024, 128, RopeShape(1e4, 64, pairs="neighbours"), 8, 32, 1e-6, pool)
    widths = () if pool is None else pool.widths(512)
    pools = tuple(CompressionWeights(torch.zeros(pool.rows if pool else 0, w), torch.ones(w)) for w in widths)
    angles = torch.rand(9000, 32)
    heads = ops.bound(shape, CompressedWeights(angles, angles, torch.zeros(64), torch.zeros(8, 32, 4096), pools))
    inputs, stride = (1, 1) if pool is None else (pool.inputs(512), pool.stride)
    for spans in ([(0, 33), (7, 50)], [(8000, 8003)], [(99, 100), (8999, 9000)], [(40, 300)]):
        tables, pages = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), slots=torch.arange(1, len(spans) + 1, dtype=torch.int32))
        rows = len(batch.positions)
        made = [torch.zeros(rows, n).bfloat16() for n in (64 * 512, 512, inputs, 64 * 128, 64)]
        p = Projected(*made[: 2 if pool is None else 5 if pool.index else 3])
        kept = () if pool is None else (torch.zeros(4, pool.rows, inputs).bfloat16(),)
        entries = [torch.zeros(pages, PAGE // stride, w).bfloat16() for w in widths]
        heads(p, step_rows(batch), torch.zeros(4, 128, 512).bfloat16(), (*kept, *entries))
    counts = {name: len(variants) for name, variants in card.variants.items()}
    assert counts["_attend_rows"] == (2 if pool is not None and pool.index is not None else 1)
    assert counts["_turn_rows"] == (4 if pool is not None and pool.index is not None else 3)


SPACES = {"nemotron": (64, 8, 128, 64), "granite": (128, 1, 128, 64), "awkward": (6, 2, 12, 21)}


@compiled_by("card", (HOPPER, LEAST, 120), "model", SPACES, others=(80, 89, 100))
def test_state_spaces(card: Compiler, ops: GpuOps, model: str) -> None:
    """Rows that decode and chunks, each kernel once, whatever the numbers of rows and sequences. Convolutions twice:
    with a bias before silu, and between gates."""
    heads, groups, keys, width = SPACES[model]
    memory, channels = torch.zeros(20, heads, keys, width), heads * width + 2 * groups * keys
    taps, ring = torch.zeros(5, channels), torch.zeros(20, 4, channels).bfloat16()
    for spans, single in [
        ([(9, 10)], 1), ([(9, 10)] * 3, 3), ([(40, 41), (0, 30)], 1), ([(0, 64)] * 16, 0),
        ([(9, 10)] * 16 + [(0, 130)], 16),
    ]:  # fmt: skip
        tables, _ = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), single_rows=single)
        rows, shared = len(batch.positions), torch.zeros(len(batch.positions), groups, keys)
        tokens = RecurrentTokens(shared, shared, torch.zeros(rows, heads, width), torch.zeros(rows, heads, 1))
        step, wide = ForwardState(batch, torch.empty(0)), torch.zeros(rows, 3 * channels + 8).bfloat16()
        GpuStateUpdates().folded(tokens, step, memory)
        GpuStateUpdates().convolved(wide[:, 8:][:, :channels], step, ring, Taps(taps, biased=True))
        GpuStateUpdates().gated(wide[:, 8:], step, ring, Taps(taps[1:]))
    counts = {name: len(variants) for name, variants in card.variants.items()}
    convolutions = dict.fromkeys(("_decode_convolved", "_prompt_convolved", "_prompt_kept"), 2)
    assert counts == {"_fold": 1, "_pairs": 1, "_scan": 1, **convolutions}


CHANNELS = {"kimi-linear": (32, 128, 0.0), "ling-3": (32, 128, -5.0), "awkward": (3, 20, 0.0)}


@compiled_by("card", (HOPPER, LEAST), "model", CHANNELS)
def test_delta_nets_whose_channels_decay_apart(card: Compiler, ops: GpuOps, model: str) -> None:
    """Rows that decode and chunks, each kernel once, whatever the numbers of rows and sequences; twice where copies of
    rows may follow, and where draft tokens stand before a prompt's chunk."""
    heads, dim, floor = CHANNELS[model]
    inner, state = heads * dim, channel_state(torch.zeros(20, heads, dim, dim), torch.bfloat16, 6)
    weights = ChannelWeights(*map(torch.zeros, (heads, inner, dim)), 1e-5, floor)
    for batch in batches():
        rows = len(batch.positions)
        gates, beta = torch.zeros(rows, inner).bfloat16(), torch.zeros(rows, 8 + heads).bfloat16()[:, 8:]
        mixed, step = torch.zeros(rows, 3 * inner), ForwardState(batch, torch.empty(0))
        GpuChannelStateUpdates().corrected(mixed, ChannelGates(gates, beta, gates), step, state, weights)
        drafted = ForwardState(replace(batch, state_lens=batch.seq_lens), torch.empty(0))
        GpuChannelStateUpdates().corrected(mixed, ChannelGates(gates, beta, gates), drafted, state, weights)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    in_chunks = dict.fromkeys(("within_blocks", "across_blocks", "_solve", "_carry", "_read"), 1)
    assert counts == {"_keyed": 1, "_fold": 1, "_normed": 2, "_verify": 2, "_keep": 1, **in_chunks}


@compiled_by("card", (HOPPER, LEAST), "model", SPACES)
def test_what_stands_around_state_spaces(card: Compiler, ops: GpuOps, model: str) -> None:
    heads, groups, keys, width = SPACES[model]
    inner = heads * width
    memory, of_heads = torch.zeros(20, heads, keys, width), torch.zeros(heads)
    weights = SpaceWeights(of_heads, of_heads, of_heads, torch.zeros(inner), groups, 1e-5)
    for batch in batches():
        rows = len(batch.positions)
        made = torch.zeros(rows, inner + 8 + heads).bfloat16()
        given = SpaceInputs(torch.zeros(rows, inner + 2 * groups * keys), made[:, :inner], made[:, inner + 8 :])
        GpuSpaceStateUpdates().spaced(given, ForwardState(batch, torch.empty(0)), memory, weights)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    assert counts == {"_stepped": 1, "_fold": 1, "_pairs": 1, "_scan": 1, "_left": 2}


def batches() -> Iterator[ForwardBatch]:
    """Steps of rows that decode, of prompts, and of both."""
    for spans, single in [
        ([(9, 10)], 1), ([(9, 10)] * 3, 3), ([(40, 41), (0, 30)], 1), ([(0, 64)] * 16, 0),
        ([(9, 10)] * 16 + [(0, 130)], 16),
    ]:  # fmt: skip
        tables, _ = random_tables(len(spans), max(end for _, end in spans))
        yield replace(make_batch(spans, tables), single_rows=single, slots=torch.ones(len(spans), dtype=torch.int32))


DELTAS = {"qwen3-next": (16, 32, 128, 128, 4), "awkward": (2, 6, 20, 40, 3)}


@compiled_by("card", (HOPPER, LEAST), "model", DELTAS, others=(80, 89, 100, 120))
def test_gated_delta_nets(card: Compiler, ops: GpuOps, model: str) -> None:
    """Rows that decode and chunks, each kernel once, whatever the numbers of rows and sequences."""
    prompt.options.cache_clear()  # chosen by the card's shared memory
    shape = DeltaRule(*DELTAS[model], Norm(1e-6), "heads")
    gates, norm = torch.zeros(shape.v_heads), torch.zeros(shape.v_dim).bfloat16()
    delta = ops.bound(shape, DeltaWeights(torch.zeros(shape.conv, shape.channels), gates, gates, norm))
    matrix = ops.linear(torch.zeros(2 * shape.v_heads, 2048))
    inputs = torch.zeros(9, shape.conv + 6, shape.channels, dtype=torch.bfloat16)
    memory = torch.zeros(9, shape.v_heads, shape.k_dim, shape.v_dim)
    state = DeltaState(inputs, inputs[..., : 2 * shape.v_heads].contiguous(), memory)
    for spans, single in [
        ([(9, 10)], 0), ([(9, 10)] * 3, 3), ([(40, 41), (0, 30)], 1), ([(0, 64)] * 16, 0),
        ([(9, 10)] * 16 + [(0, 130)], 16),
    ]:  # fmt: skip
        tables, _ = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), single_rows=single)
        rows = len(batch.positions)
        wide, narrow = torch.zeros(rows, shape.channels + shape.values), torch.zeros(rows, 2 * shape.v_heads)
        product = Product(torch.zeros(rows, 2048).bfloat16(), matrix)
        delta(wide.bfloat16(), product, batch, state)
        for each in (batch, replace(batch, state_lens=batch.seq_lens - batch.query_starts.diff())):
            delta(wide.bfloat16(), narrow.bfloat16(), each, state)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    once = dict.fromkeys(("convolve", "keep", "within", "walk", "gated_norm"), 1)
    # gates that are there, and that it makes; rows that decode or are drafts, and what prompts go on from
    assert counts == {**once, "_step": 2, "_verify": 2}


POOLED_SPANS = [
    ([(99, 100)], 1), ([(9000, 9001)] * 3, 3), ([(40000, 40001)], 1), ([(2040, 2041), (2000, 2130)], 1),
    ([(2990, 3010), (0, 5)], 0), ([(99, 100)] * 17 + [(5000, 5300)], 17),
]  # fmt: skip


@compiled_by("card", (HOPPER, LEAST), "heads", [32], others=(80, 89, 100, 120))
def test_pools_of_latents_that_do_not_turn(card: Compiler, ops: GpuOps, heads: int) -> None:
    """GLM-5.3-Flash's widths: rows that decode and chunks, with a choice and without, each kernel once."""
    shape, sizes = Index(heads, 128, 2048, still(0), pool=4), LatentSizes(64, 256, 0, 512, 256)
    index = ops.bound(shape, IndexPoolWeights(torch.ones(128), torch.ones(128), torch.ones(4, 128)))
    keys, values = torch.zeros(64, 512, 256).bfloat16(), torch.zeros(64, 256, 512).bfloat16()
    rope = RopeTables(torch.zeros(50000, 0), torch.zeros(50000, 0))
    layer = ops.bound(sizes, LatentWeights(keys, values, torch.ones(512).bfloat16(), 1e-5, rope, 0.1))
    for spans, single in POOLED_SPANS:
        tables, pages = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), single_rows=single)
        rows, latents = len(batch.positions), torch.zeros(pages, PAGE, 1, 512).bfloat16()
        ring = torch.zeros(len(spans) + 1, 4, 256).bfloat16()
        cache = PooledKeys(latents, ring, torch.zeros(pages, PAGE // 4, 1, 128).bfloat16())
        q, raw = torch.zeros(rows, heads * 128).bfloat16(), torch.zeros(rows, 256).bfloat16()
        chosen = index(q, raw, torch.zeros(rows, heads), ForwardState(batch, torch.empty(0)), cache)
        x = torch.zeros(rows, 64 * 256).bfloat16()
        layer(x, torch.zeros(rows, 512).bfloat16(), batch, latents, chosen)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    # rows that are sequences of their own, and rows of owners
    assert (counts["_enter"], counts["_close"], counts["_spread_pools"], counts["_token_scores"]) == (2, 2, 2, 2)
    assert (counts["_turn"], counts["_spread"], counts["_prompt"]) == (1, 1, 2)


@compiled_by("card", (HOPPER, LEAST), "heads", [24], others=(80, 89, 100, 120))
def test_chosen_rows_of_grouped_queries(
    card: Compiler, ops: GpuOps, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    """Qwen3.8-Flash-Next's widths: blocks of tokens with their keys' mean, and attention over a choice."""
    monkeypatch.setattr(attention_decode, "shared_bytes", lambda device: card.shared_bytes)
    shape = MeanIndex(4, 128, 2048, RopeShape(1e7, 64), Norm(1e-6), 4)
    index = ops.bound(shape, MeanWeights(torch.ones(128), torch.ones(128), *torch.zeros(2, 50000, 32)))
    for spans, single in POOLED_SPANS:
        tables, pages = random_tables(len(spans), max(end for _, end in spans))
        batch = replace(make_batch(spans, tables), single_rows=single)
        rows, (k, v) = len(batch.positions), torch.zeros(2, pages, PAGE, 2, 256).bfloat16()
        ring, keys = torch.zeros(len(spans) + 1, 4, 128).bfloat16(), torch.zeros(pages, PAGE // 4, 1, 128).bfloat16()
        q, raw = torch.zeros(rows, 4 * 128).bfloat16(), torch.zeros(rows, 128).bfloat16()
        chosen = index(q, raw, ForwardState(batch, torch.empty(0)), PooledKeys(k, ring, keys))
        if chosen is not None:
            index.attend(torch.zeros(rows, heads, 256).bfloat16(), k, v, chosen, 0.1)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    assert (counts["_enter"], counts["_close_means"], counts["_spread_pools"]) == (2, 2, 2)
    assert counts["_merge"] == 1 and counts["_decode"] <= 2  # few rows, and many


@compiled_by("card", (HOPPER, LEAST), "streams", [4], others=(80, 89, 100, 120))
def test_streams_that_pass_gates(card: Compiler, ops: GpuOps, streams: int) -> None:
    """Qwen3.8-Flash-Next's widths: gated streams, and what n-grams add to them, each kernel once for any rows."""
    hidden, rank = 2560, 320
    shape, wide = GatedStreams(streams, rank), streams * hidden
    down, up = ops.linear(torch.zeros(rank + streams, wide)), ops.linear(torch.zeros(wide, rank))
    mix = ops.bound(shape, GatedWeights(down, up, True))
    ngram = Ngram(3, 8, RowTable(3200, 160), 4, streams, hidden, 5, Norm(1e-6))
    hashes = Hashes(torch.ones(3, dtype=torch.int64), *torch.ones(2, 16, dtype=torch.int64))
    floats = *torch.ones(2, wide), torch.ones(4, wide)
    ngrams = ops.bound(ngram, NgramWeights(hashes, torch.zeros_like, *floats, mix, 8))
    for batch in batches():
        rows, step = len(batch.positions), ForwardState(batch, torch.empty(0))
        x, y = torch.zeros(rows, streams, hidden).bfloat16(), torch.zeros(rows, hidden).bfloat16()
        leaving = ReturningRows(y, Shares(torch.zeros(rows, streams).bfloat16()))
        mix.advanced(x, leaving, torch.ones(wide), 1e-6)
        mix.normed(x, torch.ones(wide), 1e-6)
        projected, ring = torch.zeros(rows, wide + hidden).bfloat16(), torch.zeros(20, 12, wide).bfloat16()
        ngrams.additions(projected, x, step.rows, ring)
    counts = {name: len(variants) for name, variants in card.variants.items()}
    # with a result that joins, and without; rows that are sequences of their own, and others
    assert counts["_join"] == 2 and (counts["_take"], counts["_activate"], counts["_mean"]) == (1, 1, 1)
    assert (counts["_give"], counts["_convolve"]) == (2, 2)
