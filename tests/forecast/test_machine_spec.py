"""Machines from a few words, and how fast they are taken to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, machine
from tandem.errors import ConfigError
from tandem.machine.gpus import Gpu
from tandem.planner.forecast.machine_spec import MachineWish, assumed_text, wished_machine, wished_speeds
from tandem.planner.forecast.speeds import GPU_MODELS, MEASURED, Speeds, gpu_model, read_rate, read_size

HERE = Speeds().having(MEASURED, dram_gbps=44.0, cpu_flops=3e12, cpu_attention_flops=9e11)


def test_what_is_not_said_is_as_here() -> None:
    here = machine()
    assert wished_machine(MachineWish(), here) == here
    found = wished_machine(MachineWish(ram="256GB"), here)
    assert (found.total_memory, found.cores, found.tiers) == (256 * GIB, here.cores, here.tiers)
    assert 0.9 * 256 * GIB < found.available_memory < 256 * GIB
    speeds = wished_speeds(MachineWish(ram="256GB"), found, HERE)
    assert (speeds.dram_gbps, speeds.cpu_attention_flops) == (44.0, 9e11)


def test_another_machine() -> None:
    wish = MachineWish("4090, 24GB@1000GB/s", "512GiB", "300GB/s", 64, "amx", "25GB/s")
    found = wished_machine(wish, machine())
    assert [gpu.memory_bytes // GIB for gpu in found.gpus] == [24, 24] and found.gpu_missing == ()
    assert (found.max_threads, found.tiers[-1], found.total_memory) == (64, "amx", 512 * GIB)
    speeds = wished_speeds(wish, found, HERE)
    assert (speeds.dram_gbps, speeds.gpu_gbps, speeds.pcie_gbps) == (300.0, GPU_MODELS["4090"].gbps, 25.0)
    assert speeds.sources["dram_gbps"] == "given" and speeds.sources["cpu_flops"] == "assumed"
    assert speeds.cpu_flops > 10 * HERE.cpu_flops
    assert speeds.cpu_attention_flops == 0.0  # its tier's share, not this machine's
    second = replace(found, gpus=found.gpus[1:])
    assert wished_speeds(wish, second, HERE).gpu_gbps == 1000.0


@pytest.mark.parametrize("text", ["2x4090", "2 x 4090", "4090, 4090", "1X4090,4090"])
def test_several_of_a_gpu(text: str) -> None:
    found = wished_machine(MachineWish(gpus=text), machine())
    assert [(gpu.name, gpu.number) for gpu in found.gpus] == [("4090", 0), ("4090", 1)]


def test_no_gpu() -> None:
    here = replace(machine(), gpus=(Gpu("H100", 80 * GIB, 80 * GIB, ""),))
    found = wished_machine(MachineWish(gpus="none"), here)
    assert found.gpus == () and found.no_gpu == "--gpu none"


def test_measured_speeds_of_the_gpu_here_are_taken_for_it_alone() -> None:
    here = replace(machine(), gpus=(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 80 * GIB, ""),))
    measured = HERE.having(MEASURED, gpu_gbps=2900.0, gpu_flops=5e14)
    assert wished_speeds(MachineWish(), here, measured).gpu_gbps == 2900.0
    assert wished_speeds(MachineWish(), here, HERE).gpu_gbps == GPU_MODELS["h100"].gbps
    other = MachineWish(gpus="5090")
    assert wished_speeds(other, wished_machine(other, here), measured).gpu_gbps == GPU_MODELS["5090"].gbps


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"), ("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4060 Ti", "4060ti"), ("a100-40", "a10040"),
        ("L40", "l40"), ("NVIDIA GeForce RTX 3060", "3060"), ("3070ti", "3070ti"), ("4070 Ti", "4070ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "4070tisuper"), ("4080 super", "4080super"), ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("2080ti", None),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("rtx4090", "4090"), ("Tesla V100", None), ("24GB", None),
    ],
)  # fmt: skip
def test_gpus_by_name(name: str, key: str | None) -> None:
    assert gpu_model(name) == (None if key is None else GPU_MODELS[key])


def test_sizes_and_rates() -> None:
    assert read_size("24GB", "--gpu") == read_size("24 GiB", "--gpu") == read_size("24", "--gpu") == 24 * GIB
    assert read_size("1.5tb", "--ram") == 1536 * GIB
    assert read_rate("80GB/s", "--bandwidth") == read_rate("80", "--bandwidth") == 80.0
    for text in ("", "many", "-3GB", "0GB", "3 hours"):
        with pytest.raises(ConfigError, match="--ram .* is no size; try 256GB"):
            read_size(text, "--ram")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (MachineWish(isa="neon"), "--isa 'neon' is not known; these are: scalar, avx2"),
        (MachineWish(cores=0), "--cpu 0 is no number of cores"),
        (MachineWish(gpus="gtx"), "--gpu 'gtx' is not known; give its memory, as 24GB, or one of 3090, .*4090, "),
        (MachineWish(gpus="4090@fast"), "--gpu 'fast' is no size"),
        (MachineWish(gpus="1080"), "--gpu '1080': it is older than Ampere"),  # a name, and no 1080 GiB
        (MachineWish(gpus="2080ti"), "--gpu '2080ti': it is older than Ampere"),  # nor TiB
        (MachineWish(gpus="0x4090"), "--gpu '0x4090': a machine has 1 to 64 GPUs"),
        (MachineWish(gpus="99999999x4090"), "a machine has 1 to 64 GPUs"),
        (MachineWish(gpus="4090 laptop"), "--gpu '4090 laptop' is another one than .*give its memory"),
        (MachineWish(gpus="RX 7900 XTX"), "--gpu 'RX 7900 XTX': AMD makes it, .*CUDA .*--gpu none"),
        (MachineWish(gpus="2x7900xtx"), "--gpu '7900xtx': AMD makes it"),
        (MachineWish(gpus="MI300X"), "AMD makes it"),
        (MachineWish(gpus="arc b580"), "Intel makes it"),
        (MachineWish(gpus="M4 Max"), "Apple makes it"),
        (MachineWish(gpus="V100"), "'V100': it is older than Ampere, .*8.0"),
    ],
)
def test_what_cannot_be_read_names_its_flag(wish: MachineWish, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        wished_machine(wish, machine())


def test_what_is_not_said_of_a_machine_is_one_line() -> None:
    here = machine()
    for wish, parts in (
        (MachineWish("4090", "512GB"), ("4 cores (--cpu)", "(--isa): as on this machine", "(--bandwidth)", "(--pcie)")),
        (MachineWish("none", "32GB", "60GB/s", 8), ("avx2 (--isa)",)),
        (MachineWish(ram="32GB"), ("no GPU (--gpu)",)),
    ):  # fmt: skip
        host = wished_machine(wish, here)
        said = assumed_text(wish, host, wished_speeds(wish, host, None))
        assert said.startswith("Not said: ") and "\n" not in said and all(part in said for part in parts), said
    all_said = MachineWish("4090", "32GB", "60GB/s", 8, "AVX2", "25GB/s")
    host = wished_machine(all_said, here)
    assert assumed_text(all_said, host, wished_speeds(all_said, host, None)) == ""
    assert assumed_text(MachineWish(), here, wished_speeds(MachineWish(), here, None)) == ""
