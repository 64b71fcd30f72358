"""Loading a layer whose experts live on two sides, the GPU faked: every expert arrives once, where it belongs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import kernel_cases as cases
from tandem import _core
from tandem.errors import KernelError
from tandem.experts import feed
from tandem.experts.feed import feed_of
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.formats.codes import WeightCodes
from tandem.kernels.gpu import uploads
from tandem.kernels.gpu.uploads import Uploads, uploaded
from tandem.kernels.packed.cache import PackedCache
from tandem.kernels.packed.experts import PackedExperts
from tandem.kernels.packed.file import PackedWriter
from tandem.kernels.packed.matrix import PackedMatrix

EXPERTS, HIDDEN, WIDTH, TOP_K = 11, 48, 32, 3
SLOTS = [0, -1, -1, 1, 2, 3, -1, 4, -1, -1, 5]


class FakeGpuExperts:
    """Notes what it is given."""

    def __init__(self, slot_of: Tensor) -> None:
        self.table, self.given, self.open = slot_of, dict[int, Any](), True

    def load_each(self, ids: list[int], experts: list[Any]) -> None:
        assert self.open
        for expert, matrices in zip(ids, experts, strict=True):
            assert expert not in self.given
            self.given[expert] = matrices

    def take(self, ids: list[int], layer: PackedExperts) -> None:
        self.load_each(ids, [layer.packed(expert) for expert in ids])

    def all_loaded(self) -> None:
        self.open = False


def matrices(expert: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(expert)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    gate, up, down = (torch.randn(shape, generator=g) for shape in shapes)
    return gate, up, down


def made(slots: list[int], live: bool = False) -> tuple[HybridExperts, FakeGpuExperts, PackedExperts]:
    slot_of = torch.tensor(slots, dtype=torch.int32)
    gpu, workspace = FakeGpuExperts(slot_of), cases.workspace_of("scalar")
    places = sum(s < 0 for s in slots) + live
    cpu = PackedExperts(workspace, len(slots), HIDDEN, WIDTH, "bf16", cpu_slots=places)
    handoff = Handoff(HandoffSizes(1, 1, HIDDEN, TOP_K), torch.device("cpu"), 1.0)
    whole = partial(PackedExperts, workspace, len(slots), HIDDEN, WIDTH, "bf16")
    return HybridExperts(slot_of, cast(Any, gpu), cpu, handoff, whole, live), gpu, cpu


@pytest.mark.parametrize("chunk", [1, 70_000, 1 << 28])  # bytes: one expert at a time, three, all
def test_every_expert_arrives_once_where_it_lives(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(feed, "CHUNK_BYTES", chunk)
    experts, gpu, cpu = made(SLOTS)
    experts.load(feed_of(EXPERTS, matrices))
    assert sorted(gpu.given) == [e for e in range(EXPERTS) if SLOTS[e] >= 0] and not gpu.open
    whole = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, "bf16")
    for expert in range(EXPERTS):
        if expert in gpu.given:
            assert all(map(torch.equal, gpu.given[expert], matrices(expert)))
        else:
            whole.load(expert, *matrices(expert))
            assert torch.equal(cpu.packed(expert), whole.packed(expert))
    assert cpu.loaded == SLOTS.count(-1)


def cache_at(path: Path) -> PackedCache:
    workspace = cases.workspace_of("scalar")
    cache = PackedCache(path, "k", "a test", workspace, cases.pool_of(2), print, dense=False)
    cases.opened(cache)
    return cache


def nothing(_done: int, _total: int) -> None: ...


def unreadable(_: int) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("an expert was read")


@pytest.mark.parametrize("live", [False, True])
def test_a_packed_cache_serves_every_placement(tmp_path: Path, live: bool) -> None:
    """What one placement wrote is where another wants it, and nothing is packed or read; shared experts, too."""
    whole = PackedExperts(cases.workspace_of("scalar"), EXPERTS, HIDDEN, WIDTH, "bf16")
    whole.load_all(0, [matrices(expert) for expert in range(EXPERTS)])
    for turn, slots in enumerate((SLOTS, [-1] * 10 + [0], list(reversed(SLOTS)))):
        experts, gpu, cpu = made(slots, live)
        cache = cache_at(tmp_path / "packed")
        experts.load(feed_of(EXPERTS, unreadable if turn else matrices), cache.layer("one"))
        cache.finish(nothing)
        assert not gpu.open and cpu.in_file == bool(turn and not live)
        assert cpu.loaded == (EXPERTS if cpu.in_file else slots.count(-1))
        for expert, slot in enumerate(slots):
            assert (expert in gpu.given) == (slot >= 0)
            there = gpu.given[expert] if slot >= 0 else cpu.packed(expert)
            assert torch.equal(there, whole.packed(expert))
    if live:  # they can still change places
        cpu.load_packed(slots.index(0), whole.packed(slots.index(0)))
        cpu.forget(slots.index(-1))


def test_a_layer_is_in_the_file_before_the_next_is_packed(tmp_path: Path) -> None:
    """However slow the disk is: else whole layers would pile up in memory."""
    cache, order = cache_at(tmp_path / "packed"), list[str]()
    original = PackedWriter.add

    def slow(self: PackedWriter, name: str, *rest: Any) -> None:
        time.sleep(0.05)
        original(self, name, *rest)
        order.append(f"{name} written")

    def noting(name: str) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
        return lambda expert: (order.append(f"{name} packed"), matrices(expert))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWriter, "add", slow)
        for name in ("a", "b", "c"):
            made(SLOTS)[0].load(feed_of(EXPERTS, noting(name)), cache.layer(name))
        cache.finish(nothing)
    assert order.index("a written") < order.index("b packed")
    assert order.index("b written") < order.index("c packed")


def test_an_expert_that_cannot_be_read_ends_the_load() -> None:
    def broken(expert: int) -> tuple[Tensor, Tensor, Tensor]:
        if expert == 5:
            raise KernelError("expert 5 is torn")
        return matrices(expert)

    experts, _, _ = made(SLOTS)
    with pytest.raises(KernelError, match="expert 5 is torn"):
        experts.load(feed_of(EXPERTS, broken))


def layer(count: int, fmt: str = "int4") -> PackedExperts:
    return PackedExperts(cases.workspace_of("scalar"), count, HIDDEN, WIDTH, fmt)


@pytest.mark.parametrize("room", [1, 2, 3, 11])
def test_uploads_take_their_buffers_in_turn(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Five experts to slots in any order, some at a time; every slot has its own expert's bytes, others stay."""
    whole, slots = layer(5), [4, 5, 0, 2, 3]
    whole.load_all(0, [matrices(expert) for expert in range(5)])
    stride = whole.bytes_per_expert
    monkeypatch.setattr(uploads, "BUFFER_BYTES", room * stride)
    pool = torch.full((7 * stride,), 77, dtype=torch.uint8)
    way = Uploads(pool, stride, 11)
    assert way.room == room
    for first in range(0, 5, room):
        ids = list(range(first, min(first + room, 5)))
        way.send([slots[expert] for expert in ids], lambda out, ids=ids: whole.copy_all(ids, out))
    way.finish()
    for expert, slot in enumerate(slots):
        assert torch.equal(pool[slot * stride : (slot + 1) * stride], whole.packed(expert))
    assert (pool.view(7, -1)[[1, 6]] == 77).all()


@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4"])
def test_packed_elsewhere_they_are_what_loading_makes_of_them(fmt: str) -> None:
    whole, packer = layer(4, fmt), layer(1, fmt)
    given = [matrices(expert) for expert in range(4)]
    whole.load_all(0, given)
    out = torch.zeros(3, packer.bytes_per_expert, dtype=torch.uint8)
    packer.pack_to([3, 0, 2], [given[3], given[0], given[2]], out.view(-1))
    for row, expert in zip(out, (3, 0, 2), strict=True):
        assert torch.equal(row, whole.packed(expert))
    assert packer.loaded == 0


def test_an_expert_of_another_format_is_not_packed_elsewhere_either() -> None:
    packer, depth = layer(1), (HIDDEN, HIDDEN, WIDTH)
    out = torch.zeros(packer.bytes_per_expert, dtype=torch.uint8)
    packer.pack_to([0], [matrices(0)], out)
    codes = [
        WeightCodes(
            torch.zeros(w.shape, dtype=torch.int8), torch.ones(len(w), w.shape[1] // 16), "int8", 16, d
        )
        for w, d in zip(matrices(1), depth, strict=True)
    ]
    with pytest.raises(KernelError, match="expert 1: gate is int8"):
        packer.pack_to([1], [tuple(codes)], out)


def test_room_of_the_wrong_size_is_refused() -> None:
    packer = layer(1)
    with pytest.raises(KernelError, match="out has shape"):
        packer.pack_to(
            [0, 1], [matrices(0), matrices(1)], torch.zeros(packer.bytes_per_expert, dtype=torch.uint8)
        )


@pytest.mark.parametrize("least", [0, 1 << 20])
def test_matrices_are_uploaded_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int
) -> None:
    """Blocks of rows in memory, in a mapped file and transposed; buffers that end inside of rows."""
    monkeypatch.setattr(uploads, "LEAST_BYTES", least)
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 1000)
    a, b = torch.randn(33, 48).bfloat16(), torch.randn(17, 48).bfloat16()
    (tmp_path / "b").write_bytes(b.view(torch.uint8).numpy().tobytes())
    other = torch.zeros_like(b)  # whose bytes are not those of the file: it is the file that must be read
    with (tmp_path / "b").open("rb") as file:
        known = _core.ReadableFile(file.fileno(), other.data_ptr(), other.nbytes)
    there = uploaded((a, other), torch.device("cpu"), cases.pool_of(2))
    assert torch.equal(there, torch.cat((a, b if least == 0 else other)))
    del known
    for blocks in ((a,), (a, b), (a.float(),), (torch.randn(48, 20).T, a.float())):
        assert torch.equal(uploaded(blocks, torch.device("cpu"), cases.pool_of(2)), torch.cat(blocks))


@pytest.mark.parametrize("least", [0, 1 << 20])
def test_packed_bytes_are_uploaded_as_they_are(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    monkeypatch.setattr(uploads, "LEAST_BYTES", least)
    monkeypatch.setattr(uploads, "BUFFER_BYTES", 1000)
    matrix = PackedMatrix(cases.workspace_of("scalar"), torch.randn(37, 64))
    there = uploads.uploaded_bytes(matrix.parts()[0], torch.device("cpu"), cases.pool_of(2))
    assert there.dtype == torch.uint8 and bytes(there.numpy()) == bytes(matrix.parts()[0])


@pytest.mark.parametrize("least", [0, 1 << 20])
def test_blocks_of_different_types_are_uploaded_in_one_that_holds_both(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Such as decoded gates beside stored ups."""
    monkeypatch.setattr(uploads, "LEAST_BYTES", least)
    a, b = torch.randn(33, 48), torch.randn(17, 48).bfloat16()
    for blocks in ((a, b), (b, a)):
        there = uploaded(blocks, torch.device("cpu"), cases.pool_of(2))
        assert there.dtype == torch.float32 and torch.equal(there, torch.cat(blocks))


def test_copies_fit() -> None:
    with pytest.raises(KernelError, match="out has shape"):
        _core.copy_bytes(cases.pool_of(2), torch.zeros(4).byte(), torch.zeros(5).byte())


PEAK = """
import sys
from functools import partial
from pathlib import Path
import torch
from tandem.experts.feed import feed_of
from tandem.experts.handoff import Handoff
from tandem.experts.handoff_counts import HandoffSizes
from tandem.experts.hybrid_experts import HybridExperts
from tandem.kernels.cpu import WorkerPool, Workspace
from tandem.kernels.packed.cache import PackedCache
from tandem.kernels.packed.experts import PackedExperts

class Gpu:  # takes no memory here
    table = None
    def take(self, ids, layer): ...
    def all_loaded(self): ...

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

def nothing(*_): ...

pool = WorkerPool([-1, -1])
workspace, live = Workspace(pool, "scalar"), sys.argv[2] == "live"
slots = torch.where(torch.arange(32) % 2 == 0, torch.arange(32) // 2, -1).int()
noise = torch.randn(256, 512).bfloat16()
expert = noise, noise, noise.view(512, 256)
handoff = Handoff(HandoffSizes(1, 1, 512, 1), torch.device("cpu"), 1.0)
cache = PackedCache(Path(sys.argv[1]), "k", "a test", workspace, pool, nothing, dense=False)
cache.begin()
cache.confirm(nothing)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before, layers = resident("VmRSS"), []
for i in range(6):
    cpu = PackedExperts(workspace, 32, 512, 256, "bf16", cpu_slots=16 + live)
    whole = partial(PackedExperts, workspace, 32, 512, 256, "bf16")
    layers.append(HybridExperts(slots, Gpu(), cpu, handoff, whole, live))
    layers[-1].load(feed_of(32, lambda _: expert), cache.layer(str(i)))
cache.finish(nothing)
print(resident("VmHWM") - before, resident("VmRSS") - before, cpu.bytes_per_expert * 32)
"""


@pytest.mark.parametrize("live", ["live", "static"])
def test_a_packed_cache_takes_two_layers_more_than_what_stays(tmp_path: Path, live: str) -> None:
    """Written in the first start, read in the second. Experts that live on the GPU are not mapped in either."""
    for start in ("first", "second"):
        command = [sys.executable, "-c", PEAK, str(tmp_path / "packed"), live]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peak, stays, layer = map(int, done.stdout.split())
        assert layer > 25e6
        expected = (
            3 * layer if start == "first" or live == "live" else 0
        )  # halves of six layers; or a mapping unread
        assert stays < expected + layer / 2
        assert peak < expected + 2 * layer if start == "first" else peak < expected + layer
