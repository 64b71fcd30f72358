"""Limits of a container or a service, for `kt doctor`: GPUs, cores, pinned memory, system calls, folders."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from tandem.cli.doctor_checks import Finding, read_text
from tandem.errors import EngineError
from tandem.machine.machine import Machine, cores_of, cpu_list_text, parse_cpu_list
from tandem.planner.memory import gib

NVIDIA = "0x10de"  # PCI's number of the maker
DISPLAY = ("0x0300", "0x0302")  # PCI classes: VGA, 3D controller


def limits(machine: Machine, root: Path = Path("/")) -> Iterator[Finding]:
    """root: replaces `/` in tests."""
    boxed = in_container(root)
    if boxed:
        yield Finding("container", "yes")
    yield from _missing_gpu(machine, root, boxed)
    yield from _cpuset(machine, root, boxed)
    yield from _memory_nodes(root, boxed)
    yield _locked_memory(machine, boxed)
    yield _binding(machine)
    yield _shared_memory(root)
    yield from _meeting_place(boxed)


def in_container(root: Path = Path("/")) -> bool:
    """Docker and Podman leave a file; under others `/` is an overlay."""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    mounts = (line.split() for line in read_text(root / "proc/self/mounts").splitlines())
    overlay = any(words[1:3] == ["/", "overlay"] for words in mounts)
    return overlay or any(mark.exists() for mark in marks)


def _missing_gpu(machine: Machine, root: Path, boxed: bool) -> Iterator[Finding]:
    """An NVIDIA GPU on the bus or a loaded driver, which most containers see, or an image that is made for GPUs;
    and none that can be used."""
    if machine.gpus or "hides" in machine.no_gpu:
        return
    driver = (root / "proc/driver/nvidia/version").exists()
    present = driver or _on_the_bus(root)
    if not present and not (boxed and not machine.gpu_missing):
        return
    has = "this machine has one" if present else "packages for one are installed"
    name, value = "NVIDIA GPU", f"{has}, but nvidia-smi shows none"
    if boxed:
        why = "the container was started without it; the host needs the NVIDIA Container Toolkit"
        yield Finding(name, value, why, "docker run --gpus all …")
    elif driver:
        yield Finding(name, value, "its driver is loaded, but does not answer", "nvidia-smi")
    else:
        yield Finding(name, value, "its driver is not loaded", "sudo ubuntu-drivers install (then restart)")


def _on_the_bus(root: Path) -> bool:
    devices = (root / "sys/bus/pci/devices").glob("*")
    return any(
        read_text(device / "vendor") == NVIDIA and read_text(device / "class").startswith(DISPLAY)
        for device in devices
    )


def _cpuset(machine: Machine, root: Path, boxed: bool) -> Iterator[Finding]:
    online = parse_cpu_list(read_text(root / "sys/devices/system/cpu/online"))
    if not online:
        return
    every = len(cores_of(root, set(online)))
    if len(machine.cores) >= every:
        return
    value = f"{len(machine.cores)} of {every} physical cores"
    command = (
        f"docker run --cpuset-cpus {cpu_list_text(online)} …"
        if boxed
        else f"taskset -cp {cpu_list_text(online)} $$"
    )
    yield Finding("cpuset", value, "the others may not be used: widen it if that is too few", command)


def _memory_nodes(root: Path, boxed: bool) -> Iterator[Finding]:
    lines = (line.partition(":") for line in read_text(root / "proc/self/status").splitlines())
    allowed = next((value for name, _, value in lines if name == "Mems_allowed_list"), "")
    online = read_text(root / "sys/devices/system/node/has_memory")
    if not allowed or not online or set(parse_cpu_list(allowed)) >= set(parse_cpu_list(online)):
        return
    value = f"memory of NUMA nodes {allowed.strip()} of {online}"
    command = (
        f"docker run --cpuset-mems {online} …" if boxed else "systemctl show --property AllowedMemoryNodes"
    )
    yield Finding("memory nodes", value, "memory of the others may not be used", command)


def _locked_memory(machine: Machine, boxed: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "no limit")
    value = f"at most {gib(soft)}"
    if not machine.gpus:
        return Finding("locked memory", f"{value}; without a GPU nothing is locked")
    command = (
        "docker run --ulimit memlock=-1 …" if boxed else "ulimit -l unlimited (unit: LimitMEMLOCK=infinity)"
    )
    return Finding(
        "locked memory", value, "experts beside a GPU lie in pinned memory, which it may limit", command
    )


def _binding(machine: Machine) -> Finding:
    if not machine.mbind_error:
        return Finding("NUMA binding", "allowed")
    value = f"forbidden (mbind: {machine.mbind_error})"
    if len(machine.nodes) < 2:
        return Finding("NUMA binding", f"{value}; on one node it is not needed")
    fix = "weights lie where they are first touched: Docker's seccomp profile allows it with a capability"
    return Finding("NUMA binding", value, fix, "docker run --cap-add SYS_NICE …")


def _shared_memory(root: Path) -> Finding:
    """Ranks share memory that belongs to no file system, so Docker's 64 MiB are enough."""
    place = root / "dev/shm"
    if not place.is_dir():
        return Finding("shared memory", "none; Tandem needs none")
    size = gib(shutil.disk_usage(place).total)
    return Finding("shared memory", f"{size}; no larger --shm-size is needed, and no --ipc")


def _meeting_place(boxed: bool) -> Iterator[Finding]:
    """The folder in which the server and its engine meet: a container whose files are read-only may have none."""
    from tandem.server.endpoint import private_endpoint

    try:
        with private_endpoint():
            return
    except EngineError as error:
        command = "docker run --tmpfs /tmp …" if boxed else "export TMPDIR=/a/folder/to/write"
        yield Finding("temporary folder", "none can be written", str(error), command)
