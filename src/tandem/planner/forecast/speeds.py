"""`Speeds`: how fast a machine reads and computes: measured, given by the user, or assumed; and which it was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tandem.errors import ConfigError

MEASURED, GIVEN, ASSUMED = "measured", "given", "assumed"

GIB = 1 << 30
_UNITS = {
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}

# Of one core that runs the tier, operations per second in bf16; common for CPUs of the 2020s.
CORE_FLOPS = {"scalar": 4e9, "avx2": 5e10, "avx512": 1e11, "avx512_bf16": 2e11, "amx": 1.2e12}
DRAM_GBPS = 60.0  # two channels of DDR5, as read by all cores
PCIE_GBPS = 25.0  # generation 4, 16 lanes
GPU_GBPS, GPU_FLOPS = 800.0, 1e14  # of a GPU that is not in the table
KERNEL_SECONDS = 1.1e-6  # a small kernel inside a CUDA graph that waits for the one before (an H100)
LAUNCH_SECONDS = 6.5e-6  # one of PyTorch outside of graphs: what the host takes (16 Xeon threads)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """GiB; GB/s of memory; dense bf16 products with float32 sums, operations per second; compute capability. All as the
    maker says."""

    gib: float
    gbps: float
    flops: float
    capability: tuple[int, int]


GPU_MODELS: Mapping[str, GpuModel] = {
    "3090": GpuModel(24, 936, 7.1e13, (8, 6)), "3090ti": GpuModel(24, 1008, 8e13, (8, 6)),
    "3060": GpuModel(12, 360, 2.5e13, (8, 6)), "3060ti": GpuModel(8, 448, 3.2e13, (8, 6)),
    "3070": GpuModel(8, 448, 4.1e13, (8, 6)), "3070ti": GpuModel(8, 608, 4.3e13, (8, 6)),
    "3080": GpuModel(10, 760, 5.9e13, (8, 6)), "3080ti": GpuModel(12, 912, 6.8e13, (8, 6)),
    "4060": GpuModel(8, 272, 3e13, (8, 9)), "4060ti": GpuModel(16, 288, 4.4e13, (8, 9)),
    "4070": GpuModel(12, 504, 5.8e13, (8, 9)), "4070super": GpuModel(12, 504, 7.1e13, (8, 9)),
    "4070ti": GpuModel(12, 504, 8e13, (8, 9)), "4070tisuper": GpuModel(16, 672, 8.8e13, (8, 9)),
    "4080": GpuModel(16, 717, 9.7e13, (8, 9)), "4080super": GpuModel(16, 736, 1.04e14, (8, 9)),
    "4090": GpuModel(24, 1008, 1.65e14, (8, 9)),
    "5060": GpuModel(8, 448, 3.8e13, (12, 0)), "5060ti": GpuModel(16, 448, 4.7e13, (12, 0)),
    "5070": GpuModel(12, 672, 6.2e13, (12, 0)), "5070ti": GpuModel(16, 896, 8.8e13, (12, 0)),
    "5080": GpuModel(16, 960, 1.13e14, (12, 0)), "5090": GpuModel(32, 1792, 2.1e14, (12, 0)),
    "a10": GpuModel(24, 600, 1.25e14, (8, 6)), "a10g": GpuModel(24, 600, 7e13, (8, 6)),
    "a10040": GpuModel(40, 1555, 3.12e14, (8, 0)), "a100": GpuModel(80, 2039, 3.12e14, (8, 0)),
    "a5000": GpuModel(24, 768, 5.6e13, (8, 6)), "a6000": GpuModel(48, 768, 7.7e13, (8, 6)),
    "l4": GpuModel(24, 300, 1.21e14, (8, 9)), "l20": GpuModel(48, 864, 1.2e14, (8, 9)),
    "l40": GpuModel(48, 864, 1.81e14, (8, 9)), "l40s": GpuModel(48, 864, 3.62e14, (8, 9)),
    "6000ada": GpuModel(48, 960, 1.82e14, (8, 9)), "pro6000": GpuModel(96, 1792, 2.5e14, (12, 0)),
    "h100": GpuModel(80, 3350, 9.89e14, (9, 0)), "h200": GpuModel(141, 4800, 9.89e14, (9, 0)),
    "b200": GpuModel(180, 8000, 2.25e15, (10, 0)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Speeds:
    """dram_gbps: reading, all threads. cpu_flops, gpu_flops: bf16, operations per second. cpu_attention_flops: of
    attention on the CPU; 0: not measured, its tier's share of cpu_flops. gpu_gbps: of GPU memory.
    pcie_gbps: from pinned memory. kernel_seconds, launch_seconds: of a small kernel inside and outside of a CUDA graph.
    sources: of each, where it comes from."""

    dram_gbps: float = DRAM_GBPS
    cpu_flops: float = CORE_FLOPS["avx2"]
    gpu_gbps: float = 0.0
    gpu_flops: float = 0.0
    pcie_gbps: float = 0.0
    kernel_seconds: float = KERNEL_SECONDS
    launch_seconds: float = LAUNCH_SECONDS
    cpu_attention_flops: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def having(self, source: str, **values: float) -> Speeds:
        """With these instead, which come from `source`."""
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})

    def of_rank(self, ranks: int) -> Speeds:
        """Speeds of one of several equal processes: the CPU and its memory are shared. Each has a GPU and a bus. RAM
        must feed all buses at once."""
        dram = self.dram_gbps / ranks
        return replace(
            self, dram_gbps=dram, cpu_flops=self.cpu_flops / ranks, pcie_gbps=min(self.pcie_gbps, dram),
            cpu_attention_flops=self.cpu_attention_flops / ranks,
        )  # fmt: skip


def gpu_model(name: str) -> GpuModel | None:
    """The table's entry for "NVIDIA GeForce RTX 4060 Ti", "H100 80GB HBM3", "4090": the longest that fits. A laptop's
    GPU is another one of the same name."""
    words = [word.removeprefix("rtx") for word in re.findall(r"[a-z0-9]+", name.lower())]
    if "laptop" in words:
        return None
    known = {"".join(words[i : i + count]) for i in range(len(words)) for count in (1, 2, 3)}
    names = [key for key in GPU_MODELS if key in known]
    return GPU_MODELS[max(names, key=len)] if names else None


def gpu_speed(name: str) -> float:
    """GB/s of the memory of a GPU, as its maker says."""
    known = gpu_model(name)
    return GPU_GBPS if known is None else known.gbps


def of_other_gpu(speeds: Speeds, name: str, other: str) -> Speeds:
    """speeds: of a machine whose GPU is called `name`, with another instead: as many times as fast as makers say."""
    if name == other:
        return speeds
    known, new = gpu_model(name), gpu_model(other)
    flops = (GPU_FLOPS if new is None else new.flops) / (GPU_FLOPS if known is None else known.flops)
    gbps = gpu_speed(other) / gpu_speed(name)
    return replace(speeds, gpu_gbps=speeds.gpu_gbps * gbps, gpu_flops=speeds.gpu_flops * flops)


def read_size(text: str, flag: str) -> int:
    """Bytes of "24GB"; memory is sold in powers of two, so GB are GiB. Raises ConfigError naming the flag."""
    value, unit = _split(text, flag, "256GB")
    return int(value * _UNITS[unit if unit.endswith("ib") else unit.replace("b", "ib")])


def read_rate(text: str, flag: str) -> float:
    """GB/s of "80GB/s". Raises ConfigError naming the flag."""
    value, unit = _split(text.lower().removesuffix("/s"), flag, "80GB/s")
    return value * _UNITS[unit] / 1e9


def _split(text: str, flag: str, example: str) -> tuple[float, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", text.strip().lower())
    unit = match[2] if match else ""
    unit = "gb" if unit in ("", "g") else unit if unit.endswith("b") else unit + "b"
    if match is None or unit not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"{flag} {text!r} is no size; try {example}")
    return float(match[1]), unit
