"""`kt doctor` in a container: what is taken away there is named with the flag that gives it back."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import forbidden_calls
import pytest

from plans import GIB, machine, plan
from tandem.cli.doctor_checks import Finding
from tandem.cli.doctor_container import in_container, limits
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Machine
from tandem.server import endpoint

GPU = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, "gen5 x16", capability=(9, 0))
FORBIDDEN = "Operation not permitted"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of Docker's container on a host with eight cores, two memory nodes and an NVIDIA GPU."""
    files = {
        ".dockerenv": "",
        "proc/self/status": "Name:\tkt\nMems_allowed_list:\t0\n",
        "sys/devices/system/cpu/online": "0-7",
        "sys/devices/system/node/has_memory": "0-1",
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
        "proc/driver/nvidia/version": "NVRM version",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def found(host: Machine, root: Path) -> dict[str, Finding]:
    findings = {finding.name: finding for finding in limits(host, root)}
    assert all(bool(each.fix) == bool(each.command) for each in findings.values())
    return findings


def test_what_docker_takes_away_has_its_flag(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_parents", lambda: [str(root / "absent")])
    narrow = replace(machine(cores=4, nodes=2), mbind_error=FORBIDDEN)
    commands = {name: each.command for name, each in found(narrow, root).items() if each.fix}
    assert commands == {
        "NVIDIA GPU": "docker run --gpus all …",
        "cpuset": "docker run --cpuset-cpus 0-7 …",
        "memory nodes": "docker run --cpuset-mems 0-1 …",
        "NUMA binding": "docker run --cap-add SYS_NICE …",
        "temporary folder": "docker run --tmpfs /tmp …",
    }


def test_without_a_container_the_system_is_named(root: Path) -> None:
    (root / ".dockerenv").unlink()
    commands = [each.command for each in found(machine(cores=4), root).values() if each.fix]
    assert commands and not any("docker" in command for command in commands)


@pytest.mark.parametrize(
    ("absent", "says"),
    [("proc/driver/nvidia/version", "its driver is not loaded"), ("sys/bus/pci", "its driver is loaded")],
)
def test_where_a_gpu_is_lost(root: Path, absent: str, says: str) -> None:
    (root / ".dockerenv").unlink()
    (root / absent).rename(root / "elsewhere")
    assert says in found(machine(), root)["NVIDIA GPU"].fix


@pytest.mark.parametrize(
    "host",
    [replace(machine(), gpus=(GPU,)), replace(machine(), no_gpu="CUDA_VISIBLE_DEVICES=9 hides every GPU")],
)
def test_a_gpu_that_is_there_or_hidden_on_purpose_is_not_missing(root: Path, host: Machine) -> None:
    assert "NVIDIA GPU" not in found(host, root)


def test_an_image_for_gpus_without_one(tmp_path: Path) -> None:
    """Docker Desktop's machine shows no device of the host's."""
    (tmp_path / ".dockerenv").touch()
    assert found(machine(), tmp_path)["NVIDIA GPU"].command == "docker run --gpus all …"
    assert "NVIDIA GPU" not in found(replace(machine(), gpu_missing=("triton",)), tmp_path)
    (tmp_path / ".dockerenv").unlink()
    assert "NVIDIA GPU" not in found(machine(), tmp_path)


@pytest.mark.parametrize("device_class", ["0x040300", "0x068000"])  # its sound, its NVLink bridge
def test_other_devices_of_the_maker_are_no_gpu(root: Path, device_class: str) -> None:
    (root / ".dockerenv").unlink()
    (root / "proc/driver/nvidia/version").unlink()
    (root / "sys/bus/pci/devices/0000:01:00.0/class").write_text(device_class)
    assert "NVIDIA GPU" not in found(machine(), root)


def test_all_is_well_where_nothing_is_taken_away(tmp_path: Path) -> None:
    assert not any(each.fix for each in found(machine(cores=8, nodes=2), tmp_path).values())


@pytest.mark.parametrize("gpus", [(), (GPU,)])
def test_locked_memory_counts_beside_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...]
) -> None:
    (tmp_path / ".dockerenv").touch()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    finding = found(replace(machine(), gpus=gpus), tmp_path)["locked memory"]
    assert "8 MiB" in finding.value and ("--ulimit memlock=-1" in finding.command) == bool(gpus)


@pytest.mark.parametrize(
    ("mark", "text", "expected"),
    [(".dockerenv", "", True), ("run/.containerenv", "", True), ("proc/self/mounts", "overlay / overlay rw 0 0", True),
     ("proc/self/mounts", "/dev/vda / ext4 rw 0 0\noverlay /x overlay rw 0 0", False)],
)  # fmt: skip
def test_what_a_container_is(tmp_path: Path, mark: str, text: str, expected: bool) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).write_text(text)
    assert in_container(tmp_path) is expected


def child(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code, which forbids mbind by `calls`."""
    before = "import sys; sys.path[:0] = sys.argv[1:]; import forbidden_calls as calls\n"
    folders = [str(Path(forbidden_calls.__file__).parent), *sys.path]
    return subprocess.run([sys.executable, "-c", before + code, *folders], capture_output=True, text=True)


needs_mbind = pytest.mark.skipif(forbidden_calls.MBIND < 0, reason="mbind's number is not known here")
PACKED = """
import torch
from tandem.kernels.cpu import PackedExperts, WorkerPool, Workspace

def product(pool):
    g, layer = torch.Generator().manual_seed(1), PackedExperts(Workspace(pool, "scalar"), 2, 512, 256)
    layer.load_all(0, [tuple(torch.randn(s, generator=g).bfloat16() for s in ((256, 512), (256, 512), (512, 256)))] * 2)
    x, ids = torch.ones(1, 512).bfloat16(), torch.tensor([[0, 1]]).int()
    return layer.forward(x, ids, torch.ones(1, 2), torch.zeros(1, 512))

bound = WorkerPool([-1, -1], 20, [0, 1], [0, 0])
"""


@needs_mbind
def test_a_filter_that_forbids_binding_is_seen() -> None:
    code = (
        "from tandem.machine.numa_binding import mbind_error; calls.forbid(calls.MBIND); print(mbind_error())"
    )
    assert child(code).stdout.strip() == FORBIDDEN


@needs_mbind
def test_packing_goes_on_under_such_a_filter() -> None:
    """The bits are those without it."""
    done = child(
        f"{PACKED}\nfree = product(bound); calls.forbid(calls.MBIND); assert free.equal(product(bound))"
    )
    assert done.returncode == 0, done.stderr


@needs_mbind
def test_packing_binds() -> None:
    """Else the test above could not fail."""
    assert (
        child(f"{PACKED}\ncalls.forbid(calls.MBIND, calls.KILL); product(bound)").returncode == -signal.SIGSYS
    )


def test_start_says_that_nothing_is_bound() -> None:
    two = machine(cores=8, nodes=2)
    said = [each for each in plan(replace(two, mbind_error=FORBIDDEN)).notices if "mbind" in each]
    assert len(said) == 1 and "--cap-add SYS_NICE" in said[0]
    assert not any("mbind" in each for each in plan(two).notices)
    assert not any("mbind" in each for each in plan(replace(machine(), mbind_error=FORBIDDEN)).notices)
