"""`kt convert` interrupted: killed anywhere and called again, it ends with the bytes of an undisturbed run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from convert_models import MATRICES, plain_tensors, save, save_fp8
from tandem.convert import Conversion, convert
from tandem.errors import CheckpointError, ConfigError


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def wish(tmp_path):
    return Conversion(save_fp8(tmp_path / "in"), tmp_path / "out", shard_bytes=100_000)


@pytest.fixture
def undisturbed(wish, tmp_path):
    convert(replace(wish, out=tmp_path / "undisturbed"))
    return contents(tmp_path / "undisturbed")


class Killed(BaseException):
    """Nothing of ours catches it, and the next call finds what a kill leaves."""


def killed_before(monkeypatch, calls):
    """os.pwrite, os.fsync and os.replace; the `calls`-th of them all never happens. Returns what was called so far."""
    log = []

    def counted(real):
        def call(*args):
            log.append(real.__name__)
            if len(log) > calls:
                raise Killed
            return real(*args)

        return call

    for name in ("pwrite", "fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr("pathlib.Path.unlink", lambda *args, **kwargs: None)  # the dead do not tidy up
    return log


def test_stopped_before_any_write_it_goes_on(wish, undisturbed, tmp_path, monkeypatch):
    """Each run is killed some operations later than the one before, until one ends."""
    stops = 0
    for calls in range(0, 10_000, 3):
        with monkeypatch.context() as patched:
            log = killed_before(patched, calls)
            try:
                convert(replace(wish, workers=1))
            except Killed:
                stops += 1
                assert not (wish.out / "config.json").exists() or log[-1] == "fsync"
                continue
        break
    assert stops > 10
    assert contents(wish.out) == undisturbed


# Whoever watched it from outside might find it finished.
KILLED = """
import os, signal, sys
from tandem.cli import main

shards, writes, replace, pwrite = int(sys.argv.pop(1)), 3, os.replace, os.pwrite

def replaced(*given):
    global shards
    replace(*given)
    shards -= 1

def written(*given):
    global writes
    writes -= shards <= 0
    if writes < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return pwrite(*given)

os.replace, os.pwrite = replaced, written
main()
"""


def test_killed_by_the_system_it_goes_on(tmp_path):
    """In the midst of a file, which threads write."""
    tensors = plain_tensors()
    for copy in range(12):  # long enough to be killed in
        for name in [name for name in plain_tensors() if "layers.1.mlp.experts" in name]:
            tensors[name.replace("layers.1.", f"layers.{copy + 10}.")] = tensors[name].clone()
    source, out = save(tmp_path / "in", tensors), tmp_path / "out"
    convert(Conversion(source, tmp_path / "undisturbed", shard_bytes=100_000))
    command = ["convert", str(source), str(out), "--max-shard-gb", "0.0001"]
    for shards in (1, 4, 9):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(shards), *command], capture_output=True)
        assert killed.returncode == -signal.SIGKILL and not (out / "config.json").exists()
    finished = subprocess.run([sys.executable, "-m", "tandem", *command], capture_output=True, text=True, check=True)
    assert "matrices as INT4" in finished.stdout
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_what_is_finished_is_not_written_again(wish, undisturbed):
    convert(wish)
    times = {file.name: file.stat().st_mtime_ns for file in wish.out.glob("*.safetensors")}
    convert(wish)
    assert {file.name: file.stat().st_mtime_ns for file in wish.out.glob("*.safetensors")} == times
    assert contents(wish.out) == undisturbed


def test_a_finished_file_that_lost_its_end_is_written_again(wish, undisturbed):
    convert(wish)
    file = sorted(wish.out.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 1)
    convert(wish)
    assert contents(wish.out) == undisturbed


@pytest.mark.parametrize(
    "change", [{"group": 64}, {"method": "INT8"}, {"dense": True}, {"shard_bytes": 160_000}]
)
def test_other_settings_do_not_resume(wish, change):
    convert(wish)
    before = contents(wish.out)
    with pytest.raises(
        ConfigError, match=rf"other settings \({next(iter(change))} .* became .*another directory"
    ):
        convert(replace(wish, **change))
    assert contents(wish.out) == before


def test_a_source_that_changed_does_not_resume(wish):
    convert(wish)
    file = next(wish.model.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(ConfigError, match="other settings .source "):
        convert(wish)


def test_a_directory_with_other_files_is_refused(wish):
    wish.out.mkdir()
    (wish.out / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"is not empty \(it holds thesis.tex\)"):
        convert(wish)


def test_two_conversions_do_not_share_a_directory(wish):
    wish.out.mkdir()
    held = os.open(wish.out, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another conversion is writing to"):
        convert(wish)
    os.close(held)
    convert(wish)


def test_a_disk_that_fills_up_is_named_and_can_be_emptied(wish, undisturbed, monkeypatch):
    real, left = os.pwrite, [400_000]

    def full(file, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"out: No space left on device; what is finished stays"):
            convert(wish)
    assert not list(wish.out.glob(".*.part"))
    convert(wish)
    assert contents(wish.out) == undisturbed


def test_a_disk_that_is_too_small_is_named_at_once(wish, monkeypatch):
    full = os.statvfs_result((4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointError, match="GB are still to be written and 0.0 GB are free"):
        convert(wish)


PEAK = """
import re, sys
from pathlib import Path
from tandem.convert import Conversion, convert

convert(Conversion(Path(sys.argv[1]), Path(sys.argv[2]), "FP8", workers=2))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    """Twelve layers more: of 300 MB that are read and 150 MB that are written, less than a tenth stays. When the
    kernel takes pages back is chance: 4 to 33 MB, as much for 4 layers more as for 23."""
    peaks = []
    for layers in (1, 13):
        modules = [
            f"model.layers.{i}.mlp.experts.{e}.{m}" for i in range(layers) for e in range(2) for m in MATRICES
        ]
        tensors = {f"{m}.weight": torch.randn(1024, 2048).to(torch.bfloat16) for m in modules}
        source = save(tmp_path / f"in{layers}", tensors, files=1)
        command = [sys.executable, "-c", PEAK, str(source), str(tmp_path / f"out{layers}")]
        peaks.append(1024 * int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 45e6
