"""Packed weights on disk: the same bytes and the same answers, and no wrong answer from a file that is not whole."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash

import kernel_cases as cases
from tandem import _core
from tandem.errors import CheckpointError, KernelError
from tandem.kernels.cpu import PackedExperts, PackedMatrix, WorkerPool, Workspace
from tandem.kernels.ops import ExpertBiases
from tandem.kernels.packed import verification
from tandem.kernels.packed.cache import PackedCache
from tandem.kernels.packed.file import BLOCK_BYTES, HEAD, HEAD_BYTES, HUGE_PAGE, PackedFile, PackedWriter
from tandem.kernels.packed.verification import Verification

POOL = WorkerPool([-1, -1])
WORKSPACE = Workspace(POOL, "scalar")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def checksum(block: bytes) -> int:
    """The xxHash project's own code."""
    return xxhash.xxh64_intdigest(block) if len(block) <= 240 else xxhash.xxh3_64_intdigest(block)


def test_checksums_are_xxhash() -> None:
    """Blocks and stripes that are full, begun and just ended; every alignment."""
    data = os.urandom(9000)
    for length in [*range(70), 255, 512]:
        assert _core.xxh64(data[:length]) == xxhash.xxh64_intdigest(data[:length]), length
    for length in [1, 240, 241, 256, 257, 1023, 1024, 1025, 1088, 2047, 2048, 2049, 4111, 8192]:
        view = memoryview(data)[length % 64 : length % 64 + length]
        assert _core.block_checksums(POOL, [view], 1 << 20, True) == [checksum(bytes(view))], length


@pytest.mark.parametrize("tier", _core.supported_tiers())
def test_every_tier_has_the_same_checksum(tier: str) -> None:
    data = os.urandom(5000)
    for length in (241, 1024, 1025, 5000):
        assert _core.xxh3(data[:length], tier) == xxhash.xxh3_64_intdigest(data[:length])
    with pytest.raises(KernelError, match="more than 240"):
        _core.xxh3(data[:240], tier)


def test_blocks_are_summed_apart() -> None:
    data = os.urandom(5000)
    sums = _core.block_checksums(POOL, [memoryview(data), memoryview(data)[:100]], 1200, True)
    assert sums == [checksum(data[i : i + 1200]) for i in range(0, 5000, 1200)] + [checksum(data[:100])]


@pytest.mark.parametrize("length", [100, 241, 262144, 262145, 300000, 524288 + 1100, 1 << 20])
def test_a_mapped_files_blocks_are_read_from_it_in_parts(tmp_path: Path, length: int) -> None:
    """Parts that end at, before and behind the ends of XXH3's own blocks; a second range begins elsewhere."""
    data = os.urandom(length + 4096)
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as file:
        mapped = _core.MappedFile(file.fileno(), len(data))
    for in_place in (False, True):
        ranges = [mapped.view(0, length), mapped.view(4096, length)]
        sums = _core.block_checksums(POOL, ranges, 1 << 20, in_place)
        assert sums == [checksum(data[:length]), checksum(data[4096:])]


def test_a_file_that_is_cut_short_while_it_is_verified_is_not_whole(tmp_path: Path) -> None:
    matrix = PackedMatrix(WORKSPACE, MATRIX, None, "bf16")
    writer = PackedWriter(tmp_path / "x", POOL)
    writer.add("m", matrix.formats, matrix.shape, *matrix.parts())
    writer.finish("", "")
    file = PackedFile(tmp_path / "x")
    os.truncate(tmp_path / "x", HUGE_PAGE + 1000)
    with pytest.raises(CheckpointError, match="x cannot be read, or was cut short"):
        Verification(file, POOL, in_place=False).wait(nothing)


def experts_of(weights: tuple[torch.Tensor, ...] | None, fmt: str) -> PackedExperts:
    layer = PackedExperts(WORKSPACE, 3, 96, 40, fmt)
    for expert in range(3 if weights else 0):
        layer.load(expert, *(w * (1 + expert) for w in weights))
    return layer


WEIGHTS = random(40, 96), random(40, 96) * 2, random(96, 40)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fmt", ["f32", "bf16", "int8", "int4"])
def test_what_is_written_is_mapped_again(tmp_path: Path, fmt: str, bias: bool) -> None:
    matrix = PackedMatrix(WORKSPACE, random(75, 100), random(75) if bias else None, fmt)
    experts = experts_of(WEIGHTS, fmt)
    biases = ExpertBiases(random(3, 40), random(3, 40), random(3, 96))
    writer = PackedWriter(tmp_path / "x.packed", POOL)
    writer.add("matrix", matrix.formats, matrix.shape, *matrix.parts())
    writer.add("experts", experts.formats, experts.shape, *experts.parts())
    writer.finish("key", "a test")
    assert [p.name for p in tmp_path.iterdir()] == ["x.packed"]

    file = PackedFile(tmp_path / "x.packed")
    Verification(file, POOL).wait(nothing)
    again = PackedMatrix.adopt(WORKSPACE, file, file.sections["matrix"])
    layer = experts_of(None, fmt)
    layer.adopt(file, file.sections["experts"])
    x, ids, shares = random(5, 100), torch.tensor([[0, 2]] * 5, dtype=torch.int32), torch.rand(5, 2)
    assert torch.equal(again(x), matrix(x))
    y = random(5, 96)
    if bias:  # not in the file: they come from the checkpoint, before or after
        experts.set_biases(biases)
        layer.set_biases(biases)
    del file, matrix  # the mapping lives as long as what lies in it
    assert torch.equal(layer.forward(y, ids, shares), experts.forward(y, ids, shares))


def test_a_layer_in_a_file_is_not_loaded_again(tmp_path: Path) -> None:
    experts = experts_of(WEIGHTS, "bf16")
    writer = PackedWriter(tmp_path / "x", POOL)
    writer.add("experts", experts.formats, experts.shape, *experts.parts())
    writer.finish("", "")
    file, layer = PackedFile(tmp_path / "x"), experts_of(None, "bf16")
    layer.adopt(file, file.sections["experts"])
    with pytest.raises(Exception, match="cannot be loaded again"):
        layer.load(0, *WEIGHTS)
    with pytest.raises(CheckpointError, match="experts is .* not"):
        PackedExperts(WORKSPACE, 2, 32, 16).adopt(file, file.sections["experts"])
    other = experts_of(None, "int8")  # what lies in the file decides: the file's key says what was asked for
    other.adopt(file, file.sections["experts"])
    assert other.formats == experts.formats


class ScriptedSetup(list[str]):
    """What the cache says."""

    def cache(self, directory: Path, key: str = "k") -> PackedCache:
        return PackedCache(directory / "m.packed", key, f"checkpoint {key}", WORKSPACE, POOL, self.append)


def nothing(_done: int, _total: int) -> None:
    pass


MATRIX = random(160, 8192)  # 2.5 MB as bf16


def fill(cache: PackedCache) -> torch.Tensor:
    """What a loader does; the weights of the matrix it ends with."""
    cases.opened(cache)
    matrix = cache.matrix("m")
    if matrix is None:
        matrix = PackedMatrix(WORKSPACE, MATRIX, None, "bf16")
        cache.keep("m", matrix)
    cache.finish(nothing)
    return matrix.dequantised()


def test_the_second_start_packs_nothing(tmp_path: Path) -> None:
    told = ScriptedSetup()
    first = fill(told.cache(tmp_path / "new"))
    assert len(told) == 1 and "written" in told[0]
    cache = told.cache(tmp_path / "new")
    assert cases.opened(cache)
    assert torch.equal(cache.matrix("m").dequantised(), first)
    assert len(told) == 1
    offset = PackedFile(tmp_path / "new" / "m.packed").sections["m"].parts[0].offset
    assert offset % HUGE_PAGE == 0


def damaged(file: Path, where: str) -> None:
    data = bytearray(file.read_bytes())
    table = HEAD.unpack(data[: HEAD.size])[1]
    if where == "cut":
        data = data[:-1]
    elif where == "empty":
        data = bytearray()
    else:
        at = {"magic": 0, "table offset": 13, "table length": 18, "table": table + 9, "first weight": HUGE_PAGE,
              "last weight": HUGE_PAGE + MATRIX.numel() * 2 - 1, "table sum": 30}[where]  # fmt: skip
        data[at] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize("where", [
    "cut", "empty", "magic", "table offset", "table length", "table", "table sum", "first weight", "last weight",
])  # fmt: skip
def test_a_file_that_is_not_whole_is_named_and_made_anew(tmp_path: Path, where: str) -> None:
    told = ScriptedSetup()
    first = fill(told.cache(tmp_path))
    damaged(tmp_path / "m.packed", where)
    del told[:]
    assert torch.equal(fill(told.cache(tmp_path)), first)
    assert str(tmp_path / "m.packed") in told[0] and "packed again" in told[0]
    assert "written" in told[1]
    del told[:]
    assert torch.equal(fill(told.cache(tmp_path)), first)
    assert not told


def test_every_byte_of_a_section_is_checked(tmp_path: Path) -> None:
    told = ScriptedSetup()
    fill(told.cache(tmp_path))
    file = tmp_path / "m.packed"
    whole, part = file.read_bytes(), PackedFile(tmp_path / "m.packed").sections["m"].parts[0]
    assert part.nbytes == MATRIX.numel() * 2
    for at in range(part.offset, part.offset + part.nbytes, part.nbytes // 7):
        data = bytearray(whole)
        data[at] ^= 1
        file.write_bytes(data)
        for in_place in (False, True):
            with pytest.raises(CheckpointError, match="damaged at byte .* in m$"):
                Verification(PackedFile(file), POOL, in_place).wait(nothing)
    assert part.nbytes < BLOCK_BYTES or len(part.checksums) > 1


def test_damage_is_no_error_of_a_thread(tmp_path: Path) -> None:
    """Which would keep it, and with it the frames of who waits, until it has a CPU again."""
    fill(ScriptedSetup().cache(tmp_path))
    damaged(tmp_path / "m.packed", "first weight")
    begun = Verification(PackedFile(tmp_path / "m.packed"), POOL)
    checked = list(begun._checked)
    with pytest.raises(CheckpointError, match="damaged at byte"):
        begun.wait(nothing)
    assert [each.exception(60) for each in checked] == [None] * len(checked)


def test_what_was_verified_before_anybody_waited_is_reported_once(tmp_path: Path, monkeypatch) -> None:
    """Else the speed that is shown would be that of reporting."""
    fill(ScriptedSetup().cache(tmp_path))
    monkeypatch.setattr(verification, "VERIFY_BYTES", BLOCK_BYTES)
    begun, told = Verification(PackedFile(tmp_path / "m.packed"), POOL), list[tuple[int, int]]()
    while any(thread.name.startswith("tandem-verification") for thread in threading.enumerate()):
        time.sleep(0.001)
    begun.wait(lambda *progress: told.append(progress))
    assert told == [(MATRIX.numel() * 2, MATRIX.numel() * 2)]


def test_a_verification_that_was_stopped_is_none(tmp_path: Path, monkeypatch) -> None:
    fill(ScriptedSetup().cache(tmp_path))
    monkeypatch.setattr(verification, "VERIFY_BYTES", BLOCK_BYTES)
    go, check = threading.Event(), PackedFile.check
    monkeypatch.setattr(PackedFile, "check", lambda *given: go.wait(60) and check(*given))
    begun = Verification(PackedFile(tmp_path / "m.packed"), POOL)
    begun.stop()
    go.set()
    with pytest.raises(CheckpointError, match="was not verified"):
        begun.wait(nothing)


def test_a_file_of_another_model_is_named_and_replaced(tmp_path: Path) -> None:
    told = ScriptedSetup()
    fill(told.cache(tmp_path, "a"))
    del told[:]
    fill(told.cache(tmp_path, "b"))
    assert "was made from checkpoint a, not from checkpoint b" in told[0]
    assert PackedFile(tmp_path / "m.packed").table.key == "b"


def test_a_file_that_lacks_a_matrix_is_completed(tmp_path: Path) -> None:
    told = ScriptedSetup()
    first = fill(told.cache(tmp_path))
    cache = told.cache(tmp_path)
    cases.opened(cache)
    cache.matrix("m")
    assert cache.matrix("other") is None
    cache.keep("other", PackedMatrix(WORKSPACE, random(32, 32), None, "f32"))
    cache.finish(nothing)
    assert any("lacks other" in line for line in told)
    cache = told.cache(tmp_path)
    cases.opened(cache)
    assert torch.equal(cache.matrix("other").dequantised(), random(32, 32))
    assert torch.equal(cache.matrix("m").dequantised(), first)


def test_a_full_disk_stops_only_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource
    import signal

    told, limits = ScriptedSetup(), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then write() fails with EFBIG, as ENOSPC would
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (HEAD_BYTES + 2**20, limits[1]))
        weights = fill(told.cache(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert torch.equal(weights, MATRIX.bfloat16().float())
    assert len(told) == 1 and "cannot be written" in told[0] and "goes on" in told[0]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_becomes_read_only_stops_only_the_writing(tmp_path: Path, monkeypatch) -> None:
    """Then what was begun cannot be removed either."""

    def read_only(*_given: object, **_how: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(PackedWriter, "_write", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    told = ScriptedSetup()
    assert torch.equal(fill(told.cache(tmp_path)), MATRIX.bfloat16().float())
    assert len(told) == 1 and "Read-only file system" in told[0]


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    told, other = ScriptedSetup(), PackedWriter(tmp_path / "m.packed", POOL)
    fill(told.cache(tmp_path))
    assert told == [f"packed cache: another process is writing {tmp_path / 'm.packed'}; this one does not"]
    other.finish("", "")
    assert (tmp_path / "m.packed").exists()


def test_a_writer_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "m.packed.partial").write_bytes(b"half of a file")
    told = ScriptedSetup()
    fill(told.cache(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["m.packed"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = ScriptedSetup()
    fill(told.cache(tmp_path / "file"))
    assert len(told) == 1 and "cannot be written" in told[0]
