"""`kt doctor`: every problem that it finds comes with the command that mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plans import GIB, machine
from tandem.bench import probes
from tandem.bench.probes import GpuSpeeds
from tandem.cli import doctor_tables
from tandem.cli.app import app
from tandem.cli.doctor_checks import (
    Finding,
    hardware,
    link_gbps,
    network,
    settings,
    software,
    speeds_found,
    storage,
)
from tandem.machine.gpus import Gpu
from tandem.machine.machine import Core, Machine
from tandem.planner.forecast.speeds import Speeds

POOR = Machine("Old CPU", (Core(0, 0, 0), Core(1, 0, 0)), ("scalar",), 1 << 30, 1 << 29, cpu_quota=1.0)
GPU = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, "gen5 x16", capability=(9, 0))
RICH = replace(machine(cores=8, nodes=2), gpus=(GPU,))


def by_name(found: object) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}  # type: ignore[attr-defined]


def problems(found: object) -> set[str]:
    all_found = list(found)  # type: ignore[call-overload]
    assert all(bool(finding.fix) == bool(finding.command) for finding in all_found)
    return {finding.name for finding in all_found if finding.fix}


def test_a_poor_machine() -> None:
    found = by_name(hardware(POOR))
    assert problems(found.values()) == {"instruction sets", "cores", "memory"}
    assert "AVX2" in found["instruction sets"].fix and "--cpus 2" in found["cores"].command
    assert "2 GiB" in found["memory"].fix and not found["GPU"].fix


def test_a_machine_that_is_well() -> None:
    assert problems(hardware(RICH)) == set()


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        (replace(GPU, capability=(7, 5)), "too old"),
        (replace(GPU, free_bytes=GIB), "other programs hold most of its memory"),
    ],
)
def test_gpus_that_cannot_serve(gpu: Gpu, says: str) -> None:
    found = by_name(hardware(replace(RICH, gpus=(gpu,))))
    assert says in found["GPU 0"].fix and found["GPU 0"].command


def test_other_gpus_are_mentioned() -> None:
    found = by_name(hardware(replace(RICH, gpus=(GPU, replace(GPU, number=1)))))
    assert "idle without --tp" in found["GPU 1"].value and not found["GPU 1"].fix
    found = by_name(hardware(replace(RICH, gpus=(GPU, replace(GPU, number=1, name="L40")))))
    assert "not used: another kind" in found["GPU 1"].value and not found["GPU 1"].fix
    found = by_name(hardware(replace(RICH, gpus=(GPU, *(replace(GPU, number=i, name="L40") for i in (1, 2))))))
    assert "idle without --tp" in found["GPU 2"].value


def test_packages_that_a_gpu_lacks() -> None:
    lacking = replace(RICH, gpu_missing=("PyTorch built for CUDA", "triton", "cuda-core"))
    found = by_name(software(lacking))
    assert {"PyTorch built for CUDA", "triton", "cuda-core"} <= problems(found.values())
    assert all(found[name].command.startswith("pip install") for name in lacking.gpu_missing)
    assert "GPU packages" in by_name(software(RICH)) and "triton" not in by_name(software(machine()))


def test_settings_that_make_it_slow(tmp_path: Path) -> None:
    values = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
        "proc/sys/kernel/numa_balancing": "1",
    }
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(value)
    bad = {"large pages", "CPU frequency", "NUMA balancing"}
    assert problems(settings(RICH, tmp_path)) >= bad
    assert "NUMA balancing" not in problems(settings(machine(), tmp_path))
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never")
    (tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver").write_text("amd-pstate-epp")
    assert problems(settings(machine(), tmp_path)) & bad == set()


def speeds(**values: float) -> Speeds:
    usual = {"dram_gbps": 100.0, "cpu_flops": 1e12, "gpu_gbps": 3000.0, "gpu_flops": 6e14, "pcie_gbps": 55.0}
    return Speeds().having("measured", **(usual | values))


@pytest.mark.parametrize(
    ("slow", "problem"),
    [({}, set()), ({"dram_gbps": 9.0}, {"memory speed"}), ({"gpu_gbps": 900.0}, {"GPU memory"}),
     ({"pcie_gbps": 12.0}, {"PCIe"})],
)  # fmt: skip
def test_speeds_are_held_against_what_the_parts_can_do(slow: dict[str, float], problem: set[str]) -> None:
    found = by_name(speeds_found(RICH, speeds(**slow), 54.0))
    assert problems(found.values()) == problem
    assert "54.0 back" in found["PCIe"].value


def test_links() -> None:
    assert [round(link_gbps(text)) for text in ("gen5 x16", "gen4 x16", "gen3 x8", "PCIe", "gen? x16")] == [
        63,
        32,
        8,
        0,
        0,
    ]


def test_the_whole_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "cpu_speeds", lambda _machine, _tier: speeds(dram_gbps=5.0))
    monkeypatch.setattr(probes, "gpu_speeds", lambda: GpuSpeeds(3000.0, 55.0, 54.0, 6e14, 1e-6, 1e-5))
    monkeypatch.setattr(Machine, "detect", lambda: RICH)
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0, shown.output
    assert "5.0 GB/s read" in shown.stdout and "55.0 GB/s to the GPU" in shown.stdout
    assert "! memory speed: decoding is bound by it" in shown.stdout and "    sudo dmidecode" in shown.stdout
    assert problems(storage()) <= {"demo model"} and len(list(network())) == 1


@pytest.mark.parametrize(("enabled", "words"), [("always [madvise] never", "with large"), ("[never]", "without large")])
def test_tables_have_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str, words: str) -> None:
    (tmp_path / "enabled").write_text(enabled)
    monkeypatch.setattr(doctor_tables, "LARGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(doctor_tables, "reads_past_cache", lambda folder: False)
    (line,) = doctor_tables.tables()
    assert words in line.value and "--tables disk does not work below" in line.value and not line.fix
