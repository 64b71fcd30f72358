"""What `kt doctor` says of several GPUs, from what nvidia-smi prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plans import GIB, machine
from tandem.cli.doctor_checks import Finding
from tandem.cli.doctor_gpus import several_gpus
from tandem.machine.gpus import Gpu, usable_gpus
from tandem.machine.links import GpuLinks, topology
from tandem.machine.machine import Machine

UNDERLINED = "\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
TOPOLOGY = f"""\t{UNDERLINED}
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
PEERS = """ \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tCNS\t
 GPU2\tCNS\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""
ALL_PEERS = PEERS.replace("CNS", "OK")
GPUS = tuple(Gpu("NVIDIA H200", 140 * GIB, 139 * GIB, "gen5 x16", i, f"GPU-{i}", (9, 0)) for i in range(3))


def found(gpus: tuple[Gpu, ...], peers: str = PEERS, mig: str = "", present: tuple[Gpu, ...] = GPUS) -> list[Finding]:
    def ask(*words: str) -> str:
        if words[0] == "topo":
            return peers if "-p2p" in words else TOPOLOGY
        return mig

    host: Machine = replace(machine(), gpus=gpus)
    return list(several_gpus(host, ask, present))


def values(findings: list[Finding], name: str) -> list[str]:
    return [each.value for each in findings if each.name == name]


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_matrices_of_nvidia_smi() -> None:
    assert topology(TOPOLOGY)[0, 1] == "NV18" and topology(TOPOLOGY)[2, 0] == "SYS" and topology(PEERS)[1, 2] == "CNS"
    assert len(topology(TOPOLOGY)) == len(topology(PEERS)) == 9
    assert topology("") == topology("Unable to determine the device handle") == {}


def test_one_gpu_has_no_links() -> None:
    assert found(GPUS[:1]) == []


def test_links_and_peers_are_named_by_pairs() -> None:
    all_three = found(GPUS)
    assert values(all_three, "GPU links") == ["0-1: NVLink, 18 links", "0-2, 1-2: PCIe and the link of CPU sockets"]
    (peers,) = values(all_three, "GPU peers")
    assert peers.startswith("not 0-2, 1-2 (the chipset cannot): ranks sum through CPU memory")
    assert values(found(GPUS, ALL_PEERS), "GPU peers") == ["all; a start of ranks tries them"]
    assert values(found(GPUS[:2]), "GPU peers") == ["all; a start of ranks tries them"]
    assert not any(each.fix for each in all_three)


def test_links_that_the_machine_has_are_not_asked_for_again() -> None:
    host = replace(machine(), gpus=GPUS[:2], links=GpuLinks({(0, 1): "PIX"}, {(0, 1): "OK"}))
    assert values(list(several_gpus(host, lambda *_: "", GPUS)), "GPU links") == ["0-1: a PCIe switch"]


def test_a_driver_that_does_not_say_is_no_news() -> None:
    silent = list(several_gpus(replace(machine(), gpus=GPUS), lambda *_: "", GPUS))
    assert [each.name for each in silent] == ["ranks"]


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        (GPUS, "--tp 2: 3 GPUs are equal (NVIDIA H200)"),
        (tuple(replace(GPUS[0], number=i) for i in range(9)), "--tp 2 or 4 or 8: 9 GPUs are equal"),
        ((GPUS[0], replace(GPUS[1], name="NVIDIA L40")), "none: a model is divided among equal GPUs"),
        ((replace(GPUS[0], name="NVIDIA L4"), *GPUS[1:]), "--tp 2: 2 GPUs are equal (NVIDIA H200)"),
    ],
)
def test_how_many_ranks_there_can_be(gpus, says) -> None:
    (value,) = values(found(gpus), "ranks")
    assert value.startswith(says)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ("2,0", "2,0: GPUs 2, 0, in the order of ranks; hidden: GPU 1 (NVIDIA H200)"),
        ("0,1,2", "0,1,2: GPUs 0, 1, 2, in the order of ranks"),
        ("MIG-1", "MIG-1: GPUs none, in the order of ranks; hidden: GPU 0 (NVIDIA H200), GPU 1 (NVIDIA H200), GPU 2 "),
    ],
)
def test_the_choice_of_gpus_is_said(monkeypatch: pytest.MonkeyPatch, chosen: str, says: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    (value,) = values(found(usable_gpus(GPUS, chosen)), "CUDA_VISIBLE_DEVICES")
    assert value.startswith(says)
    assert values(found(()), "CUDA_VISIBLE_DEVICES")


def test_instances_are_a_problem_with_a_command() -> None:
    (mig,) = [each for each in found(GPUS, mig="0, Disabled\n1, Enabled\n2, [N/A]\n") if each.name == "MIG"]
    assert mig.value.startswith("GPU 1 ") and "ranks need whole GPUs" in mig.fix
    assert mig.command == "sudo nvidia-smi -i 1 -mig 0"
    assert not [each for each in found(GPUS, mig="0, Disabled\n1, [N/A]\n") if each.name == "MIG"]
