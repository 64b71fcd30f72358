"""`Gpu`: NVIDIA GPUs that this process may use, as nvidia-smi and CUDA_VISIBLE_DEVICES say."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.flags.env import visible_gpus

LEAST_CAPABILITY = (8, 0)  # Ampere: the kernels multiply bfloat16
MOST_HELD = 0.2  # of a GPU's memory: one of which other programs hold more is left to them
MIB = 1 << 20
_FIELDS = "index,uuid,name,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max,compute_cap,mig.mode.current"


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """Another process that is about to take memory of a GPU. left_bytes: that it will leave."""

    text: str  # "process 5, which loads NAME"
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as the driver reports it."""

    name: str
    memory_bytes: int
    free_bytes: int
    pcie: str  # "gen5 x16": the widest link it can have
    number: int = 0  # as nvidia-smi counts
    uuid: str = ""  # "GPU-…"; "": unknown
    capability: tuple[int, int] | None = None  # compute capability; None: unknown
    divided: bool = False  # in MIG mode: these are the whole GPU's sizes, and CUDA gives an instance of it
    holder: GpuHolder | None = None  # who is about to fill it; None: nobody that is known
    no_nvlink: bool = False  # between the ranks' GPUs, of which it is one, whatever is sold under its name

    @property
    def room(self) -> int:
        """Bytes that are free once its holder has taken what it plans."""
        return self.free_bytes if self.holder is None else min(self.free_bytes, self.holder.left_bytes)


def may_have_gpus() -> bool:
    """Without asking anybody."""
    return shutil.which("nvidia-smi") is not None


def detect_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The ones that may be used, the one to take first, and why there are none. nvidia-smi answers without creating a
    CUDA context in this process."""
    present, chosen = present_gpus(), visible_gpus()
    gpus = usable_gpus(present, chosen)
    if present and not gpus:
        return (), f"CUDA_VISIBLE_DEVICES={chosen} hides every GPU that nvidia-smi shows"
    return gpus, "" if gpus else "no GPU was found"


def usable_gpus(present: Iterable[Gpu], chosen: str | None) -> tuple[Gpu, ...]:
    """chosen: CUDA_VISIBLE_DEVICES, in its order: numbers or beginnings of UUIDs; as in CUDA, the first one that there
    is not ends the list. None: all of them, the one with the most free memory (in GiB) first."""
    present = tuple(present)
    if chosen is None:
        return emptiest_first(present)
    gpus: list[Gpu] = []
    for word in chosen.split(","):
        gpu = _named(present, word.strip())
        if gpu is None:
            break
        gpus.append(gpu)
    return tuple(dict.fromkeys(gpus))


def emptiest_first(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """By their room in GiB; equal ones stay as they are."""
    return tuple(sorted(gpus, key=lambda gpu: -(gpu.room >> 30)))


def _named(present: tuple[Gpu, ...], word: str) -> Gpu | None:
    if word.isdecimal():
        return next((gpu for gpu in present if gpu.number == int(word)), None)
    if not word.startswith("GPU-"):
        return None
    matches = [gpu for gpu in present if gpu.uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None


def present_gpus() -> tuple[Gpu, ...]:
    """All that nvidia-smi shows, also those that CUDA_VISIBLE_DEVICES hides."""
    return parse_nvidia_smi(ask_nvidia_smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"))


def ask_nvidia_smi(*arguments: str) -> str:
    """Its answer, "" where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""  # a driver that does not answer is a machine without usable GPUs


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Lines of "index, UUID, name, total MiB, free MiB, PCIe generation, PCIe width, compute capability", and the MIG
    mode."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(_gpu(row) for row in rows if len(row) in (8, 9) and all(row[i].isdecimal() for i in (0, 3, 4)))


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, total, free, generation, width, capability, *mig = row
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
    pcie, divided = f"gen{generation} x{width}", mig == ["Enabled"]
    return Gpu(name, int(total) * MIB, int(free) * MIB, pcie, int(index), uuid, known, divided)


def is_new_enough(gpu: Gpu) -> bool:
    return gpu.capability is None or gpu.capability >= LEAST_CAPABILITY


def is_free(gpu: Gpu) -> bool:
    """True if a GPU is not in MIG mode, and other programs hold at most MOST_HELD of its memory, or will."""
    return not gpu.divided and gpu.room >= (1 - MOST_HELD) * gpu.memory_bytes


def equals(one: Gpu, other: Gpu) -> bool:
    """Whether both compute the same bits in the same time."""
    return (one.name, one.capability) == (other.name, other.capability)


def kinds_of(gpus: Iterable[Gpu]) -> list[tuple[Gpu, ...]]:
    """Equal ones together, in the order of their first."""
    kinds: dict[tuple[str, tuple[int, int] | None], list[Gpu]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.capability), []).append(gpu)
    return [tuple(kind) for kind in kinds.values()]


def most_equal(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """The most that equal each other, the first of several such kinds; (): there is no GPU."""
    return max(kinds_of(gpus), key=len, default=())


def too_old(gpu: Gpu) -> str:
    """The refusal of one that is not."""
    has, least = (".".join(map(str, pair)) for pair in (gpu.capability or (0, 0), LEAST_CAPABILITY))
    return f"{gpu.name} has compute capability {has}; the GPU kernels need {least} (Ampere, for bfloat16) or newer"
