"""A machine that one does not have, or this one with other parts: `--gpu 4090 --ram 256GB --cpu 32`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from tandem.errors import ConfigError
from tandem.machine.gpus import Gpu
from tandem.machine.links import GpuLinks
from tandem.machine.machine import TIERS, Core, Machine
from tandem.planner.forecast.speeds import (
    ASSUMED,
    CORE_FLOPS,
    DRAM_GBPS,
    GIB,
    GIVEN,
    GPU_FLOPS,
    GPU_GBPS,
    GPU_MODELS,
    PCIE_GBPS,
    GpuModel,
    Speeds,
    gpu_model,
    read_rate,
    read_size,
)

SYSTEM_BYTES, SYSTEM_SHARE = 2 * GIB, 0.03  # of RAM, what other programs keep: the larger of the two
GPU_FREE_SHARE = 0.97  # the driver keeps the rest
MOST_GPU_GIB = 1024  # no GPU has more
MOST_GPUS = 64
CAPABILITY = (8, 0)  # of a GPU whose name is not known
OTHER_MAKERS = {
    "AMD": r"^(amd|radeon|instinct|rx\d{3,4}|mi\d{2,3}[a-z]?$|[679]\d[05]0(xtx?|gre)|w7\d00|9070|ryzen|strix)",
    "Intel": r"^(intel|arc|[ab]\d{3}$|b60$|gaudi|max\d{4})", "Apple": r"^(apple|m[1-5](pro|max|ultra)?$)",
    "Huawei": r"^(huawei|ascend)", "Google": r"^tpu",
}  # fmt: skip
OLD_NAMES = (  # of NVIDIA's
    r"^(nvidia)?(geforce)?(gtx\d{3,4}|(rtx)?20[678]0(ti|super)?$|10[5678]0(ti)?$|16[56]0|titan|[vp]100|p40?$|t4$|k80)"
)
ANY_VERSION = "999.0"  # of packages: they can be installed on the machine that is asked about


@dataclass(frozen=True, slots=True)
class MachineWish:
    """Flags that describe another machine, as typed; None: as this machine is.

    gpus: names or sizes, with commas between; "2x4090"; "none".
    """

    gpus: str | None = None
    ram: str | None = None
    bandwidth: str | None = None
    cores: int | None = None
    isa: str | None = None
    pcie: str | None = None

    @property
    def other_cpu(self) -> bool:
        """Whether this machine's CPU says nothing of that one's speed."""
        return self.cores is not None or self.isa is not None

    @property
    def other_gpu(self) -> bool:
        return self.gpus is not None

    @property
    def anything(self) -> bool:
        return self != MachineWish()


def wished_machine(wish: MachineWish, here: Machine) -> Machine:
    """Raises ConfigError naming the flag that cannot be read."""
    machine = here
    if wish.other_cpu:
        machine = _with_cpu(wish, machine)
    if wish.ram is not None:
        total = read_size(wish.ram, "--ram")
        free = total - system_bytes(total)
        machine = replace(machine, total_memory=total, available_memory=max(0, free))
    if wish.gpus is not None:
        gpus = _gpus(wish.gpus, wish.pcie or "PCIe")
        no_gpu = "" if gpus else "--gpu none"
        machine = replace(machine, gpus=gpus, links=GpuLinks(), no_gpu=no_gpu, gpu_missing=())
    return replace(machine, torch=ANY_VERSION, flashinfer=ANY_VERSION) if wish.anything else machine


def system_bytes(total: int) -> int:
    """Bytes of RAM that other programs keep, on a machine that is only described. total: bytes of all its RAM."""
    return max(SYSTEM_BYTES, int(total * SYSTEM_SHARE))


def wished_speeds(wish: MachineWish, machine: Machine, here: Speeds | None) -> Speeds:
    """here: as measured on this machine; None: nothing was. What is neither said nor measured is assumed."""
    tier = machine.tiers[-1]
    speeds = Speeds().having(
        ASSUMED, dram_gbps=DRAM_GBPS, cpu_flops=CORE_FLOPS[tier] * machine.max_threads, pcie_gbps=PCIE_GBPS
    )
    if here is not None and not wish.other_cpu:
        for name in ("dram_gbps", "cpu_flops", "cpu_attention_flops"):
            speeds = _as_read(speeds, here, name)
    if wish.bandwidth is not None:
        speeds = speeds.having(GIVEN, dram_gbps=read_rate(wish.bandwidth, "--bandwidth"))
    if machine.gpus:
        speeds = _gpu_speeds(wish, machine.gpus[0], speeds, here)
    if wish.pcie is not None:
        speeds = speeds.having(GIVEN, pcie_gbps=read_rate(wish.pcie, "--pcie"))
    return speeds


def assumed_text(wish: MachineWish, machine: Machine, speeds: Speeds) -> str:
    """Parts of a described machine that no flag names, with the flag for each; "": nothing was described."""
    if not wish.anything:
        return ""
    here, bus = [], speeds.sources.get("pcie_gbps", ASSUMED)
    if wish.cores is None:
        here.append(f"{machine.max_threads} cores (--cpu)")
    if wish.isa is None:
        here.append(f"{machine.tiers[-1]} (--isa)")
    if wish.ram is None:
        here.append(f"{machine.total_memory / GIB:.0f} GiB of RAM (--ram)")
    if wish.gpus is None:
        here.append(f"{', '.join(gpu.name for gpu in machine.gpus) or 'no GPU'} (--gpu)")
    rates = []
    if wish.bandwidth is None:
        rates.append(f"RAM {speeds.dram_gbps:.0f} GB/s, {speeds.sources.get('dram_gbps', ASSUMED)} (--bandwidth)")
    if machine.gpus and wish.pcie is None:
        rates.append(f"bus {speeds.pcie_gbps:.0f} GB/s, {bus} (--pcie)")
    parts = [f"{', '.join(here)}: as on this machine"] if here else []
    return f"Not said: {'; '.join([*parts, *rates])}" if parts or rates else ""


def _gpu_speeds(wish: MachineWish, gpu: Gpu, speeds: Speeds, here: Speeds | None) -> Speeds:
    if not wish.other_gpu and here is not None and here.gpu_gbps:
        for name in ("gpu_gbps", "gpu_flops", "pcie_gbps", "kernel_seconds", "launch_seconds"):
            speeds = _as_read(speeds, here, name)
        return speeds
    known = gpu_model(gpu.name)
    if known is None:
        speeds = speeds.having(ASSUMED, gpu_gbps=GPU_GBPS, gpu_flops=GPU_FLOPS)
    else:
        speeds = speeds.having("the maker's", gpu_gbps=known.gbps, gpu_flops=known.flops)
    _, _, rate = gpu.name.partition("@")
    return speeds.having(GIVEN, gpu_gbps=read_rate(rate, "--gpu")) if rate else speeds


def _as_read(speeds: Speeds, here: Speeds, name: str) -> Speeds:
    return speeds.having(here.sources.get(name, ASSUMED), **{name: getattr(here, name)})


def _with_cpu(wish: MachineWish, here: Machine) -> Machine:
    tiers = here.tiers
    if wish.isa is not None:
        isa = wish.isa.lower()
        if isa not in TIERS:
            raise ConfigError(f"--isa {wish.isa!r} is not known; these are: {', '.join(TIERS)}")
        tiers = TIERS[: TIERS.index(isa) + 1]
    count = len(here.cores) if wish.cores is None else wish.cores
    if count < 1:
        raise ConfigError(f"--cpu {count} is no number of cores; try 16")
    cores = tuple(Core(cpu, 0, 0) for cpu in range(count)) if wish.cores is not None else here.cores
    quota = None if wish.cores is not None else here.cpu_quota
    model = f"{count} cores, {tiers[-1]}"
    return replace(here, cpu_model=model, cores=cores, tiers=tiers, cpu_quota=quota, mbind_error="")


def _gpus(text: str, pcie: str) -> tuple[Gpu, ...]:
    if text.strip().lower() in ("none", "no", "0"):
        return ()
    words = [word for part in text.split(",") for word in _each(part.strip())]
    return tuple(_gpu(word, number, pcie) for number, word in enumerate(words))


def _each(part: str) -> list[str]:
    """ "2x4090", "2 x 4090": two of them."""
    count, times, what = part.lower().partition("x")
    several = bool(times) and count.strip().isdecimal() and bool(what.strip()) and not _of_another_maker(part)
    if not several:
        return [part]
    number = int(count)
    if not 1 <= number <= MOST_GPUS:
        raise ConfigError(f"--gpu {part!r}: a machine has 1 to {MOST_GPUS} GPUs")
    return [part[len(count) + 1 :].strip()] * number


def _gpu(word: str, number: int, pcie: str) -> Gpu:
    """A size, a name of the table, or either with @ and its memory's speed."""
    what, _, rate = word.partition("@")
    if rate:
        read_rate(rate, "--gpu")
    known = gpu_model(what)
    if known is not None:
        return _gpu_of_model(what, known, number, pcie, rate)
    if why := _of_another_maker(what) or _too_old(what):
        raise ConfigError(f"--gpu {what!r}: {why}; plan without it: --gpu none")
    size = _gpu_gib(what)
    return _gpu_of_model(
        f"a GPU of {size:g} GiB", GpuModel(size, GPU_GBPS, GPU_FLOPS, CAPABILITY), number, pcie, rate
    )


def _of_another_maker(what: str) -> str:
    """Why a GPU that NVIDIA does not make is not used; "": it does, or nobody knows."""
    name = what.lower().replace(" ", "")
    maker = next((maker for maker, names in OTHER_MAKERS.items() if re.search(names, name)), "")
    return f"{maker} makes it, and the GPU kernels need CUDA (NVIDIA, Ampere or newer)" if maker else ""


def _too_old(what: str) -> str:
    """Likewise of NVIDIA's GPUs before Ampere."""
    old = re.search(OLD_NAMES, what.lower().replace(" ", ""))
    return "it is older than Ampere, whose instructions the GPU kernels need (compute capability 8.0)" if old else ""


def _gpu_gib(what: str) -> float:
    """GiB of a GPU's memory. Raises ConfigError for a GPU that is not known.

    The name of a GPU that is not in the table may look like a size: "1080", "2080ti".
    """
    try:
        size = read_size(what, "--gpu") / GIB
    except ConfigError:
        size = math.inf
    if size > MOST_GPU_GIB:
        names = ", ".join(GPU_MODELS)
        why = "is another one than the desktop's of the same name" if "laptop" in what.lower() else "is not known"
        raise ConfigError(f"--gpu {what!r} {why}; give its memory, as 24GB, or one of {names}")
    return size


def _gpu_of_model(name: str, model: GpuModel, number: int, pcie: str, rate: str) -> Gpu:
    total = int(model.gib * GIB)
    shown = f"{name}@{rate}" if rate else name
    return Gpu(shown, total, int(total * GPU_FREE_SHARE), pcie, number, "", model.capability)
